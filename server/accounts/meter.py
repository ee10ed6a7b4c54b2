"""What the works of one tenant took, by model and by the partition they ran on. Filled by the tenant's worker.

Works of one stream do not overlap: a work begins at the later of its launch and the end of the work before it.
"""

from ctypes import Array, addressof, c_uint64
from typing import NamedTuple

from engines.base import DeviceTime

from .usage import Usage


class Place(NamedTuple):
    """The partition that works run on: the tenant's own units, and those that others lend, by lender, if it is a wide one."""

    home: int
    lent: tuple[tuple[str, int], ...] = ()


class Counter:
    """The works of one model on one partition: the nanoseconds that they took together, and how many they were.

    Each work is counted in one of three places. The worker calls `add`. The launch loop adds to two numbers in memory of their
    own, without the interpreter. Where the device measures its works itself, neither does, and `device_times` has them.
    """

    def __init__(self, model: str, place: Place) -> None:
        self.model = model
        self.place = place
        self.device_times: list[DeviceTime] = []
        self._loop: Array[c_uint64] = (c_uint64 * 2)()
        self._ns = self._works = self._closed_ns = self._closed_works = 0

    @property
    def address(self) -> int:
        """Where the launch loop's numbers are: nanoseconds, then works, each a uint64."""
        return addressof(self._loop)

    def add(self, ns: int) -> None:
        """A work has ended that took so many nanoseconds, whatever it ended with. The worker's thread that waited for it."""
        self._ns += ns
        self._works += 1

    def read(self) -> tuple[int, int]:
        """Nanoseconds and works so far. One thread at a time."""
        for each in [each for each in self.device_times if each.closed]:
            self.device_times.remove(each)
            self._closed_ns, self._closed_works = self._closed_ns + each.ns, self._closed_works + each.works
        times = list(self.device_times)
        ns = self._ns + self._loop[0] + self._closed_ns + sum(each.ns for each in times)
        return ns, self._works + self._loop[1] + self._closed_works + sum(each.works for each in times)


class Meter:
    """One tenant's counters in one process; it stays when a worker is replaced by one on another partition."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, Place], Counter] = {}

    def counter(self, key: str, place: Place) -> Counter:
        """The counter of a model, by the key of one of its loads (`name/version#load`). Any thread."""
        model = key.rpartition("#")[0] or key
        found = self._counters.get((model, place))
        if found is None:
            found = self._counters.setdefault((model, place), Counter(model, place))
        return found

    def usages(self) -> list[Usage]:
        """What works that have ended used so far, by model. One thread at a time."""
        taken = [(each, *each.read()) for each in list(self._counters.values())]
        used: dict[str, Usage] = {}
        for counter, ns, works in taken:
            before = used.get(counter.model) or Usage(counter.model, 0, 0, {})
            borrowed = dict(before.borrowed)
            for lender, units in counter.place.lent:
                borrowed[lender] = borrowed.get(lender, 0) + ns * units
            used[counter.model] = Usage(counter.model, before.works + works, before.used + ns * counter.place.home, borrowed)
        return list(used.values())
