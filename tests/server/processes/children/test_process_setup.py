"""What a process does first, as far as the test's own process can bear it."""

import logging
import resource

from server.processes.children.process_setup import ProcessName, raise_descriptor_limit


def record(**extra: str) -> logging.LogRecord:
    found = logging.LogRecord("greenlane", logging.WARNING, "file", 1, "text", (), None)
    found.__dict__.update(extra)
    return found


def test_records_without_a_tenant_get_the_process_name() -> None:
    signature = ProcessName("acme")
    for given, expected in ((record(), "acme"), (record(tenant="-"), "acme"), (record(tenant="globex"), "globex")):
        assert signature.filter(given)
        assert given.__dict__["tenant"] == expected


def test_a_process_may_have_as_many_connections_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
