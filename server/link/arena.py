"""The memory that the HTTP side and the device side of one tenant share, whether they are threads or processes.

There are two memory files. One is the arena: the cells of the two rings, three single cells (see `ring`), and for each slot a
page for its ticket and one for its completion; a restarted HTTP process gets a new one, and so does one whose device side is
replaced. The other has the tensors and lives as long as the tenant is served: it is page-locked for the device only once.
"""

import fcntl
import mmap
import os
from collections.abc import Iterable

import numpy as np

from .slots import Slot

MESSAGE = 8 * 1024
"""Bytes for a slot's ticket, and the same for its completion."""
_CELL = 4
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, on every architecture; Python has no name for it before 3.13.


class TensorMemory:
    """The memory of one tenant's tensors as mapped here: `nbytes` bytes at `address`. Pages are allocated at first write."""

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        self.nbytes = nbytes
        self.view = memoryview(memory)
        self.address: int = np.frombuffer(memory, np.uint8, 1).ctypes.data


class Arena:
    """Rings, and `count` slots with tensors in `memory`; `shared` has `nbytes(count)` bytes. Slots are created at first use."""

    def __init__(self, shared: mmap.mmap, count: int, memory: TensorMemory) -> None:
        self.count = count
        self.memory = memory
        self._view = memoryview(shared)
        self._slots: dict[int, Slot] = {}

    def __repr__(self) -> str:
        return f"<Arena of {self.count} slots, {len(self._slots)} used so far>"

    def cells(self, ring: int) -> memoryview:
        """The cells of ring 0 or 1, one for each slot: 32-bit unsigned integers."""
        start = ring * self.count * _CELL
        return self._view[start : start + self.count * _CELL].cast("I")

    @property
    def total_put(self) -> memoryview:
        """One cell: how many tickets were put so far, modulo 2**32. Lets a reader check for tickets without reading any."""
        return self._single(0)

    @property
    def deferred(self) -> memoryview:
        """One cell: how many tickets the device side has deferred."""
        return self._single(1)

    @property
    def on_host_cores(self) -> memoryview:
        """One cell: 1 if works run on cores of the host, which also answer requests, else 0."""
        return self._single(2)

    def _single(self, index: int) -> memoryview:
        start = (2 * self.count + index) * _CELL
        return self._view[start : start + _CELL].cast("I")

    def slot(self, index: int) -> Slot:
        """The slot with this number, always the same object. Raises IndexError if there is none."""
        slot = self._slots.get(index)
        if slot is None:
            if not 0 <= index < self.count:
                raise IndexError(index)
            slot = self._slots[index] = self._make(index)
        return slot

    def adopt(self, slots: Iterable[Slot]) -> None:
        """Use these slots, of the arena that this one replaces. Their tensors stay where they are: the memory is the same."""
        for slot in slots:
            slot.ticket, slot.completion = self._pages(slot.index)
            self._slots[slot.index] = slot

    def _make(self, index: int) -> Slot:
        ticket, completion = self._pages(index)
        return Slot(index, self.memory.view, self.memory.address, ticket, completion)

    def _pages(self, index: int) -> tuple[memoryview, memoryview]:
        start = _rings(self.count) + index * 2 * MESSAGE
        middle = start + MESSAGE
        return self._view[start:middle], self._view[middle : middle + MESSAGE]


def create(count: int) -> int:
    """Create shared memory for the rings and pages of so many slots; the caller closes the descriptor."""
    return create_file("greenlane", nbytes(count))


def create_memory(size: int) -> int:
    """Create shared memory for so many bytes of tensors; the caller closes the descriptor."""
    return create_file("greenlane tensors", size)


def attach(descriptor: int, count: int, memory: TensorMemory) -> Arena:
    """Map memory made by `create`; the descriptor may be closed afterwards."""
    return Arena(_map(descriptor, nbytes(count)), count, memory)


def attach_memory(descriptor: int, size: int) -> TensorMemory:
    """Map memory made by `create_memory`; the descriptor may be closed afterwards."""
    return TensorMemory(_map(descriptor, size), size)


def nbytes(count: int) -> int:
    """The size of an arena of so many slots."""
    return _rings(count) + count * 2 * MESSAGE


def create_file(name: str, size: int) -> int:
    """A memory file of this size, for good: a process that cut it off would end the others that map it by SIGBUS."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def _map(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | _NORESERVE)


def _rings(count: int) -> int:
    return -(-(2 * count + 3) * _CELL // mmap.PAGESIZE) * mmap.PAGESIZE
