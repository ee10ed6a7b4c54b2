"""A lane's answers in parts: a ticket for each part, which is queued behind all others once the client has taken the last one.

So a part is to the queue and to the worker what an inference is: other requests run between two parts, and a client that does
not read its answer stops nothing but that. An answer that waits for its client counts as queued.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

from ..link.messages import Done, Ticket
from ..link.ring import Tickets
from .pending import Deadlines, PendingRequest
from .scheduler import Scheduler

_HIGHEST = 1
"""The priority that is ahead of all others."""
_PASSED = 0.0
"""A deadline that has passed, on any clock."""


class PartRuns:
    """The answers in parts of one lane. Belongs to the event loop.

    `tickets` are those of the lane's current link, and `serials` numbers them; `expire` ends a request whose deadline has
    passed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tickets: Tickets,
        deadlines: Deadlines,
        serials: Iterator[int],
        expire: Callable[[PendingRequest], None],
    ) -> None:
        self._scheduler = scheduler
        self.tickets = tickets
        self._deadlines = deadlines
        self._serials = serials
        self._expire = expire

    def pause(self, pending: PendingRequest) -> None:
        """A part has ended, and its answer goes on: `proceed` or `free` follows."""
        pending.paused = True
        self._scheduler.paused += 1

    def proceed(self, pending: PendingRequest) -> None:
        """Queue the next part, whatever the limit of the queue: the request was admitted."""
        self._queue(pending, pending.ticket.deadline, pending.priority)

    def free(self, pending: PendingRequest) -> None:
        """Queue a ticket that the worker refuses, as its deadline has passed: so it frees what it keeps of the answer."""
        pending.on_done = None
        self._queue(pending, _PASSED, _HIGHEST)

    def _queue(self, pending: PendingRequest, deadline: float, priority: int) -> None:
        slot, last = pending.slot, pending.ticket
        # Where the last ticket was withdrawn it did not run, so this one comes after the same part.
        serial, after = next(self._serials), last.serial if pending.paused else last.after
        block = slot.capacity, slot.start
        pending.ticket = Ticket(slot.index, serial, last.model, last.shapes, deadline, *block, after, unasked=last.unasked)
        self.tickets.write(pending.ticket)
        if pending.paused:
            pending.paused = False
            self._scheduler.paused -= 1
        if pending.timeout < math.inf or pending.queue_deadline < math.inf:
            self._deadlines.remove(last.deadline, last.serial)
            self._deadlines.remove(pending.queue_deadline, -last.serial)
            pending.queue_deadline = math.inf
            if pending.on_done and pending.timeout < math.inf:
                self._deadlines.add(deadline, serial, partial(self._expire, pending))
        self._scheduler.add(pending.ticket, priority)


def goes_on(done: Done) -> bool:
    """Whether an answer in parts has not ended with this completion."""
    return done.failure.kind == "outgrown" if done.failure else bool(done.outputs)


def has_begun(ticket: Ticket) -> bool:
    """Whether the worker keeps something of this ticket's answer before the ticket runs."""
    return ticket.after != 0 and ticket.after != ticket.serial
