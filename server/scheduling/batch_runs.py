"""A lane's batches: puts the inputs of several requests into one slot, and gives each request its rows of the outputs."""

import logging
from collections.abc import Callable, Iterator, Sequence

from engines import TensorMismatch

from ..errors import QueueFull, RequestError
from ..link.messages import Done, ModelKey, Ticket
from ..link.ring import Tickets
from .batching import Choice, Queued
from .gather import Layouts, gather, split
from .pending import PendingBatch, PendingRequest
from .queue_policy import Batching
from .scheduler import Scheduler
from .slot_pool import SlotPool

log = logging.getLogger("greenlane.lane")


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
