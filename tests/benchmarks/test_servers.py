"""The servers that experiments start: which Python runs them, and on which cores."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.cases import Case, check, request
from benchmarks.models import build
from benchmarks.overhead import experiment
from benchmarks.servers import greenlane

CASE = Case("identity", "binary", 1)


def test_the_server_of_another_checkout_is_run_by_its_own_python(tmp_path: Path) -> None:
    checkout, root = tmp_path / "before", tmp_path / "models"
    checkout.mkdir()
    (checkout / ".venv").symlink_to(sys.prefix)
    build(root)

    with greenlane(root, None, checkout=checkout) as server:
        check(CASE, *server.ask(request(CASE)), root)
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")

    assert server.name == "before"
    assert command[:4] == [os.fsencode(checkout / ".venv/bin/python"), b"-P", b"-m", b"server"]


@pytest.mark.parametrize("asgi", [False, True])
def test_the_greenlane_that_is_measured_may_be_that_of_another_checkout(tmp_path: Path, asgi: bool) -> None:
    checkout = tmp_path / "compiled"
    checkout.mkdir()
    (checkout / ".venv").symlink_to(sys.prefix)

    with experiment(asgi=asgi, measured=checkout) as both:
        check(CASE, *both.first.ask(request(CASE)), both.root)
        command = Path(f"/proc/{both.first.pid}/cmdline").read_bytes().split(b"\0")

    assert (both.first.name, both.second.name) == ("compiled", "bare")
    assert command[:2] == [os.fsencode(checkout / ".venv/bin/python"), b"-P"]
    assert not asgi or command[-3:-1] == [b"--app-dir", os.fsencode(checkout / ".venv")]


def test_servers_keep_to_their_cores_and_the_client_to_the_others() -> None:
    mine = os.sched_getaffinity(0)
    first = min(mine)

    with experiment(server_cores=[first]) as both:
        assert [os.sched_getaffinity(server.pid) for server in (both.first, both.second)] == [{first}, {first}]
        assert os.sched_getaffinity(0) == mine - {first}

    assert os.sched_getaffinity(0) == mine
