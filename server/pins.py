"""Which slots the device can reach in place: pinned when first used, anew when they have grown."""

from collections.abc import Callable

from partitions.base import Closing

from .slots import Slot

Pin = Callable[[int, int], Closing]
"""Makes host memory, from an address and so many bytes, reachable for the device."""


class Pins:
    """The pinned slots of one link. Each method is for one thread at a time, and never for a slot with work in flight."""

    def __init__(self, pin: Pin) -> None:
        self._pin = pin
        self._pinned: dict[int, tuple[int, Closing]] = {}

    def __repr__(self) -> str:
        return f"<Pins of {len(self._pinned)} slots, {sum(nbytes for nbytes, _ in self._pinned.values())} bytes>"

    def cover(self, slot: Slot, nbytes: int) -> None:
        """Make so many bytes of a slot reachable, unless they are. Blocks if not. Raises PartitionError."""
        found = self._pinned.get(slot.index)
        if found is None or found[0] < nbytes:
            self.drop(slot.index)
            self._pinned[slot.index] = nbytes, self._pin(slot.address, nbytes)

    def drop(self, index: int) -> None:
        """Let go of a slot. Blocks."""
        _, pinned = self._pinned.pop(index, (0, None))
        if pinned:
            pinned.close()

    def close(self) -> None:
        """Let go of all of them."""
        for index in list(self._pinned):
            self.drop(index)
