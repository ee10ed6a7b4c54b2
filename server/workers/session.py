"""What a worker's threads share while they serve one link."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock, Semaphore
from typing import NamedTuple

from engines import Room, Work
from partitions.base import Closing

from ..link.messages import Ticket
from ..link.ring import Link
from .deferred import DeferredTickets
from .gil_priority import GilPriority
from .thread_roles import ThreadRoles


class Endpoint(NamedTuple):
    """The device side's end of a tenant: its link, and the handle that keeps its tensor memory page-locked for the device."""

    link: Link
    pinned: Closing


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
