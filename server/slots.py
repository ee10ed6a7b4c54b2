"""The memory that an inference's tensors live in, from the parsed request to the encoded answer.

A slot's layout follows from the model's signature and the shapes alone, so that both sides find the tensors without
being told: inputs in the signature's order, each at a multiple of 64 bytes, the outputs after them. A BYTES tensor,
whose size no shape tells, is preceded by one such block that begins with its size as a little-endian uint64.
"""

import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engines import Room, Signature, Tensor
from engines.memory import view
from engines.signature import ALIGNMENT, align
from partitions.base import Closing

from .errors import TooLarge
from .ticket import Extent, Shape

Pin = Callable[[int, int], Closing]
"""Makes host memory, from an address and so many bytes, reachable for the device."""

_SIZE = struct.Struct("<Q")
SMALLEST = 64 * 1024
"""Bytes of a new slot; pages are taken from the system only when they are written."""


class Slot:
    """Page-aligned host memory for one request at a time; owned by one side at a time, and by one thread there.

    `pin` makes the memory reachable for the device, for as long as it is the slot's.
    """

    def __init__(self, index: int, pin: Pin | None = None) -> None:
        self.index = index
        self._pin = pin
        self._pinned: Closing | None = None
        self._map(SMALLEST)

    def __repr__(self) -> str:
        return f"<Slot {self.index}, {self.capacity} bytes>"

    def _map(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, nbytes)
        self.capacity = nbytes
        self.view = memoryview(memory)
        self.address = np.frombuffer(memory, np.uint8).ctypes.data
        self.close()
        if self._pin:
            self._pinned = self._pin(self.address, nbytes)

    def close(self) -> None:
        """Unpin the memory; nothing of the device may use it any more."""
        if self._pinned:
            self._pinned.close()
            self._pinned = None

    def reserve(self, nbytes: int, keep: int = 0) -> None:
        """Make room for this many bytes; of what was in a slot that has to grow, the first `keep` bytes stay.

        Raises TooLarge, and leaves the slot as it was, if there is no such memory.
        """
        if nbytes > self.capacity:
            kept = self.view[:keep]
            try:
                self._map(1 << (nbytes - 1).bit_length())
            except (OSError, OverflowError) as error:
                raise TooLarge(f"the request and its answer need {nbytes} bytes of memory, more than can be had") from error
            self.view[:keep] = kept

    def shrink(self) -> None:
        """Give grown memory back to the system."""
        if self.capacity > SMALLEST:
            self._map(SMALLEST)

    def place(self, signature: Signature, sizes: Sequence[int], room: int = 0) -> list[int]:
        """Lay out inputs of these sizes in bytes, reserve that and `room` bytes after them, and return their offsets.

        Raises TooLarge.
        """
        offsets, end = [], 0
        for spec, size in zip(signature.inputs, sizes, strict=True):
            start = end if spec.datatype.size else end + ALIGNMENT
            offsets.append(start)
            end = align(start + size)
        self.reserve(end + room)
        for spec, offset, size in zip(signature.inputs, offsets, sizes, strict=True):
            if not spec.datatype.size:
                _SIZE.pack_into(self.view, offset - ALIGNMENT, size)
        return offsets

    def inputs(self, signature: Signature, shapes: Sequence[Shape]) -> tuple[list[Tensor], Room]:
        """The tensors that `place` laid out, and the room after them."""
        tensors, end = [], 0
        for spec, shape in zip(signature.inputs, shapes, strict=True):
            size = spec.nbytes(shape)
            if not spec.datatype.size:
                (size,) = _SIZE.unpack_from(self.view, end)
                end += ALIGNMENT
            tensors.append(Tensor(shape, self.address + end, size))
            end = align(end + size)
        return tensors, Room(self.address + end, self.capacity - end)

    def keep(self, outputs: Sequence[Tensor], room: Room) -> tuple[Extent, ...]:
        """Say where the outputs lie in this slot, after bringing in those that lie elsewhere to behind what is in the room.

        An output may lie over an input: it stays there. Raises TooLarge.
        """
        low, high = self.address, self.address + self.capacity
        if all(low <= tensor.address and tensor.address + tensor.nbytes <= high for tensor in outputs):
            return tuple([Extent(t.shape, t.address - low, t.nbytes) for t in outputs])
        return tuple(self._bring_in(outputs, room.address - low))

    def _bring_in(self, outputs: Sequence[Tensor], end: int) -> Iterator[Extent]:
        base, capacity = self.address, self.capacity
        inside = [base <= t.address and t.address + t.nbytes <= base + capacity for t in outputs]
        end = max([end, *(align(t.address - base + t.nbytes) for t, here in zip(outputs, inside, strict=True) if here)])
        for tensor, here in zip(outputs, inside, strict=True):
            if here:
                yield Extent(tensor.shape, tensor.address - base, tensor.nbytes)
            else:
                self.reserve(end + tensor.nbytes, keep=end)
                self.view[end : end + tensor.nbytes] = view(tensor.address, tensor.nbytes)
                yield Extent(tensor.shape, end, tensor.nbytes)
                end = align(end + tensor.nbytes)


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """Slots in use, slots that exist, and the bytes of memory mapped for them."""

    used: int
    slots: int
    nbytes: int


class SlotPool:
    """One tenant's slots, made when first needed and used again, the last one first: its memory is the warmest.

    Memory that large requests left behind is kept up to `keep` bytes in all. `pin` is to be set before the first is made.
    Not thread-safe: the HTTP side's.
    """

    def __init__(self, keep: int = 256 << 20) -> None:
        self.pin: Pin | None = None
        self._keep = keep
        self._slots: list[Slot] = []
        self._free: list[Slot] = []

    def __repr__(self) -> str:
        return f"<SlotPool {len(self._slots) - len(self._free)} of {len(self._slots)} in use>"

    def statistics(self) -> SlotStatistics:
        used = len(self._slots) - len(self._free)
        return SlotStatistics(used, len(self._slots), sum(slot.capacity for slot in self._slots))

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def acquire(self) -> Slot:
        """Take a slot; its memory holds whatever was there. How many are out is bounded by the scheduler's queue."""
        if self._free:
            return self._free.pop()
        self._slots.append(Slot(len(self._slots), self.pin))
        return self._slots[-1]

    def close(self) -> None:
        """Unpin every slot; nothing may be in flight."""
        for slot in self._slots:
            slot.close()

    def release(self, slot: Slot) -> None:
        """Give a slot back; nothing may read or write it any more."""
        if slot.capacity > SMALLEST and sum(other.capacity for other in self._slots) > self._keep:
            slot.shrink()
        self._free.append(slot)
