"""Which worker goes first, where all of them share one interpreter.

A thread that wants the interpreter while another keeps letting go of it and taking it back gets it by luck: each time it is
woken, and mostly too late. An inference needs it several times, and beside a tenant that never rests each of them took up
to half a millisecond (docs/isolation/leaks.md). So a worker with many more inferences than another steps aside for a
moment while that one has something to do. It never waits long: a share of the device is not taken from anybody this way.
"""

import time
from collections.abc import Callable
from threading import Lock

STEP = 20e-6
"""Seconds to stay aside before looking again; with the kernel's slack it is some 80 microseconds."""
STEPS = 3
"""The most such looks for one inference to begin, and for one to end."""
OFTEN = 4
"""How many times as often as another's a worker's inferences come for it to step aside for that one."""
RARE = 250_000
"""Nanoseconds between inferences from which on a worker disturbs nobody."""

_SMOOTHING = 3
"""A gap counts for an eighth in the average of the gaps."""


class GilPriority:
    """One worker's place among those of its process. For the worker's threads; the others' look at it.

    A worker has something to do while a thread of its own enqueues (from `come` to `rest`) or deals with a work that ended
    (from `go_on` to `leave`), and when a ticket came that it did not get yet, which `waiting` says. Each of the two is for one
    thread at a time. Times are in nanoseconds of `time.monotonic_ns`.
    """

    def __init__(self, priorities: "GilPriorities", waiting: Callable[[], bool], sleep: Callable[[float], None]) -> None:
        self._priorities = priorities
        self._waiting = waiting
        self._sleep = sleep
        self._enqueuing = self._ending = self._deaf = False
        self._came = self._gap = 0

    def __repr__(self) -> str:
        state = "working" if self._enqueuing or self._ending else "away" if self._deaf else "resting"
        return f"<GilPriority {state}, an inference every {self._gap / 1e6:.3f} ms>"

    def come(self, now: int) -> None:
        """A ticket came, at this time: there is something to do."""
        self._gap += (now - self._came - self._gap) >> _SMOOTHING
        self._came = now
        self._enqueuing = True

    def rest(self) -> None:
        """Every ticket that came is enqueued."""
        self._enqueuing = False

    def leave(self, deaf: bool) -> None:
        """There is no work to deal with until the device has done one; `deaf`: and until then no thread hears of tickets."""
        self._deaf = deaf
        self._ending = False

    def go_on(self) -> None:
        """There is a work to deal with: the device has done it, or will have in no time."""
        self._ending = True
        self._deaf = False

    def yield_gil(self, now: int) -> None:
        """Let those go first who have something to do, and much less often. Blocks for a moment."""
        if self._gap > RARE:
            return
        for _ in range(STEPS):
            if not self._priorities.should_yield(self, now):
                return
            self._sleep(STEP)

    def goes_before(self, other: "GilPriority", now: int) -> bool:
        """Whether it has something to do, and so much less often than the other that it should go first."""
        if self._gap + (now - self._came >> _SMOOTHING) < OFTEN * other._gap:
            return False
        return self._enqueuing or self._ending or (not self._deaf and self._waiting())


class GilPriorities:
    """The places of all workers of a process. Any thread."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._changing = Lock()
        self._places: tuple[GilPriority, ...] = ()

    def __repr__(self) -> str:
        return f"<GilPriorities of {len(self._places)} workers>"

    def join(self, waiting: Callable[[], bool]) -> GilPriority:
        """A place for a worker that is about to begin; `waiting` as for `GilPriority`."""
        place = GilPriority(self, waiting, self._sleep)
        with self._changing:
            self._places = (*self._places, place)
        return place

    def remove(self, place: GilPriority) -> None:
        """This worker is gone."""
        with self._changing:
            self._places = tuple([each for each in self._places if each is not place])

    def should_yield(self, by: GilPriority, now: int) -> bool:
        """Whether anybody goes_before this one."""
        return any(place is not by and place.goes_before(by, now) for place in self._places)
