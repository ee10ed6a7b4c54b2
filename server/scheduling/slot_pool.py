"""A tenant's free slots, and the tenant's memory that is allocated to slots. Only the HTTP side hands out either."""

from collections.abc import Callable
from functools import partial

from ..errors import QueueFull
from ..link.arena import Arena, TensorMemory
from ..link.blocks import BlockAllocator
from ..link.slots import Slot
from .lane_statistics import SlotStatistics


class SlotPool:
    """Hands out slots, the last released first. Not thread-safe. `setting` is the memory's configuration key, for errors.
    `blocks` allocates the memory, if other processes do so too.

    Slots that no complete request needs are given early to bodies that are still arriving. When slots or memory run out, these
    bodies have to leave, the oldest first: a slow or endless upload never takes the place of a request that could run.
    """

    def __init__(self, arena: Arena, setting: str = "memory", blocks: BlockAllocator | None = None) -> None:
        self.blocks = blocks or BlockAllocator(arena.memory.nbytes, setting)
        self._arena = arena
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._early: dict[int, Callable[[], None]] = {}
        self._foreign = 0
        self.blocks.evict = self.evict

    def statistics(self) -> SlotStatistics:
        used = len(self._slots) - len(self._free) - self._foreign
        return SlotStatistics(used, len(self._slots), self.blocks.used)

    @property
    def memory(self) -> TensorMemory:
        """The tensor memory."""
        return self._arena.memory

    def check(self, arena: Arena) -> None:
        """Raise ValueError unless this arena can replace the one in use: as many slots, and the same tensor memory."""
        if arena.count != self._arena.count or arena.memory is not self._arena.memory:
            raise ValueError(f"{arena!r} cannot replace {self._arena!r}: not as many slots, or not the same tensor memory")

    def move(self, arena: Arena) -> None:
        """Use the pages of this arena from now on. Slots in use keep their tensors, and are the same objects as before."""
        self.check(arena)
        arena.adopt(self._slots)
        self._arena = arena

    def acquire(self) -> Slot:
        """Take a slot, which has no memory before its `reserve`. Raises QueueFull if all slots are in use."""
        if not self._free and len(self._slots) == self._arena.count:
            self.evict()
        if self._free:
            return self._free.pop()
        if len(self._slots) == self._arena.count:
            raise QueueFull(
                f"all {self._arena.count} slots of the tenant are in use; send it again when some requests have ended"
            )
        slot = self._arena.slot(len(self._slots))
        slot.blocks = self.blocks
        self._slots.append(slot)
        return slot

    def acquire_foreign(self, start: int, capacity: int, on_free: Callable[[], None]) -> Slot:
        """A slot with a block that another process holds; `on_free` is called once nothing uses that here any more.

        Raises QueueFull if all slots are in use, and ValueError if that is no block of the tenant's memory.
        """
        slot = self.acquire()
        try:
            slot.use_foreign_block(start, capacity, partial(self._on_returned, on_free))
        except ValueError:
            self._free.append(slot)
            raise
        self._foreign += 1
        return slot

    def acquire_early(self, leave: Callable[[], None]) -> Slot | None:
        """Take a slot for a body that is still arriving, if one is free. `leave` is called if it has to be released at once."""
        if not self._free and len(self._slots) == self._arena.count:
            return None
        slot = self.acquire()
        self._early[slot.index] = leave
        return slot

    def keep(self, slot: Slot) -> None:
        """The body in this slot, which it got early, is complete: it need not leave any more."""
        self._early.pop(slot.index, None)

    def evict(self) -> bool:
        """Have the oldest body that is still arriving leave its slot; whether there was one."""
        for leave in self._early.values():
            leave()  # Releases the slot.
            return True
        return False

    def _on_returned(self, on_free: Callable[[], None]) -> None:
        self._foreign -= 1
        on_free()

    def at(self, index: int) -> Slot:
        """The slot with this number, which must be in use."""
        return self._slots[index]

    def release(self, slot: Slot) -> None:
        """Give a slot and its memory back; nothing may read or write it any more."""
        if self._early:
            self._early.pop(slot.index, None)
        slot.free_block()
        self._free.append(slot)
