"""Copies the rows of several requests into one slot, and finds each request's rows in its outputs.

BYTES in wire form is one element after another, so its rows are concatenated like those of any other type.
"""

import math
import struct
from collections.abc import Sequence
from itertools import accumulate

from engines import Signature, TensorSpec

from ..link.messages import Extent, Shape
from ..link.slots import Slot

Shapes = tuple[Shape, ...]
_LENGTH = struct.Struct("<I")


def gather(members: Sequence[tuple[Slot, Shapes]], signature: Signature, into: Slot) -> Shapes:
    """Concatenate the members' inputs in a slot, in order, and return the shapes of the batch.

    Raises TooLarge or MemoryFull, or TensorMismatch if the model does not take the batch; then nothing was written.
    """
    rows = sum(shapes[0][0] for _, shapes in members)
    whole = tuple((rows, *shape[1:]) for shape in members[0][1])
    sizes = signature.check(whole)
    room = signature.output_bytes(sizes)
    spare = sum(_room(slot, shapes, signature) for slot, shapes in members) if _has_unsized_outputs(signature, sizes) else 0
    spans = _spans(members, signature)
    ends = into.lay_out(signature, [sum(size for _, size in column) for column in zip(*spans, strict=True)], room, spare)
    for (slot, _), each in zip(members, spans, strict=True):
        for index, (offset, size) in enumerate(each):
            end = ends[index]
            ends[index] = end + size
            into.view[end : end + size] = slot.view[offset : offset + size]
    return whole


def split(outputs: Sequence[Extent], rows: Sequence[int], signature: Signature, slot: Slot) -> list[tuple[Extent, ...]]:
    """Where each member, of so many rows, has its outputs in the slot. Raises ValueError if the outputs have other rows."""
    columns = [
        _split_sized(extent, rows, spec, slot) if spec.datatype.size else _split_bytes(extent, rows, spec, slot)
        for spec, extent in zip(signature.outputs, outputs, strict=True)
    ]
    return list(zip(*columns, strict=True)) if columns else [()] * len(rows)


def _spans(members: Sequence[tuple[Slot, Shapes]], signature: Signature) -> list[list[tuple[int, int]]]:
    """Offset and size of each input of each member; without BYTES inputs, computed once for all members of the same shapes."""
    if any(not spec.datatype.size for spec in signature.inputs):
        return [_layout(slot, shapes, signature) for slot, shapes in members]
    known = {shapes: _layout(slot, shapes, signature) for shapes, slot in {shapes: slot for slot, shapes in members}.items()}
    return [known[shapes] for _, shapes in members]


def _layout(slot: Slot, shapes: Shapes, signature: Signature) -> list[tuple[int, int]]:
    tensors, _ = slot.inputs(signature, shapes, slot.capacity)
    return [(tensor.address - slot.address, tensor.nbytes) for tensor in tensors]


def _room(slot: Slot, shapes: Shapes, signature: Signature) -> int:
    """Bytes that a member has reserved for its outputs."""
    return slot.inputs(signature, shapes, slot.capacity)[1].nbytes


def _has_unsized_outputs(signature: Signature, sizes: dict[str, int]) -> bool:
    """Whether the size of some output does not follow from the shapes."""
    texts = any(not spec.datatype.size for spec in signature.outputs)
    return texts or None in signature.output_shapes(sizes)


def _split_sized(extent: Extent, rows: Sequence[int], spec: TensorSpec, slot: Slot) -> list[Extent]:
    shape, offset, _ = _checked(extent, rows, spec)
    row = math.prod(shape[1:]) * spec.datatype.size
    shapes = {count: (count, *shape[1:]) for count in set(rows)}
    starts = accumulate(rows, initial=0)
    return [Extent(shapes[count], offset + start * row, count * row) for count, start in zip(rows, starts, strict=False)]


def _split_bytes(extent: Extent, rows: Sequence[int], spec: TensorSpec, slot: Slot) -> list[Extent]:
    shape, at, nbytes = _checked(extent, rows, spec)
    row, parts, data = math.prod(shape[1:]), [], slot.view[: at + nbytes]
    for count in rows:
        start = at
        for _ in range(count * row):
            at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
        parts.append(Extent((count, *shape[1:]), start, at - start))
    return parts


def _checked(extent: Extent, rows: Sequence[int], spec: TensorSpec) -> Extent:
    if extent.shape[:1] != (sum(rows),):
        raise ValueError(f"output {spec.name!r} has shape {list(extent.shape)} after {sum(rows)} rows went in")
    return extent
