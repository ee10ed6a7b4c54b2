"""The memory that an inference's tensors live in, from the parsed request to the encoded answer.

A slot's layout follows from the model's signature and the shapes alone, so both sides compute it without exchanging it: inputs
in the signature's order, each at a multiple of 64 bytes, then the outputs. A BYTES tensor, whose size does not follow from its
shape, is preceded by 64 bytes that begin with its size as a little-endian uint64.
"""

import struct
from collections.abc import Callable, Sequence

from engines import Room, Signature, Tensor
from engines.memory import copy
from engines.signature import ALIGNMENT, align

from ..errors import Outgrown
from .blocks import UNIT, BlockAllocator
from .messages import NOWHERE, Extent, Shape

_SIZE = struct.Struct("<Q")
SMALLEST = UNIT
"""The smallest block of a slot, in bytes."""


class Slot:
    """Memory for one request at a time; owned by one side at a time, and by one thread there.

    Its tensors are in a block of the tenant's memory, of `capacity` bytes from `start` on: `view`, at `address` in this
    process. The HTTP side allocates the block from `blocks` when it knows the size; the ticket names it to the device side.
    `ticket` and `completion` are the pages of the slot's messages.
    """

    def __init__(self, index: int, memory: memoryview, base: int, ticket: memoryview, completion: memoryview) -> None:
        self.index = index
        self.blocks: BlockAllocator | None = None
        self.start = 0
        self.capacity = 0
        self.view = memory[:0]
        self.address = base
        self.ticket = ticket
        self.completion = completion
        self._memory = memory
        self._base = base
        self._layout: tuple[object, tuple[list[Tensor], Room]] | None = None
        self._stored: tuple[Sequence[Tensor], int, int, tuple[Extent, ...]] = ((), 0, 0, ())
        self._on_free: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Slot {self.index}, {self.capacity} bytes>"

    def reserve(self, nbytes: int, spare: int = 0, evict: bool = True) -> None:
        """Make the block at least this large, plus `spare` if there is room; the contents of a smaller block are kept.

        For the HTTP side. `evict` is as for `BlockAllocator.allocate`. Raises TooLarge or MemoryFull, and then leaves the slot
        unchanged.
        """
        if self.capacity and nbytes <= self.capacity:
            return
        if self.blocks is None:
            raise ValueError(f"{self!r} was not handed out by a pool, so there is no memory to take {nbytes} bytes of")
        taken, size = self.blocks.allocate(nbytes, spare, evict)
        before, start, capacity = self.address, self.start, self.capacity
        self.use_block(taken, size)
        if capacity:
            copy(self.address, before, capacity)
            self.blocks.free(start, capacity)

    def use_block(self, start: int, capacity: int) -> None:
        """Use this block, which the slot's owner holds. Raises ValueError if it is not inside the tenant's memory."""
        if start == self.start and capacity == self.capacity:
            return
        if not 0 <= start <= start + capacity <= len(self._memory):
            raise ValueError(f"slot {self.index}: {capacity} bytes from {start} on are not in {len(self._memory)} of memory")
        self.start, self.capacity = start, capacity
        self.view = self._memory[start : start + capacity]
        self.address = self._base + start

    def use_foreign_block(self, start: int, capacity: int, on_free: Callable[[], None]) -> None:
        """Use this block, which another process holds, until `free_block`: that calls `on_free` instead. Raises ValueError."""
        self.use_block(start, capacity)
        self._on_free = on_free

    def free_block(self) -> None:
        """Free the block; nothing may read or write it any more."""
        if self._on_free is not None:
            on_free, self._on_free, self.capacity = self._on_free, None, 0
            on_free()
        elif self.blocks is not None and self.capacity:
            self.blocks.free(self.start, self.capacity)
        self.capacity = 0

    def lay_out(
        self, signature: Signature, sizes: Sequence[int], room: int = 0, spare: int = 0, evict: bool = True
    ) -> list[int]:
        """Lay out inputs of these sizes, in bytes, with `room` bytes after them; reserve the memory and return the offsets.

        `spare` and `evict` are as for `reserve`. Raises TooLarge or MemoryFull.
        """
        offsets, end = [], 0
        for spec, size in zip(signature.inputs, sizes, strict=True):
            start = end if spec.datatype.size else end + ALIGNMENT
            offsets.append(start)
            end = align(start + size)
        self.reserve(end + room, spare, evict)
        for spec, offset, size in zip(signature.inputs, offsets, sizes, strict=True):
            if not spec.datatype.size:
                _SIZE.pack_into(self.view, offset - ALIGNMENT, size)
        return offsets

    def inputs(self, signature: Signature, shapes: Sequence[Shape], capacity: int) -> tuple[list[Tensor], Room]:
        """The tensors that `lay_out` laid out, and the room after them, up to `capacity` bytes from the slot's start.

        Raises ValueError if they do not fit: shapes, and sizes of BYTES tensors, may be another process's.
        """
        key = (signature, shapes, self.start, capacity)
        if self._layout and self._layout[0] == key:  # Successive requests in a slot mostly have the same shapes and block.
            return self._layout[1]
        tensors, end, sized = [], 0, True
        for spec, shape in zip(signature.inputs, shapes, strict=True):
            size = spec.nbytes(shape)
            if not spec.datatype.size:
                (size,) = _SIZE.unpack_from(self.view, end) if end + ALIGNMENT <= capacity else (capacity,)
                end, sized = end + ALIGNMENT, False
            if end + size > capacity:
                raise ValueError(f"slot {self.index}: input {spec.name!r} ends at byte {end + size} of {capacity}")
            tensors.append(Tensor(shape, self.address + end, size))
            end = align(end + size)
        laid = tensors, Room(self.address + end, capacity - end)
        self._layout = (key, laid) if sized else None
        return laid

    def store_outputs(self, outputs: Sequence[Tensor], room: Room) -> tuple[Extent, ...]:
        """Where the outputs are in this slot; outputs that are elsewhere in memory are copied behind those that are here.

        An output may overlap an input. Those that were not asked for are NOWHERE. Raises Outgrown if the outputs do not fit,
        and then leaves the inputs unchanged.
        """
        if room.unasked:
            return self._store_asked(outputs, room)
        last, start, capacity, extents = self._stored
        if outputs is last and start == self.start and capacity == self.capacity:  # As of most successive requests in a slot.
            return extents
        low, high = self.address, self.address + self.capacity
        for tensor in outputs:  # Not `all`, whose generator takes as long as the rest when compiled.
            if not low <= tensor.address <= tensor.address + tensor.nbytes <= high:
                return self._copy_in(outputs, room.address - low)
        extents = tuple([Extent(t.shape, t.address - low, t.nbytes) for t in outputs])
        if type(outputs) is tuple:  # It cannot change.
            self._stored = outputs, self.start, self.capacity, extents
        return extents

    def _store_asked(self, outputs: Sequence[Tensor], room: Room) -> tuple[Extent, ...]:
        asked = [not room.unasked >> index & 1 for index in range(len(outputs))]
        wanted = [tensor for tensor, is_asked in zip(outputs, asked, strict=True) if is_asked]
        stored = iter(self.store_outputs(wanted, Room(room.address, room.nbytes)))
        return tuple([next(stored) if is_asked else NOWHERE for is_asked in asked])

    def _copy_in(self, outputs: Sequence[Tensor], end: int) -> tuple[Extent, ...]:
        base, capacity = self.address, self.capacity
        inside = [base <= t.address and t.address + t.nbytes <= base + capacity for t in outputs]
        end = max([end, *(align(t.address - base + t.nbytes) for t, here in zip(outputs, inside, strict=True) if here)])
        extents, needed = [], 0
        for tensor, here in zip(outputs, inside, strict=True):
            offset = tensor.address - base if here else end
            if not here:
                needed = end + tensor.nbytes
                end = align(needed)
            extents.append(Extent(tensor.shape, offset, tensor.nbytes))
        if needed > capacity:
            raise Outgrown(needed)
        for tensor, here, (_, offset, nbytes) in zip(outputs, inside, extents, strict=True):
            if not here:
                copy(base + offset, tensor.address, nbytes)
        return tuple(extents)
