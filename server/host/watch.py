"""`python -m server.host.watch`: the watchdog process, which ends a process whose event loop hangs. See `server.host.watchdog`.

It is a separate process because a thread that never releases the GIL stops every other Python thread. And only from outside
can a hang be distinguished from a pause: /proc says that a process is stopped (SIGSTOP, a debugger), and a pause of everything
(a frozen container, a virtual machine that migrates) pauses this process as well.
"""

import ctypes
import json
import logging
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from . import logs
from .leaving import NEEDS_RESTART

log = logging.getLogger("greenlane.watchdog")

STACKS = signal.SIGUSR1
"""The signal that makes a thread of the watched process write its stack."""

EXIT = signal.SIGUSR2
"""The signal that ends the watched process, with its number as status, where SIGKILL does not: see `last_signal`."""

_BEATS = 8
"""Heartbeats in the time after which silence is a hang, at least; there is at least one a second."""
_PAUSE = 3.0
"""If more seconds than this pass between two looks, this process was not running itself."""
_WRITING = 1.0
"""Seconds for writing all stacks."""
_WRITING_ONE = 0.1
"""Seconds for writing one stack."""
_ENDING = 5.0
"""Seconds for the process to exit before it is killed."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The process to watch: its id, how many seconds of silence are a hang, how to log, and the queue that ends it, or -1."""

    pid: int
    limit: float
    log_format: str
    log_level: str
    queue: int

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def interval(limit: float) -> float:
    """Seconds between two heartbeats, and between two looks for them, where silence of `limit` seconds is a hang."""
    return min(1.0, limit / _BEATS)


def last_signal(pid: int) -> int:
    """The signal that ends a process whatever it does. The first process of a container gets no signal from inside that
    it has no handler for, SIGKILL included (pid_namespaces(7)), so `Watchdog` gives that one a handler of EXIT.
    """
    return EXIT if pid == 1 else signal.SIGKILL


class Silence:
    """For how long there was no heartbeat, without the time in which the watched process or this one was not running."""

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._last = now
        self._total = 0.0

    def end(self, now: float) -> None:
        """There was a heartbeat at this time, in seconds."""
        self._last, self._total = now, 0.0

    def is_too_long(self, now: float, stopped: bool) -> bool:
        """Whether the silence has lasted for too long at this time; `stopped` says that the process is stopped now."""
        step, self._last = now - self._last, now
        if not stopped and step < _PAUSE:
            self._total += step
        return self._total >= self._limit


def main() -> int:
    """Watch until the other process ends; end it if it hangs."""
    for number in (signal.SIGINT, signal.SIGTERM):  # They are for the watched process.
        signal.signal(number, signal.SIG_IGN)
    watched = Watched(**json.loads(sys.argv[1]))
    logs.configure(watched.log_format, watched.log_level)
    silence = Silence(watched.limit, time.monotonic())
    while (beat := _wait_for_heartbeat(interval(watched.limit))) is not False:
        now = time.monotonic()
        if beat:
            silence.end(now)
        elif silence.is_too_long(now, _is_stopped(watched.pid)) and _end(watched):
            return 0
    return 0


def write_stacks(pid: int, until: float) -> None:
    """Make the threads of a process write their stacks to standard error, one after another, until this time.

    Each writes its own. A thread that walks the frames of another, running thread crashes the process once in some hundred
    dumps, as faulthandler's dump of all threads does (Python 3.11). A thread that is interrupted while it enters a function may
    still crash, so this waits for each to sleep, and leaves those that never do for last. Threads of libraries write nothing.
    """
    libc = ctypes.CDLL(None)
    for thread in sorted(_threads(pid), key=lambda thread: not _sleeps(pid, thread)):
        if time.monotonic() < until and not _is_busy_with_signal(pid, thread):
            with suppress(OSError):
                os.write(2, f"Thread {thread} ({Path(f'/proc/{pid}/task/{thread}/comm').read_text().strip()}):\n".encode())
            end = min(until, time.monotonic() + _WRITING_ONE)
            while not _sleeps(pid, thread) and time.monotonic() < end - _WRITING_ONE / 2:
                time.sleep(0.0005)
            libc.tgkill(pid, thread, STACKS)
            while _is_busy_with_signal(pid, thread) and time.monotonic() < end:
                time.sleep(0.0005)


def _threads(pid: int) -> list[int]:
    """Its threads, the first one first; none once it has ended."""
    with suppress(OSError):
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    return []


def _sleeps(pid: int, thread: int) -> bool:
    return _state(Path(f"/proc/{pid}/task/{thread}/stat")) != "R"


def _is_busy_with_signal(pid: int, thread: int) -> bool:
    """Whether STACKS is pending for a thread, or blocked, as while its handler runs: see proc(5)."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "SigBlk:"))]
        return any(mask >> (STACKS - 1) & 1 for mask in masks)
    return False


def _wait_for_heartbeat(seconds: float) -> bool | None:
    """True for a heartbeat, None if there was none for this many seconds, False once the other process has ended."""
    if not select.select([0], [], [], seconds)[0]:
        return None
    return bool(os.read(0, 1 << 12))


def _is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or a debugger stopped it."""
    return _state(Path(f"/proc/{pid}/stat")) in ("T", "t")


def _state(stat: Path) -> str:
    """Field 3 of /proc/PID/stat, or of a thread's; empty once it has ended."""
    with suppress(OSError):
        return stat.read_text().rpartition(")")[2].split()[0]
    return ""


def _end(watched: Watched) -> bool:
    """Make it write its stacks, then end it. False if a heartbeat comes meanwhile, so that it goes on."""
    log.critical(
        "the event loop of process %d has not run for %g s: something holds the GIL, or blocks the loop. The stacks of its "
        "threads follow; then it %s",
        watched.pid,
        watched.limit,
        f"exits with status {NEEDS_RESTART}" if watched.queue >= 0 else "is ended by a signal",
    )
    begun = time.monotonic()
    write_stacks(watched.pid, begun + _WRITING)
    if _wait_for_heartbeat(max(0.0, begun + _WRITING - time.monotonic())):
        log.error("the event loop of process %d runs again; it is not ended", watched.pid)
        return False
    if watched.queue >= 0:
        ctypes.CDLL(None).mq_send(watched.queue, b"x", 1, 0)
        if _wait_for_heartbeat(_ENDING) is False:
            return True
    with suppress(ProcessLookupError):
        os.kill(watched.pid, last_signal(watched.pid))
    return True


if __name__ == "__main__":
    sys.exit(main())
