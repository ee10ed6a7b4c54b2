"""A lane's batches: puts the inputs of several requests into one slot, and gives each request its rows of the outputs."""

import logging
import math
import struct
from collections.abc import Callable, Iterator, Sequence

from engines import Signature, TensorMismatch, TensorSpec
from engines.memo import Memo

from ..errors import QueueFull, RequestError
from ..link.messages import NOWHERE, Done, Extent, ModelKey, Shape, Ticket
from ..link.ring import Tickets
from ..link.slots import Slot
from .batching import Choice, Queued
from .pending import PendingBatch, PendingRequest
from .queue_policy import Batching
from .scheduler import Scheduler
from .slot_pool import SlotPool

log = logging.getLogger("greenlane.lane")

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
    """Concatenate the members' inputs in a slot, in order: BYTES in wire form, one element after another, like any other type.
    Raises TooLarge or MemoryFull; then nothing was written.
    """
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


class BatchRuns:
    """The batches in flight of one lane. Belongs to the event loop.

    A batch has a slot of its own, to which the inputs of its members are copied and from which their outputs are read. The
    slot is free when the work has ended and the last member was released; the work is cancelled when all members are released
    before it ends. `pending` are the lane's requests by slot, `serials` numbers its tickets, `cancel(slot, serial)` stops a
    ticket, and `finish` ends a request with its completion. `tickets` is replaced when the lane gets a new link.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        slots: SlotPool,
        tickets: Tickets,
        pending: dict[int, PendingRequest],
        serials: Iterator[int],
        cancel: Callable[[int, int], None],
        finish: Callable[[PendingRequest, Done], None],
    ) -> None:
        self._scheduler = scheduler
        self._slots = slots
        self.tickets = tickets
        self._pending = pending
        self._serials = serials
        self._cancel = cancel
        self._finish = finish
        self._layouts = Layouts()
        self.running: dict[int, PendingBatch] = {}
        """By slot."""
        self.unbatchable: set[ModelKey] = set()
        """Models whose outputs could not be split; their requests run alone from then on."""

    def released(self) -> int:
        """How many members of running batches were released by their owners."""
        return sum(len(batch.members) - len(batch.unreleased) for batch in self.running.values())

    def launch(self, choice: Choice) -> Ticket:
        """Launch all chosen requests as one ticket, or the first one alone if they cannot be put into one slot."""
        batch = self._gather(choice.members, choice.batching) if choice.batching else None
        if batch is None:
            ticket = choice.members[0][2]
            self._scheduler.launch(choice.members[:1], ticket.slot)
            return ticket
        self.running[batch.slot.index] = batch
        for _, _, ticket, _ in batch.members:
            self._pending[ticket.slot].batch = batch
        self._scheduler.launch(batch.members, batch.slot.index)
        return batch.ticket

    def release(self, batch: PendingBatch, slot: int) -> None:
        """The owner of this member has released it."""
        batch.unreleased.remove(slot)
        if batch.unreleased:
            return
        if batch.ended:
            self._slots.release(batch.slot)
        else:
            self._cancel(batch.slot.index, batch.ticket.serial)

    def end(self, batch: PendingBatch, done: Done) -> None:
        """The work of a batch, which is not in `running` any more, has ended: finish its members, or queue each again alone."""
        batch.ended = True
        if not batch.unreleased:
            self._slots.release(batch.slot)
        elif done.failure and done.failure.kind in ("raised", "outgrown", "overrun"):
            self._retry_alone(batch)
        else:
            self._split(batch, done)

    def end_all(self) -> None:
        """The works of all batches have ended without outputs, and the lane completes their members."""
        for batch in self.running.values():
            batch.ended = True
            if not batch.unreleased:
                self._slots.release(batch.slot)
        self.running.clear()

    def _split(self, batch: PendingBatch, done: Done) -> None:
        rows = [ticket.shapes[0][0] for _, _, ticket, _ in batch.members]
        try:
            unasked, signature = batch.ticket.unasked, batch.batching.signature
            shares = [()] * len(rows) if done.failure else split(done.outputs, rows, signature, batch.slot, unasked)
        except ValueError as error:
            log.warning("model %s: batching disabled, its outputs cannot be split: %s", batch.ticket.model, error)
            self.unbatchable.add(batch.ticket.model)
            self._retry_alone(batch)
            return
        slot, _, failure, began, ended, _ = done
        total = sum(rows)
        for (_, _, ticket, _), outputs in zip(batch.members, shares, strict=True):
            if ticket.slot in batch.unreleased:
                self._finish(self._pending[ticket.slot], Done(slot, outputs, failure, began, ended, total))

    def _retry_alone(self, batch: PendingBatch) -> None:
        """Queue each remaining member again, alone, so that one request's data fails no other request."""
        remaining = [each for each in batch.members if each[2].slot in batch.unreleased]
        for _, _, ticket, _ in remaining:
            self._pending[ticket.slot].batch = None
        self._scheduler.put_back(remaining)
        self._slots.release(batch.slot)

    def _gather(self, members: Sequence[Queued], batching: Batching) -> PendingBatch | None:
        """Copy the members' inputs into one slot; None if no slot or memory is free, or the model refuses the shapes."""
        try:
            slot = self._slots.acquire()
        except QueueFull:
            return None
        tickets = [ticket for _, _, ticket, _ in members]
        try:
            sources = [(self._pending[ticket.slot].slot, ticket.shapes) for ticket in tickets]
            layout = self._layouts.of(tickets[0].model, sources, batching.signature)
            gather(sources, layout, batching.signature, slot)
            deadline = max([ticket.deadline for ticket in tickets])
            serial = next(self._serials)
            unasked = tickets[0].unasked
            for ticket in tickets:
                unasked &= ticket.unasked
            block = slot.capacity, slot.start
            whole = Ticket(slot.index, serial, tickets[0].model, layout.shapes, deadline, *block, unasked=unasked)
            self.tickets.write(whole)
        except (RequestError, TensorMismatch):
            self._slots.release(slot)
            return None
        return PendingBatch(slot, whole, batching, members, {ticket.slot for ticket in tickets})
