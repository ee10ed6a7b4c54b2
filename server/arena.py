"""The memory that the two sides of one tenant share, as two threads of a process or as two processes.

It is one sparse file in memory: first the cells of the two rings and three single ones (see `server.link`), then for every
slot a page for what is said about it, then the slots. A page is taken from the system when it is first written, so the size
says little.
"""

import mmap
import os

import numpy as np

from .slots import LARGEST, Slot

MESSAGE = 8 * 1024
"""Bytes for a slot's ticket, and as many for its completion."""
_CELL = 4
_PAGE = mmap.PAGESIZE
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, on every architecture; Python has no name for it before 3.13.


class Arena:
    """Rings and slots in one mapping; `memory` is of `nbytes(count)` bytes. Slots are made when first asked for."""

    def __init__(self, memory: mmap.mmap, count: int) -> None:
        self.count = count
        self._memory = memory
        self._view = memoryview(memory)
        self._address = np.frombuffer(memory, np.uint8, 1).ctypes.data
        self._slots: list[Slot | None] = [None] * count

    def __repr__(self) -> str:
        return f"<Arena of {self.count} slots, {sum(slot is not None for slot in self._slots)} used so far>"

    def cells(self, ring: int) -> memoryview:
        """The cells of ring 0 or 1, one for each slot: 32-bit unsigned integers."""
        start = ring * self.count * _CELL
        return self._view[start : start + self.count * _CELL].cast("I")

    @property
    def announced(self) -> memoryview:
        """How many tickets were put so far, modulo 2**32, as one cell: for whoever looks without reading any."""
        return self._single(0)

    @property
    def aside(self) -> memoryview:
        """How many tickets the device side has put aside, as one cell."""
        return self._single(1)

    @property
    def hosted(self) -> memoryview:
        """1 if works are done on cores of the host, which requests are answered on as well, else 0, as one cell."""
        return self._single(2)

    def _single(self, place: int) -> memoryview:
        start = (2 * self.count + place) * _CELL
        return self._view[start : start + _CELL].cast("I")

    def slot(self, index: int) -> Slot:
        """The slot with this number, always the same object."""
        slot = self._slots[index]
        if slot is None:
            slot = self._slots[index] = self._make(index)
        return slot

    def discard(self, index: int) -> None:
        """Give the pages of a slot's tensors back to the system; they read as zeros from now on."""
        self._memory.madvise(mmap.MADV_REMOVE, self._start(index), LARGEST)
        self.slot(index).shrink()

    def _make(self, index: int) -> Slot:
        start, said = self._start(index), _rings(self.count) + index * 2 * MESSAGE
        view = self._view[start : start + LARGEST]
        ticket, completion = (self._view[at : at + MESSAGE] for at in (said, said + MESSAGE))
        return Slot(index, view, self._address + start, ticket, completion)

    def _start(self, index: int) -> int:
        return _rings(self.count) + self.count * 2 * MESSAGE + index * LARGEST


def create(count: int) -> int:
    """A descriptor of fresh shared memory for so many slots; the caller closes it."""
    descriptor = os.memfd_create("greenlane")
    os.truncate(descriptor, nbytes(count))
    return descriptor


def attach(descriptor: int, count: int) -> Arena:
    """Map what `create` made; the descriptor may be closed afterwards."""
    flags = mmap.MAP_SHARED | _NORESERVE
    return Arena(mmap.mmap(descriptor, nbytes(count), flags=flags), count)


def nbytes(count: int) -> int:
    """The size of an arena of so many slots."""
    return _rings(count) + count * (2 * MESSAGE + LARGEST)


def _rings(count: int) -> int:
    return -(-(2 * count + 3) * _CELL // _PAGE) * _PAGE
