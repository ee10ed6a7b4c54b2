"""Which of a tenant's slots are free: those of the HTTP side, and what becomes of memory that large requests left behind."""

from collections.abc import Callable
from typing import NamedTuple

from .arena import Arena
from .errors import QueueFull
from .slots import SMALLEST, Slot
from .ticket import Done


class SlotStatistics(NamedTuple):
    """Slots in use, slots that were used so far, and the bytes of memory they may hold."""

    used: int
    slots: int
    nbytes: int


class SlotPool:
    """Hands out slots, the last one first: its memory is the warmest. Not thread-safe: the HTTP side's.

    Memory is kept up to `keep` bytes in all; beyond that `tidy` gives slots to `retire`, which makes the device let go of
    them and then calls `retired`.
    """

    def __init__(self, arena: Arena, retire: Callable[[int], None], keep: int = 256 << 20) -> None:
        self._arena = arena
        self._retire = retire
        self._keep = keep
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._touched: set[int] = set()
        self._retiring = 0

    def __repr__(self) -> str:
        return f"<SlotPool {self._used} of {len(self._slots)} in use>"

    def statistics(self) -> SlotStatistics:
        return SlotStatistics(self._used, len(self._slots), sum(slot.capacity for slot in self._slots))

    @property
    def _used(self) -> int:
        return len(self._slots) - len(self._free) - self._retiring

    def acquire(self) -> Slot:
        """Take a slot; its memory holds whatever was there. Raises QueueFull if every one is taken."""
        if self._free:
            return self._free.pop()
        if len(self._slots) == self._arena.count:
            raise QueueFull(f"all {self._arena.count} slots are in use")
        self._slots.append(self._arena.slot(len(self._slots)))
        return self._slots[-1]

    def acquire_large(self) -> Slot:
        """Take the free slot that has the most memory, for what is larger than most. Raises QueueFull as `acquire` does."""
        if not self._free:
            return self.acquire()
        slot = max(self._free, key=lambda slot: slot.capacity)
        self._free.remove(slot)
        return slot

    def at(self, index: int) -> Slot:
        """The slot with this number, which somebody took."""
        return self._slots[index]

    def heard(self, done: Done) -> None:
        """Take notice of a slot that the device side let grow."""
        for extent in done.outputs:
            if extent.offset + extent.nbytes > self._slots[done.slot].capacity:
                self._slots[done.slot].reserve(extent.offset + extent.nbytes)

    def release(self, slot: Slot) -> None:
        """Give a slot back; nothing may read or write it any more."""
        self._touched.add(slot.index)
        self._free.append(slot)

    def tidy(self) -> None:
        """Retire what is over the limit and was in nobody's use since the last time, the coldest first.

        Not at once: a tenant that sends large tensors all the time would have the device let go of memory, and take it
        again, all the time, and taking 64 MiB holds up every tenant of a GPU for 20 ms.
        """
        over = sum(slot.capacity for slot in self._slots) - self._keep
        for slot in [slot for slot in self._free if slot.capacity > SMALLEST and slot.index not in self._touched]:
            if over <= 0:
                break
            over -= slot.capacity
            self._free.remove(slot)
            self._retiring += 1
            self._retire(slot.index)
        self._touched.clear()

    def retired(self, index: int) -> None:
        """The device has let go of this slot: give its memory back to the system, and use it again."""
        self._arena.discard(index)
        self._retiring -= 1
        self._free.append(self._arena.slot(index))
