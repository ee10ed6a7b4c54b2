"""The memory that an inference's tensors live in, from the parsed request to the encoded answer.

A slot's layout follows from the model's signature and the shapes alone, so that both sides find the tensors without
being told: inputs in the signature's order, each at a multiple of 64 bytes, the outputs after them. A BYTES tensor,
whose size no shape tells, is preceded by one such block that begins with its size as a little-endian uint64.
"""

import struct
from collections.abc import Iterator, Sequence

from engines import Room, Signature, Tensor
from engines.memory import view
from engines.signature import ALIGNMENT, align

from .errors import TooLarge
from .ticket import Extent, Shape

_SIZE = struct.Struct("<Q")
SMALLEST = 64 * 1024
"""Bytes that a slot has at least; pages are taken from the system only when they are written."""
LARGEST = 1 << 30
"""Bytes that a slot may grow to."""


class Slot:
    """Page-aligned memory for one request at a time; owned by one side at a time, and by one thread there.

    `view` is all of it, at `address` in this process; what is said of it is written to `ticket` and `completion`.
    `capacity` is how many bytes of it have been asked for, always a power of two: those the device has to reach.
    """

    def __init__(self, index: int, view: memoryview, address: int, ticket: memoryview, completion: memoryview) -> None:
        self.index = index
        self.view = view
        self.address = address
        self.ticket = ticket
        self.completion = completion
        self.capacity = SMALLEST
        self._laid: tuple[object, tuple[list[Tensor], Room]] | None = None

    def __repr__(self) -> str:
        return f"<Slot {self.index}, {self.capacity} bytes>"

    def reserve(self, nbytes: int) -> None:
        """Make room for this many bytes; what is there stays. Raises TooLarge, and leaves the slot as it was."""
        if nbytes > len(self.view):
            raise TooLarge(f"the request and its answer need {nbytes} bytes of memory; the most is {len(self.view)}")
        if nbytes > self.capacity:
            self.capacity = 1 << (nbytes - 1).bit_length()

    def shrink(self) -> None:
        """Ask for no more than at first."""
        self.capacity = SMALLEST

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

    def inputs(self, signature: Signature, shapes: Sequence[Shape], capacity: int) -> tuple[list[Tensor], Room]:
        """The tensors that `place` laid out, and the room after them, up to `capacity` bytes from the slot's beginning."""
        if self._laid and self._laid[0] == (signature, shapes, capacity):  # A slot's requests are mostly alike.
            return self._laid[1]
        tensors, end, sized = [], 0, True
        for spec, shape in zip(signature.inputs, shapes, strict=True):
            size = spec.nbytes(shape)
            if not spec.datatype.size:
                (size,) = _SIZE.unpack_from(self.view, end)
                end, sized = end + ALIGNMENT, False
            tensors.append(Tensor(shape, self.address + end, size))
            end = align(end + size)
        laid = tensors, Room(self.address + end, capacity - end)
        self._laid = ((signature, shapes, capacity), laid) if sized else None
        return laid

    def keep(self, outputs: Sequence[Tensor], room: Room) -> tuple[Extent, ...]:
        """Say where the outputs lie in this slot, after bringing in those that lie elsewhere to behind what is in the room.

        An output may lie over an input: it stays there. Raises TooLarge.
        """
        low, high = self.address, self.address + len(self.view)
        if all(low <= tensor.address and tensor.address + tensor.nbytes <= high for tensor in outputs):
            return tuple([Extent(t.shape, t.address - low, t.nbytes) for t in outputs])
        return tuple(self._bring_in(outputs, room.address - low))

    def _bring_in(self, outputs: Sequence[Tensor], end: int) -> Iterator[Extent]:
        base, capacity = self.address, len(self.view)
        inside = [base <= t.address and t.address + t.nbytes <= base + capacity for t in outputs]
        end = max([end, *(align(t.address - base + t.nbytes) for t, here in zip(outputs, inside, strict=True) if here)])
        for tensor, here in zip(outputs, inside, strict=True):
            if here:
                yield Extent(tensor.shape, tensor.address - base, tensor.nbytes)
            else:
                self.reserve(end + tensor.nbytes)
                self.view[end : end + tensor.nbytes] = view(tensor.address, tensor.nbytes)
                yield Extent(tensor.shape, end, tensor.nbytes)
                end = align(end + tensor.nbytes)
