"""Slots and links for tests, with both ends in one process."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.link import ring as links
from server.link.arena import Arena
from server.link.blocks import BlockAllocator
from server.link.ring import Descriptors, Link
from server.link.slots import Slot

MEMORY = 64 << 20
"""Bytes for the tensors of all slots."""


def arena_of(count: int, nbytes: int = MEMORY) -> Arena:
    """An arena of so many slots in fresh memory, whose slots may reserve memory without a pool."""
    descriptors = links.create(count, nbytes)
    try:
        return lent(links.attach(descriptors).arena)
    finally:
        descriptors.close()


def lent(arena: Arena) -> Arena:
    """The same arena, whose slots may reserve memory without a pool."""
    blocks = BlockAllocator(arena.memory.nbytes)
    for index in range(arena.count):
        arena.slot(index).blocks = blocks
    return arena


def slot_of(index: int = 0, nbytes: int = MEMORY) -> Slot:
    """A fresh slot with this number."""
    return arena_of(index + 1, nbytes).slot(index)


def roomy(nbytes: int = 1 << 20) -> Slot:
    """A fresh slot that has so much memory already."""
    slot = slot_of()
    slot.reserve(nbytes)
    return slot


def open_link(slots: int, nbytes: int = MEMORY, before: Link | None = None) -> tuple[Descriptors, Link]:
    """A link, to be closed by its descriptors, with the memory of the one `before`; its slots are as those of `arena_of`."""
    descriptors = links.create(slots, nbytes)
    link = links.attach(descriptors, before and before.arena.memory)
    lent(link.arena)
    return descriptors, link


@contextmanager
def linked(slots: int = 8, nbytes: int = MEMORY) -> Iterator[Link]:
    """Both ends of a link, which is closed afterwards."""
    descriptors, link = open_link(slots, nbytes)
    try:
        yield link
    finally:
        descriptors.close()


def anonymous() -> int:
    """Bytes of memory that this process has for itself alone, without those that the C library keeps for later.

    Of these a large allocation may be made, and then this would not grow by it.
    """
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


class Peak:
    """How much more memory this process had at most than when this was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # Begins the maximum anew.
        self._before = _most()

    def __repr__(self) -> str:
        return f"<Peak {self.nbytes} bytes above>"

    @property
    def nbytes(self) -> int:
        """So far."""
        return _most() - self._before


def _most() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
