"""Whether a process hangs that is asked again and again and does not answer: arithmetic, and what the kernel says of it."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

INTERVAL = 0.25
"""Seconds between two questions, at most."""
SILENCE = 3.0
"""Seconds without an answer, in which it could have given one, after which a process hangs. What takes its place serves less
than a second later; the longest that a healthy process works in one piece is a second or so (a body of 64 MiB of short texts).
"""
_STARTING = 30.0
"""The same before its first answer: there is more to do."""
_STEP = 0.5
"""The most seconds that count between two looks: where more passed, it was this process that did not run."""
_STATES = {"T": "it is stopped", "t": "a debugger stopped it", "S": "it waits for something", "R": "it is busy"}


class Activity(NamedTuple):
    """What the kernel says of a process's first thread: its state, as in ps, and the seconds that it ran so far, and that it
    was ready to and had to wait for a core.
    """

    state: str
    ran: float
    waited: float

    def __str__(self) -> str:
        return _STATES.get(self.state, f"state {self.state}")

    @property
    def stopped(self) -> bool:
        """Whether the kernel does not run it, as it was told not to: by SIGSTOP, or by a debugger."""
        return self.state in ("T", "t")


class Pulse:
    """How long a process has not answered, without the time in which it could not have. Times are in seconds.

    A machine that is slow makes nothing hang: what counts is time in which the process slept, was stopped, or ran. Time in
    which it waited for a core, or for a disk, does not, nor does what passed while this process was not run itself.
    """

    def __init__(self) -> None:
        self.silent = 0.0
        self._limit = _STARTING
        self._asked: float | None = None
        self._before: Activity | None = None

    def __repr__(self) -> str:
        return f"<Pulse, silent for {self.silent:g} s>"

    @property
    def due(self) -> bool:
        """Whether to ask: there is no question that was not answered."""
        return self._asked is None

    def asked(self, now: float) -> None:
        """It was asked, at this time."""
        self._asked = now

    def answered(self) -> None:
        """It answered what it was asked."""
        self._limit, self.silent = SILENCE, 0.0
        self._asked = self._before = None

    def hangs(self, now: float, activity: Activity) -> bool:
        """It has not answered yet. Whether that is too long, given what the kernel says of it now."""
        assert self._asked is not None
        step, self._asked = min(now - self._asked, _STEP), now
        before, self._before = self._before or activity, activity
        if activity.state == "D" or (activity.state == "R" and activity.ran <= before.ran):
            return False
        self.silent += max(0.0, step - (activity.waited - before.waited))
        return self.silent >= self._limit


def observe(pid: int, proc: Path = Path("/proc")) -> Activity:
    """What the kernel says now; of a process that is gone that it is dead, X. See proc(5).

    A kernel without CONFIG_SCHED_INFO does not say how long it waited, and how long it ran in hundredths of a second.
    """
    folder = proc / str(pid)
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Activity("X", 0.0, 0.0)
    with suppress(OSError):
        ran, waited, _ = (folder / "schedstat").read_text().split()
        return Activity(fields[0], int(ran) / 1e9, int(waited) / 1e9)
    return Activity(fields[0], (int(fields[11]) + int(fields[12])) / 100, 0.0)
