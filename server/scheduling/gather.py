"""Copies the rows of several requests into one slot, and finds each request's rows in its outputs.

BYTES in wire form is one element after another, so its rows are concatenated like those of any other type.
"""

import math
import struct
from collections.abc import Sequence

from engines import Signature, TensorSpec
from engines.memo import Memo

from ..link.messages import NOWHERE, Extent, ModelKey, Shape
from ..link.slots import Slot

Shapes = tuple[Shape, ...]
Member = tuple[Slot, Shapes]
"""A request whose inputs, of these shapes, are in this slot."""
Spans = Sequence[tuple[int, int]]
"""Offset and size, in bytes, of each input in a slot."""

_MAX_LAYOUTS = 256
_LENGTH = struct.Struct("<I")


class Layout:
    """A batch in one slot: its `shapes`, the bytes of each input (`sizes`), of the outputs (`room`) and of what outputs of
    unknown size may take (`spare`), and where each input is in each member's slot: `spans` has offsets and sizes in bytes.

    `fixed` is whether it follows from the shapes alone, and not from what is in the slots too.
    """

    __slots__ = ("fixed", "room", "shapes", "sizes", "spans", "spare")

    # Not a dataclass, whose constructor stays Python when this is compiled.
    def __init__(
        self, shapes: Shapes, sizes: Sequence[int], room: int, spare: int, spans: Sequence[Spans], fixed: bool
    ) -> None:
        self.shapes = shapes
        self.sizes = sizes
        self.room = room
        self.spare = spare
        self.spans = spans
        self.fixed = fixed


class Layouts:
    """Computes the layouts of a lane's batches; that of requests of the same shapes once. Belongs to the event loop."""

    def __init__(self) -> None:
        self._known: Memo[tuple[ModelKey, Shapes, int], Layout] = Memo(_MAX_LAYOUTS)

    def of(self, model: ModelKey, members: Sequence[Member], signature: Signature) -> Layout:
        """The layout of these members as one batch of the model, whose signature it is.

        Raises TensorMismatch if the model does not take the batch.
        """
        first = members[0][1]
        for _, shapes in members:
            if shapes != first:
                return _layout(members, signature)
        key = (model, first, len(members))
        if (known := self._known.get(key)) is not None:
            return known
        layout = _layout(members, signature)
        if layout.fixed:
            self._known.remember(key, layout)
        return layout


def gather(members: Sequence[Member], layout: Layout, signature: Signature, into: Slot) -> None:
    """Concatenate the members' inputs in a slot, in order. Raises TooLarge or MemoryFull; then nothing was written."""
    ends = into.lay_out(signature, layout.sizes, layout.room, layout.spare)
    for (slot, _), spans in zip(members, layout.spans, strict=True):
        for index, (offset, size) in enumerate(spans):
            end = ends[index]
            ends[index] = end + size
            into.view[end : end + size] = slot.view[offset : offset + size]


def split(
    outputs: Sequence[Extent], rows: Sequence[int], signature: Signature, slot: Slot, unasked: int = 0
) -> list[tuple[Extent, ...]]:
    """Where each member, of so many rows, has its outputs in the slot; `unasked` is as in `Ticket`.

    Raises ValueError if the outputs have other rows.
    """
    columns = [
        [NOWHERE] * len(rows)
        if unasked >> index & 1
        else _split_sized(extent, rows, spec, slot)
        if spec.datatype.size
        else _split_bytes(extent, rows, spec, slot)
        for index, (spec, extent) in enumerate(zip(signature.outputs, outputs, strict=True))
    ]
    return list(zip(*columns, strict=True)) if columns else [()] * len(rows)


def _layout(members: Sequence[Member], signature: Signature) -> Layout:
    rows = sum(shapes[0][0] for _, shapes in members)
    whole = tuple((rows, *shape[1:]) for shape in members[0][1])
    sizes = signature.check(whole)
    spans = [_spans(slot, shapes, signature) for slot, shapes in members]
    totals = [sum(size for _, size in column) for column in zip(*spans, strict=True)]
    unsized = _has_unsized_outputs(signature, sizes)
    spare = sum(_room(slot, shapes, signature) for slot, shapes in members) if unsized else 0
    fixed = not unsized and all(spec.datatype.size for spec in signature.inputs)
    return Layout(whole, totals, signature.output_bytes(sizes), spare, spans, fixed)


def _spans(slot: Slot, shapes: Shapes, signature: Signature) -> Spans:
    tensors, _ = slot.inputs(signature, shapes, slot.capacity)
    return [(tensor.address - slot.address, tensor.nbytes) for tensor in tensors]


def _room(slot: Slot, shapes: Shapes, signature: Signature) -> int:
    """Bytes that a member has reserved for its outputs."""
    return slot.inputs(signature, shapes, slot.capacity)[1].nbytes


def _has_unsized_outputs(signature: Signature, sizes: dict[str, int]) -> bool:
    """Whether the size of some output does not follow from the shapes."""
    return any(not spec.datatype.size for spec in signature.outputs) or None in signature.output_shapes(sizes)


def _split_sized(extent: Extent, rows: Sequence[int], spec: TensorSpec, slot: Slot) -> list[Extent]:
    shape, offset, _ = _checked(extent, rows, spec)
    row = math.prod(shape[1:]) * spec.datatype.size
    parts = []
    for count in rows:
        parts.append(Extent((count, *shape[1:]), offset, count * row))
        offset += count * row
    return parts


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
