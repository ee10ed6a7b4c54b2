"""`python -m server.host.watch`: the process that notices when another one hangs, and ends it; `server.watchdog` starts it.

It is a process of its own because a thread that holds the interpreter for ever leaves no other thread of Python a turn. And
only from outside can be seen that nobody hangs but the machine pauses: a process that is stopped (SIGSTOP, a debugger) says
so in /proc, and a pause of everything (a frozen container, a virtual machine that moves) is one of this process as well.
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
from .exit_codes import NEEDS_RESTART

log = logging.getLogger("greenlane.watchdog")

STACKS = signal.SIGUSR1
"""What makes a thread of a process that is watched write its stack."""

_BEATS = 8
"""Beats in the time after which their absence is too long, at least; there is one a second in any case."""
_PAUSE = 3.0
"""Seconds between two looks after which this process was not run itself."""
_WRITING = 1.0
"""Seconds that the stacks may take."""
_WRITING_ONE = 0.1
"""Seconds that one of them may take."""
_ENDING = 5.0
"""Seconds that an exit may take before the kernel is asked instead."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The process to watch: its id, the seconds for which it may be silent, how it logs, and the queue that ends it, or -1."""

    pid: int
    limit: float
    log_format: str
    log_level: str
    queue: int

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def interval(limit: float) -> float:
    """Seconds between two beats of a process that may be silent for `limit` seconds, and between two looks for them."""
    return min(1.0, limit / _BEATS)


class Silence:
    """How long somebody has been silent, without the time in which they, or who listens, were not run."""

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._last = now
        self._total = 0.0

    def broken(self, now: float) -> None:
        """They said something, at this time in seconds."""
        self._last, self._total = now, 0.0

    def lasts(self, now: float, stopped: bool) -> bool:
        """They are silent still at this time, and may be `stopped`. Whether that is too long."""
        step, self._last = now - self._last, now
        if not stopped and step < _PAUSE:
            self._total += step
        return self._total >= self._limit


def main() -> int:
    """Watch until the other process ends, and see to it that it does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # They are for the process that is watched.
        signal.signal(number, signal.SIG_IGN)
    watched = Watched(**json.loads(sys.argv[1]))
    logs.configure(watched.log_format, watched.log_level)
    silence = Silence(watched.limit, time.monotonic())
    while (heard := _listen(interval(watched.limit))) is not False:
        now = time.monotonic()
        if heard:
            silence.broken(now)
        elif silence.lasts(now, _is_stopped(watched.pid)) and _end(watched):
            return 0
    return 0


def write_stacks(pid: int, until: float) -> None:
    """Have the threads of a process write their stacks to standard error, one after another, until this time.

    Each writes its own: a thread that walks through another's frames while that one runs crashes the process once in some
    hundred dumps, as faulthandler's of all threads does (Python 3.11). One that was interrupted while it entered a function
    still may, so each is waited for to sleep, and those that never do come last. Threads of libraries have none to write.
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
    """Whether STACKS waits for a thread, or is held back from it, as while its handler runs: see proc(5)."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "SigBlk:"))]
        return any(mask >> (STACKS - 1) & 1 for mask in masks)
    return False


def _listen(seconds: float) -> bool | None:
    """Whether the other process said something, None if it was silent for so long, False once it has ended."""
    if not select.select([0], [], [], seconds)[0]:
        return None
    return bool(os.read(0, 1 << 12))


def _is_stopped(pid: int) -> bool:
    """Whether the kernel does not run it, as it was told not to."""
    return _state(Path(f"/proc/{pid}/stat")) in ("T", "t")


def _state(stat: Path) -> str:
    """Field 3 of /proc/PID/stat, or of a thread's; nothing once it has ended."""
    with suppress(OSError):
        return stat.read_text().rpartition(")")[2].split()[0]
    return ""


def _end(watched: Watched) -> bool:
    """Have it write its stacks and end. False if it speaks after all."""
    log.critical(
        "process %d has not turned its event loop for %g s: something keeps the interpreter, or blocks the loop. Here are the "
        "stacks of its threads; then it ends with status %d",
        watched.pid,
        watched.limit,
        NEEDS_RESTART,
    )
    begun = time.monotonic()
    write_stacks(watched.pid, begun + _WRITING)
    if _listen(max(0.0, begun + _WRITING - time.monotonic())):
        log.error("process %d turns again, so it goes on", watched.pid)
        return False
    if watched.queue >= 0:
        ctypes.CDLL(None).mq_send(watched.queue, b"x", 1, 0)
        if _listen(_ENDING) is False:
            return True
    with suppress(ProcessLookupError):
        os.kill(watched.pid, signal.SIGKILL)
    return True


if __name__ == "__main__":
    sys.exit(main())
