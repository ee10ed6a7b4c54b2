"""The servers that experiments start: which Python runs them, and on which cores."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.cases import Case, check, request
from benchmarks.overhead import experiment

CASE = Case("identity", "binary", 1)


@pytest.mark.parametrize(("asgi", "keeps"), [(False, True), (True, False)])
def test_the_greenlane_that_is_measured_may_be_of_another_checkout_and_servers_keep_to_their_cores(
    tmp_path: Path, asgi: bool, keeps: bool
) -> None:
    checkout, mine = tmp_path / "compiled", os.sched_getaffinity(0)
    checkout.mkdir()
    (checkout / ".venv").symlink_to(sys.prefix)
    own = {min(mine)} if keeps else set()

    with experiment(asgi=asgi, measured=checkout, server_cores=own) as both:
        check(CASE, *both.first.ask(request(CASE)), both.root)
        command = Path(f"/proc/{both.first.pid}/cmdline").read_bytes().split(b"\0")
        if keeps:
            assert [os.sched_getaffinity(server.pid) for server in (both.first, both.second)] == [own] * 2
        assert os.sched_getaffinity(0) == mine - own, "the client keeps to the others"

    assert os.sched_getaffinity(0) == mine
    assert (both.first.name, both.second.name) == ("compiled", "bare")
    assert command[:4] == [os.fsencode(checkout / ".venv/bin/python"), b"-P", b"-m", b"uvicorn" if asgi else b"server"]
    assert not asgi or command[-3:-1] == [b"--app-dir", os.fsencode(checkout / ".venv")]
