"""Decides whether a process that is asked for heartbeats, and does not answer, hangs. Arithmetic, and a look at /proc."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

INTERVAL = 0.25
"""Seconds between two heartbeats, at most."""
MAX_SILENCE = 3.0
"""Seconds without an answer, counting only time in which the process could have answered, after which it hangs. Its
replacement serves less than a second later. A healthy process works for up to about a second in one piece (a body of 64 MiB
of short texts).
"""
_MAX_STARTING = 30.0
"""The same before the first answer and while a tenant's process loads its models: importing a library from a slow disk holds
the interpreter.
"""
_MAX_STEP = 0.5
"""The most seconds that count between two checks: where more have passed, it was this process that did not run."""
_STATES = {"T": "it is stopped", "t": "a debugger stopped it", "S": "it waits for something", "R": "it is busy"}


class Activity(NamedTuple):
    """The state of a process's main thread, as the kernel reports it.

    `state` is the letter that ps shows; `ran` the seconds that it ran so far; `waited` the seconds for which it was ready to
    run but had no core.
    """

    state: str
    ran: float
    waited: float

    def __str__(self) -> str:
        return _STATES.get(self.state, f"state {self.state}")

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP or a debugger stopped it."""
        return self.state in ("T", "t")


class Heartbeat:
    """For how long a process has not answered, without the time in which it could not have. Times are in seconds.

    A slow machine makes no process hang: time in which the process slept, was stopped, or ran counts; time in which it waited
    for a core or for a disk does not, nor does time in which this process itself was not running.
    """

    def __init__(self) -> None:
        self.silent = 0.0
        self._limit = _MAX_STARTING
        self._sent_at: float | None = None
        self._before: Activity | None = None

    @property
    def answered(self) -> bool:
        """Whether the last heartbeat was answered, so that the next may be sent."""
        return self._sent_at is None

    def on_sent(self, now: float) -> None:
        """The process was sent a heartbeat at this time."""
        self._sent_at = now

    def on_answer(self) -> None:
        """The process answered the heartbeat."""
        self._limit, self.silent = MAX_SILENCE, 0.0
        self._sent_at = self._before = None

    def hangs(self, now: float, activity: Activity, starting: bool = False) -> bool:
        """Whether the process, which has not answered yet, has been silent for too long; `activity` is as of now.

        `starting`: it is loading what it needs to serve.
        """
        assert self._sent_at is not None
        step, self._sent_at = min(now - self._sent_at, _MAX_STEP), now
        before, self._before = self._before or activity, activity
        if activity.state == "D" or (activity.state == "R" and activity.ran <= before.ran):
            return False
        self.silent += max(0.0, step - (activity.waited - before.waited))
        return self.silent >= (_MAX_STARTING if starting else self._limit)


class StoppedTime:
    """For how many seconds in a row a process has been stopped. Time in which this process did not run is left out."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._before: float | None = None

    def after(self, now: float, activity: Activity) -> float:
        """The seconds, now that the process is found so. Call it again and again."""
        if not activity.stopped:
            self._seconds, self._before = 0.0, None
            return 0.0
        if self._before is not None:
            self._seconds += min(now - self._before, _MAX_STEP)
        self._before = now
        return self._seconds


def observe(pid: int, proc: Path = Path("/proc")) -> Activity:
    """The activity of this process now; state X if it is gone. See proc(5).

    A kernel without CONFIG_SCHED_INFO reports no waiting time, and running time in hundredths of a second only.
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
