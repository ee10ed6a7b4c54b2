"""A server whose supervisor hangs is not ready, logs the stacks of its threads, and exits with the status for a restart."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.watched_server import alive
from greenlane.load.server_process import ProcessStatus
from server.host.leaving import NEEDS_RESTART
from server.host.watch import write_stacks

from .harness import cores
from .processes import Running, configure, running, running_script, tenant
from .wire import client, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

BUSY = """
import asyncio, json, threading
from server.config.server import ServerConfig
from server.host.watchdog import Watchdog

def deep(left):
    return deep(left - 1) + 1 if left else len(str(left))

entered = threading.Barrier(7)

def busy():
    entered.wait()
    while True:
        deep(3)
        json.loads(json.dumps([1, 2, 3]))

async def main():
    Watchdog(ServerConfig(watchdog=600.0)).start()
    for _ in range(6):
        threading.Thread(target=busy, daemon=True).start()
    entered.wait()
    print("busy", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
KEEPS_THE_INTERPRETER = "mutex = ctypes.create_string_buffer(64); [ctypes.PyDLL(None).pthread_mutex_lock(mutex) for _ in '12']"
"""The second lock blocks for ever, and no signal interrupts it."""
BLOCKS_THE_LOOP = "loops[0].call_soon_threadsafe(time.sleep, 600)"

SERVER = """
import asyncio, ctypes, os, sys, threading, time, uvicorn
from server import __main__ as command
from server.control.controller import Controller
from server.host.leaving import leave

loops, start = [], Controller.start

async def remembered(runtime):
    loops.append(asyncio.get_running_loop())
    await start(runtime)

def hang_on_request():
    sys.stdin.readline()
    {how}

if __name__ == "__main__":
    Controller.start = remembered
    threading.Thread(target=hang_on_request, daemon=True).start()
    {serve}
"""
PROCESSES = 'leave(command.main(["--config", sys.argv[1]]))'
PLAIN = "os.environ['GREENLANE_CONFIG'] = sys.argv[1]; uvicorn.run('server.app:app', port=0)"


class Hanging(Running):
    """A server that hangs when `hang` is called."""

    def hang(self) -> None:
        assert self.popen.stdin
        self.popen.stdin.write("now\n")
        self.popen.stdin.flush()


@contextmanager
def hanging(folder: Path, config: Path, how: str, serve: str = PROCESSES) -> Iterator[Hanging]:
    with running_script(folder, SERVER.format(how=how, serve=serve), config, kind=Hanging) as server:
        yield server


def configured(folder: Path, repository: Path, watchdog: str, **server: str) -> Path:
    return configure(folder / "c.toml", repository, tenant("acme", "identity"), watchdog=f'"{watchdog}"', **server)


def watchers(server: Running) -> list[ProcessStatus]:
    return [one for one in server.family() if b"server.host.watch" in command_line(one.pid)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("how", [KEEPS_THE_INTERPRETER, BLOCKS_THE_LOOP], ids=["interpreter", "loop"])
def test_a_hung_process_is_not_ready_logs_its_stacks_and_exits(standard: Path, tmp_path: Path, how: str) -> None:
    with (
        hanging(tmp_path, configured(tmp_path, standard, "6s"), how) as server,
        client(server, "acme") as http,
        client(server) as anonymous,
    ):
        assert http.get("/v2/health/ready").status_code == 200
        family = server.family()
        server.hang()
        for asker in (http, anonymous):
            until(lambda asker=asker: asker.get("/v2/health/ready").status_code == 503)  # type: ignore[misc]
            assert "the supervisor has been silent for" in asker.get("/v2/health/ready").json()["error"]
            assert asker.get("/v2/health/live").status_code == 200
        assert server.popen.poll() is None, "it was to be not ready before it ended"
        assert server.wait() == NEEDS_RESTART == 70
        until(lambda: not alive(family))
        server.wait_for_log("The stacks of its threads follow; then it exits with status 70")
        server.wait_for_log("hang_on_request" if how == KEEPS_THE_INTERPRETER else "in main")


def test_a_hung_server_in_one_process_exits(standard: Path, tmp_path: Path) -> None:
    with hanging(tmp_path, configured(tmp_path, standard, "1s"), KEEPS_THE_INTERPRETER, PLAIN) as server:
        family = server.family()
        server.hang()
        assert server.wait() == NEEDS_RESTART
        until(lambda: not alive(family))
        server.wait_for_log("hang_on_request")


def test_a_stopped_process_continues_after_sigcont(standard: Path, tmp_path: Path) -> None:
    """As by a debugger, for longer than the watchdog's timeout."""
    with running(configured(tmp_path, standard, "1s")) as server, client(server, "acme") as http:
        until(lambda: len(watchers(server)) == 1)
        server.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        until(lambda: http.get("/v2/health/ready").status_code == 503)
        until(lambda: time.monotonic() - stopped > 2.5)
        server.signal(signal.SIGCONT)
        until(lambda: http.get("/v2/health/ready").status_code == 200)
        goes_on = time.monotonic()
        until(lambda: time.monotonic() - goes_on > 1.5)
        assert http.get("/v2/health/ready").status_code == 200
        assert not any("has not run for" in line for line in server.log)


def test_a_watchdog_that_ends_is_restarted(standard: Path, tmp_path: Path) -> None:
    with hanging(tmp_path, configured(tmp_path, standard, "2s"), KEEPS_THE_INTERPRETER) as server:
        until(lambda: len(watchers(server)) == 1)
        (first,) = watchers(server)
        os.kill(first.pid, signal.SIGKILL)
        server.wait_for_log("the watchdog ended (status -9); starting another")
        until(lambda: [one.pid for one in watchers(server)] not in ([], [first.pid]))
        server.hang()
        assert server.wait() == NEEDS_RESTART


def test_watchdog_0_starts_no_watchdog(standard: Path, tmp_path: Path) -> None:
    with running(configured(tmp_path, standard, "0s")) as server, client(server, "acme") as http:
        assert http.get("/v2/health/ready").status_code == 200
        assert not watchers(server)


def test_shutdown_does_not_wait_for_the_watchdog(standard: Path, tmp_path: Path) -> None:
    with running(configured(tmp_path, standard, "20s")) as server:
        until(lambda: len(watchers(server)) == 1)
        family = server.family()
        server.signal()
        assert server.wait() == 0
        until(lambda: not alive(family))
        assert not any("watchdog" in line for line in server.log)


def test_dumping_stacks_of_running_threads_repeatedly_does_not_crash_the_process(tmp_path: Path) -> None:
    """faulthandler's own dump of all threads crashed such a process once in a hundred times."""
    words = [sys.executable, "-c", BUSY]
    with (
        open(tmp_path / "stacks", "wb") as stacks,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stacks, text=True) as popen,
    ):
        try:
            assert popen.stdout
            assert popen.stdout.readline() == "busy\n"
            for _ in range(400):
                write_stacks(popen.pid, time.monotonic() + 30)
            assert popen.poll() is None
        finally:
            popen.kill()
    written = (tmp_path / "stacks").read_text()
    assert written.count("in busy") > 6 * 200, "most threads each time: a thread may be between two calls"
