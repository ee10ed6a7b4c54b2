"""Which worker may take the GIL first, since all workers of a process share one interpreter.

The GIL is not fair: a worker that releases and retakes it in a loop starves the others. Each inference needs the GIL several
times, and beside a busy tenant each wait took up to 0.5 ms (docs/lab/2026-11-21-leaks.md). So a worker that runs at least
4 times as often as another sleeps up to 3 x 20 us while that one has work. This is too short to take a share of the device from
a tenant.
"""

import time
from collections.abc import Callable
from threading import Lock

STEP = 20e-6
"""Seconds to sleep before checking again; with the kernel's timer slack about 80 microseconds."""
STEPS = 3
"""The most such sleeps when an inference starts, and when one ends."""
OFTEN = 4
"""A worker yields to workers whose inferences come less often by this factor."""
RARE = 250_000
"""Nanoseconds between inferences above which a worker never has to yield."""

_SMOOTHING = 3
"""The moving average of the gaps: each new gap has a weight of 1 / 2**3."""


class GilPriority:
    """One worker's priority among those of its process. The worker's threads change it; threads of other workers read it.

    A worker has work while one of its threads enqueues (from `start_enqueuing` to `end_enqueuing`) or handles a work that ended
    (from `start_completing` to `start_waiting`), and when a ticket has arrived that it did not take yet (`waiting`). One thread
    at a time enqueues, and one completes. Times are in nanoseconds of `time.monotonic_ns`.
    """

    def __init__(self, priorities: "GilPriorities", waiting: Callable[[], bool], sleep: Callable[[float], None]) -> None:
        self._priorities = priorities
        self._waiting = waiting
        self._sleep = sleep
        self._enqueuing = self._ending = self._unattended = False
        self._arrived_at = self._gap = 0

    def __repr__(self) -> str:
        state = "working" if self._enqueuing or self._ending else "away" if self._unattended else "resting"
        return f"<GilPriority {state}, an inference every {self._gap / 1e6:.3f} ms>"

    def start_enqueuing(self, now: int) -> None:
        """A ticket has been taken, at this time."""
        self._gap += (now - self._arrived_at - self._gap) >> _SMOOTHING
        self._arrived_at = now
        self._enqueuing = True

    def end_enqueuing(self) -> None:
        """All tickets that had arrived are enqueued."""
        self._enqueuing = False

    def start_waiting(self, unattended: bool) -> None:
        """The thread will block until a work ends; `unattended`: and until then no thread of the worker listens for tickets."""
        self._unattended = unattended
        self._ending = False

    def start_completing(self) -> None:
        """A work has ended, or will end immediately, and has to be handled."""
        self._ending = True
        self._unattended = False

    def yield_gil(self, now: int) -> None:
        """Let workers go first that have work and run much less often. Blocks, for at most STEPS times STEP seconds."""
        if self._gap > RARE:
            return
        for _ in range(STEPS):
            if not self._priorities.should_yield(self, now):
                return
            self._sleep(STEP)

    def goes_before(self, other: "GilPriority", now: int) -> bool:
        """Whether this worker has work, and runs so much less often than the other that it should go first."""
        if self._gap + (now - self._arrived_at >> _SMOOTHING) < OFTEN * other._gap:
            return False
        return self._enqueuing or self._ending or (not self._unattended and self._waiting())


class GilPriorities:
    """The priorities of all workers of a process. Any thread."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._changing = Lock()
        self._all: tuple[GilPriority, ...] = ()

    def __repr__(self) -> str:
        return f"<GilPriorities of {len(self._all)} workers>"

    def make(self, waiting: Callable[[], bool]) -> GilPriority:
        """The priority of a worker that is to `join`; `waiting` is as for `GilPriority`."""
        return GilPriority(self, waiting, self._sleep)

    def join(self, priority: GilPriority) -> None:
        """Add a worker that is about to start."""
        with self._changing:
            self._all = (*self._all, priority)

    def remove(self, priority: GilPriority) -> None:
        """Remove a worker that has ended."""
        with self._changing:
            self._all = tuple([each for each in self._all if each is not priority])

    def should_yield(self, by: GilPriority, now: int) -> bool:
        """Whether some other worker should go first."""
        return any(priority is not by and priority.goes_before(by, now) for priority in self._all)
