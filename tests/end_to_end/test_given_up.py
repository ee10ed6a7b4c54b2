"""SIGTERM and SIGINT while a server starts, whatever that waits for: it ends as one that serves, and leaves nothing."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from greenlane.load.server_process import free_port

from .processes import Running, configure, running_apart, running_module, tenant
from .wire import until

SHARES = """
[device]
backend = "cpu"
cores = "0-1"
mps = "{mps}"
"""
SHARES += tenant("acme", "identity", http_processes=2) + tenant("globex", "identity")
DAEMON = "nvidia-cuda-mps"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for the server's temporary files, with a short path, as sockets need it."""
    with TemporaryDirectory(prefix="start-", dir="/tmp") as folder:
        yield Path(folder)


def left(temporary: Path) -> list[str]:
    """What there is of the server that has this folder: files, and processes by their commands."""
    found = os.listdir(temporary)
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # It has ended, or is another user's.
            if f"TMPDIR={temporary}".encode() in Path("/proc", process, "environ").read_bytes().split(b"\0"):
                found.append(Path("/proc", process, "cmdline").read_text())
    return found


def handles_signals(server: Running) -> bool:
    """Whether SIGTERM does not just end it."""
    status = Path(f"/proc/{server.popen.pid}/status").read_text()
    caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
    return bool(caught & 1 << signal.SIGTERM - 1)


@pytest.mark.parametrize(
    ("mps", "waits_for", "number"),
    [
        ("on", "forkserver", signal.SIGTERM),
        ("on", "look", signal.SIGINT),
        ("on", "daemon", signal.SIGTERM),
        ("on", "device", signal.SIGTERM),
        ("auto", "look", signal.SIGTERM),
        ("auto", "daemon", signal.SIGINT),
        ("auto", "device", signal.SIGTERM),
    ],
)
def test_a_start_is_given_up_and_nothing_is_left(
    mps: str, waits_for: str, number: signal.Signals, standard: Path, tmp_path: Path, temporary: Path
) -> None:
    config = configure(tmp_path / "c.toml", standard, SHARES.format(mps=mps), drain_grace='"60s"')
    os.mkfifo(gate := tmp_path / "gate")
    environment = {"TMPDIR": str(temporary)}
    environment |= {{"look": "HANG_OFF", "device": f"HANG_{mps.upper()}"}.get(waits_for, "OPEN"): str(gate)}
    behaviour = {"start": "silent"} if waits_for == "daemon" else {}
    with running_apart(config, environment=environment, signs=(), **behaviour) as server:
        until(lambda: handles_signals(server))
        if waits_for == "daemon":
            until(lambda: DAEMON in [one.name for one in server.family()])
        with ExitStack() as stack:
            if waits_for in ("look", "device"):
                stack.callback(os.close, os.open(gate, os.O_WRONLY))  # Which returns once the other end is open.
            server.signal(number)
            assert server.wait() == 0
            until(lambda: not left(temporary))
    log = "".join(server.log)
    assert "draining: not ready, new requests are refused in 0 s" in log
    assert "drained: every request was answered" in log
    assert "Traceback" not in log
    assert "Error" not in log


@pytest.mark.parametrize("mps", ["on", "auto"])
def test_a_server_that_is_killed_while_it_looks_at_a_gpu_that_hangs_leaves_no_process(
    mps: str, standard: Path, tmp_path: Path, temporary: Path
) -> None:
    config = configure(tmp_path / "c.toml", standard, SHARES.format(mps=mps))
    os.mkfifo(gate := tmp_path / "gate")
    environment = {"TMPDIR": str(temporary), "HANG_OFF": str(gate)}
    with running_apart(config, environment=environment, signs=()) as server, open(gate, "wb"):  # Once it is open there.
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        until(lambda: not left(temporary))


def answers(http: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        answer = http.get("/v2/health/ready")
        return (answer.status_code, answer.json()) == (503, {"error": "the server is starting"})
    return False


def test_a_server_says_that_it_starts_and_can_be_ended_while_it_looks_at_an_endless_repository(tmp_path: Path) -> None:
    models, port = tmp_path / "models", free_port()
    for name in map(str, range(12)):  # Links from each to all others are as many paths as are looked at of a model.
        (models / "first" / name).mkdir(parents=True)
        for other in map(str, range(12)):
            (models / "first" / name / other).symlink_to(f"../{other}")
    for name in map(str, range(1000)):
        (models / name).symlink_to("first")
    config = configure(tmp_path / "c.toml", models, tenant(), port=str(port), drain_timeout='"2s"')
    with (
        running_module("server", config, signs=()) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=1) as http,
    ):
        until(lambda: answers(http))
        server.signal()
        assert server.wait() == 0
    log = "".join(server.log)
    assert "drained: every request was answered" in log
    assert "Traceback" not in log
