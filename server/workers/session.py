"""What a worker's threads share while they serve one link."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock, Semaphore
from typing import Any, NamedTuple

from engines import Room, Tensor, Work
from partitions.base import Closing

from ..errors import Unavailable
from ..link.messages import Ticket
from ..link.ring import Link
from .deferred import DeferredTickets
from .gil_priority import GilPriority
from .thread_roles import ThreadRoles


class Endpoint(NamedTuple):
    """The device side's end of a tenant: its link, and the handle that keeps its tensor memory page-locked for the device."""

    link: Link
    pinned: Closing


class Unfinished(NamedTuple):
    """An answer between two parts: the serial of the last part's ticket, and its work.

    `stored` is False if the part was larger than its slot: it waits for the next ticket, which brings a larger block.
    """

    serial: int
    work: Work
    stored: bool


@dataclass(slots=True)
class InFlight:
    """A ticket whose work was enqueued and has not ended."""

    ticket: Ticket
    work: Work
    room: Room


class Session:
    """What the threads of a worker share from `Worker.serve` to `Worker.halt`.

    The thread that holds `enqueuing` takes tickets and enqueues them, to `flights`; the one that holds `reporting` writes
    completions; and one waits for the works in `flights`, as `roles` decides.
    """

    def __init__(self, endpoint: Endpoint, priority: GilPriority, threads: int) -> None:
        tickets, completions = endpoint.link.tickets, endpoint.link.completions
        self.link = endpoint.link
        self.priority = priority
        self.roles = ThreadRoles(threads, tickets.wake)
        self.deferred = DeferredTickets(tickets.take_returned(), completions.report_deferred, tickets.wake)
        self.flights: deque[InFlight] = deque()
        self.unfinished: dict[int, Unfinished] = tickets.unfinished
        """By slot, the answers that go on with their next ticket. The link's: the next worker goes on with them."""
        self.enqueuing = Lock()
        self.reporting = Lock()
        self.ended: Future[None] = Future()
        """Done when the last thread ends: nothing is in flight any more."""
        self.ended.set_running_or_notify_cancel()  # So that nothing that awaits it can cancel it.
        self.error: Exception | None = None
        """Why the threads ended, if one of them failed."""
        self.started = Semaphore(0)
        """Released by each thread once it is attached to the partition, or failed to."""

    def __repr__(self) -> str:
        return f"<Session {self.roles!r}, {len(self.flights)} in flight, {self.deferred!r}>"

    def enqueue_part(self, ticket: Ticket, executor: Any, inputs: Sequence[Tensor]) -> Work:
        """Begin an answer in parts, or go on with one. Raises Unavailable if it was begun on another link.

        Parts get no room: one that turns out to be larger than its slot must outlive the slot's block.
        """
        last = self.unfinished.pop(ticket.slot, None)
        work: Work
        if ticket.after == ticket.serial:
            work = executor.enqueue(inputs)
        elif last is None or last.serial != ticket.after:
            raise Unavailable("the answer cannot go on: the worker that had begun it has ended; send the request again")
        else:
            work = executor.proceed(last.work) if last.stored else last.work
        return work

    def keep(self, flight: InFlight, stored: bool) -> None:
        """Keep an answer, of which a part has ended, until its next ticket comes; `stored` is as in `Unfinished`."""
        self.unfinished[flight.ticket.slot] = Unfinished(flight.ticket.serial, flight.work, stored)
