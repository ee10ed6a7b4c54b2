"""What a GPU's driver takes of its memory by itself: for kernels that it loads, and for graphs that it instantiates.

No call of CUDA has the size of either. But the driver takes memory in steps of 2 MiB or more, and this process then has more
of the device's. The driver keeps a step when its contents are freed. The difference between two readings is the size of the
kernel or graph that was made in between. Other changes of the memory are kept out of the difference:

1. Stream-ordered allocations, on any thread, come from a memory pool. The driver says how much the pool has, and this is
   subtracted.
2. Everything else that this process does to the memory is within `DriverMemory.changing`: engines that are loaded and freed,
   contexts, green contexts, pinned memory. A measurement beside it counts for nothing.
3. NVML says what this process has, so what other processes take does not matter, this one's children included. Where it does
   not say that (`memory_level`), there is only cuMemGetInfo: what the whole device has less. Then a child that uses the GPU is
   a change as well, and what other programs take of the same GPU at such a moment counts as ours, as it looks the same. If
   less was taken than before, one has freed memory, and this counts for nothing.

What counts for nothing is reported as `Taken.unmeasured`, unless the same was measured before. What is freed stays with the
driver, so it shows no difference when the same is loaded again: see `DriverMemory.charge`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Condition

PATIENCE = 0.2
"""Seconds that a measurement waits at most for a change that is under way; the caller may hold locks."""
TURN = 10.0
"""Seconds that a change waits at most for a measurement."""
MOST_KNOWN = 4096
"""Of how many kernels and graphs it is remembered what they took."""


class DriverMemory:
    """The measurements of one device. Any thread may call.

    `hurrying` is that of `partitions.base.Loads`, as a load that is measured may be paced, and changes wait for it.

    `level` returns bytes that fall by what the driver takes, or None if it does not say; see `memory_level`. It is called twice
    for each measurement, and never for an inference, as it asks the operating system's part of the driver. It may wait for the
    driver's lock, which a kernel that is being loaded in another thread holds, and which launches take, too.
    """

    def __init__(
        self,
        level: Callable[[], int | None],
        hurrying: Callable[[], AbstractContextManager[None]] = nullcontext,
        own: bool = True,
    ) -> None:
        self.own = own
        """Whether other processes do not change the level."""
        self._level = level
        self._hurrying = hurrying
        self._condition = Condition()
        self._changing = self._in_turn = self._measuring = 0
        self._begun = 0
        self._known: OrderedDict[Hashable, int] = OrderedDict()
        self._kept = 0

    @property
    def kept(self) -> int:
        """Bytes that were measured and then freed, which the driver has kept and nothing has again."""
        return self._kept

    @contextmanager
    def changing(self, in_turn: bool = False) -> Iterator[None]:
        """The block takes or frees memory of the device, which a measurement beside it cannot distinguish from its own.

        `in_turn`: it takes a moment only, so it waits for a measurement that is under way, and the next one may wait for it.
        Both waits have an end, as each side may hold locks that the garbage collector asks for on the other.
        """
        with self._hurrying() if in_turn and self._measuring else nullcontext(), self._condition:
            if in_turn:
                self._condition.wait_for(lambda: not self._measuring, TURN)
            self._changing += 1
            self._in_turn += in_turn
            self._begun += 1
        try:
            yield
        finally:
            with self._condition:
                self._changing -= 1
                self._in_turn -= in_turn
                self._condition.notify_all()

    def changing_in_child(self) -> AbstractContextManager[None]:
        """A child of this process takes or frees memory of the device within the block."""
        return nullcontext() if self.own else self.changing()

    @contextmanager
    def measuring(self, taken: "Taken", key: Hashable, patient: bool = False) -> Iterator[None]:
        """What the driver takes within the block counts for `taken`, under this key.

        The device's context must be current. `patient`: first wait for changes that take a moment only.
        """
        with self._condition:
            if patient:
                self._condition.wait_for(lambda: not self._in_turn, PATIENCE)
            alone = not (self._changing or self._measuring)
            self._measuring += 1
            self._begun += 1
            begun = self._begun
        before = self._level() if alone else None
        try:
            yield
        finally:
            after = None if before is None else self._level()
            with self._condition:
                self._measuring -= 1
                self._condition.notify_all()
                alone = alone and begun == self._begun
            taken.add(key, self.charge((taken.what, key), _difference(before, after) if alone else None))

    def charge(self, key: Hashable, took: int | None) -> int | None:
        """What to count for something that took so many bytes; None for not known, to both.

        Where it took less than the same did before, it is in memory that the driver has kept of what was freed: it counts as
        much as before, as far as there is such memory. So what is counted and kept is what was taken, all together. If a driver
        does not keep what is freed, more may be counted than it has, and never less.
        """
        with self._condition:
            before = self._known.get(key, 0)
            if took is None and not 0 < before <= self._kept:
                return None
            again = min(max(0, before - (took or 0)), self._kept)
            self._kept -= again
            whole = (took or 0) + again
            self._known[key] = max(whole, before)
            self._known.move_to_end(key)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
            return whole

    def keep(self, nbytes: int) -> None:
        """Something that counted as much was freed."""
        with self._condition:
            self._kept += nbytes


class Taken:
    """What the driver has taken for one holder: the kernels of a cache, or a graph. Any thread may call.

    `what` goes before the keys, so that what was measured for a holder is known to the next one of the same.
    """

    def __init__(self, memory: DriverMemory, what: Hashable) -> None:
        self.what = what
        self.unmeasured = 0
        """Of how many keys nothing is known."""
        self._memory = memory
        self._parts: dict[Hashable, int | None] = {}

    @property
    def nbytes(self) -> int:
        """Bytes in all; 0 also if nothing could be measured."""
        return sum(part or 0 for part in list(self._parts.values()))

    @contextmanager
    def measuring(self, key: Hashable, patient: bool = False) -> Iterator[None]:
        """As `DriverMemory.measuring`, the first time for a key; then nothing is loaded any more."""
        if key in self._parts:
            yield
        else:
            with self._memory.measuring(self, key, patient):
                yield

    def add(self, key: Hashable, nbytes: int | None) -> None:
        """Count so much; None for not known."""
        self._parts[key] = nbytes
        self.unmeasured += nbytes is None

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """The block frees it; what it took stays with the driver. Once."""
        with self._memory.changing():
            yield
        nbytes, self._parts = self.nbytes, {}
        self._memory.keep(nbytes)


def _difference(before: int | None, after: int | None) -> int | None:
    """How much less there is; None for not known, or if there is more: then something else was freed meanwhile."""
    return None if before is None or after is None or after > before else before - after
