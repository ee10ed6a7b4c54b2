"""What the works of one tenant took, by model and by the partition they ran on. Filled by the tenant's worker.

Works of one stream do not overlap: a work begins at the later of its launch and the end of the work before it.
"""

from ctypes import Array, addressof, c_uint64
from typing import NamedTuple

from .usage import Usage


class Place(NamedTuple):
    """The partition that works run on: the tenant's own units, and those that others lend, by owner, if it is a wide one."""

    home: int
    lent: tuple[tuple[str, int], ...] = ()


class Counter:
    """The works of one model on one partition: the nanoseconds that they took together, and how many they were.

    The worker calls `add`. The launch loop adds to `loop`, two numbers in memory of their own, without the interpreter.
    """

    def __init__(self, model: str, place: Place) -> None:
        self.model = model
        self.place = place
        self.loop: Array[c_uint64] = (c_uint64 * 2)()
        self._ns = self._works = 0

    def __repr__(self) -> str:
        return f"<Counter {self.model} on {self.place}: {self.works} works, {self.ns} ns>"

    @property
    def ns(self) -> int:
        return self._ns + self.loop[0]

    @property
    def works(self) -> int:
        return self._works + self.loop[1]

    @property
    def address(self) -> int:
        """Where the launch loop's numbers are: nanoseconds, then works, each a uint64."""
        return addressof(self.loop)

    def add(self, ns: int) -> None:
        """A work has ended that took so many nanoseconds, whatever it ended with. The worker's thread that waited for it."""
        self._ns += ns
        self._works += 1


class Meter:
    """One tenant's counters in one process; it stays when a worker is replaced by one on another partition.

    `running` is the work that is being waited for: its counter, and when it began on the clock of `time.monotonic_ns`.
    """

    def __init__(self) -> None:
        self.running: tuple[Counter, int] | None = None
        self._counters: dict[tuple[str, Place], Counter] = {}

    def __repr__(self) -> str:
        return f"<Meter of {len(self._counters)} counters>"

    def counter(self, key: str, place: Place) -> Counter:
        """The counter of a model, by the key of one of its loads (`name/version#load`). For the thread that enqueues."""
        model = key.rpartition("#")[0] or key
        found = self._counters.get((model, place))
        if found is None:
            found = self._counters[model, place] = Counter(model, place)
        return found

    def usages(self, now: int) -> list[Usage]:
        """What was used so far, by model, with what the running work has used until `now`. Any thread.

        The worker removes a work from `running` before it adds it, so that none is counted twice.
        """
        taken = [(each, each.ns, each.works) for each in list(self._counters.values())]
        running = self.running
        used: dict[str, Usage] = {}
        for counter, ns, works in taken:
            if running and running[0] is counter:
                ns += max(0, now - running[1])
            before = used.get(counter.model) or Usage(counter.model, 0, 0, {})
            borrowed = dict(before.borrowed)
            for owner, units in counter.place.lent:
                borrowed[owner] = borrowed.get(owner, 0) + ns * units
            used[counter.model] = Usage(counter.model, before.works + works, before.used + ns * counter.place.home, borrowed)
        return list(used.values())
