"""Tickets deferred until their executor has prepared itself for their shapes, while other tickets go ahead."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from threading import Lock

from ..link.messages import ModelKey, Shape, Ticket

MAX_RESUMED = 2
"""Deferred tickets are started while fewer than this are in flight: one runs, one is queued behind it. The HTTP side does not
count deferred tickets as in flight, so starting all at once would exceed its limit by far."""
Key = tuple[ModelKey, tuple[Shape, ...]]


class DeferredTickets:
    """The tickets that one worker has deferred; tickets of one model and equal shapes stay in order of arrival.

    `ready` are those that can start now, none at first. `on_change` is called with the number of deferred tickets whenever it
    changes; `wake` wakes the worker. One thread at a time, except `wake`.
    """

    def __init__(self, on_change: Callable[[int], None], wake: Callable[[], None]) -> None:
        self.ready: deque[Ticket] = deque()
        self._on_change = on_change
        self._wake = wake
        self._closing = Lock()
        self._closed = False
        self._groups: dict[Key, list[Ticket]] = {}
        self._prepared: deque[tuple[Key, Future[None]]] = deque()
        self.count = 0
        self.held: Ticket | None = None
        """The first of `ready` if it waits until what is in flight elsewhere has ended; all behind it wait, too."""

    def go_on(self, left: Iterable[Ticket]) -> None:
        """Begin with these tickets, which the worker before had deferred."""
        self.ready += left
        self.count = len(self.ready)

    def follow(self, ticket: Ticket, again: bool = False) -> bool:
        """Defer a ticket behind deferred ones of its model and shapes; False if there are none.

        A ticket that was deferred before (`again`) goes ahead of those that are ready.
        """
        if group := self._groups.get((ticket.model, ticket.shapes)):
            group.append(ticket)
        elif not again and any(each.model == ticket.model and each.shapes == ticket.shapes for each in self.ready):
            self.ready.append(ticket)
        else:
            return False
        self._change(1)
        return True

    def put(self, ticket: Ticket, prepared: "Future[None]") -> None:
        """Defer a ticket until this future is done."""
        key = (ticket.model, ticket.shapes)
        self._groups[key] = [ticket]
        self._change(1)
        prepared.add_done_callback(partial(self._on_prepared, key))

    def hold(self, ticket: Ticket) -> None:
        """Put a ticket that was taken before all that are ready. For the HTTP side it is still in flight."""
        self.ready.appendleft(ticket)
        self.held = ticket
        self.count += 1

    def collect(self) -> list[tuple[Ticket, Exception]]:
        """Make tickets ready whose executor is prepared. Returns the tickets for which that failed, with the errors."""
        lost = []
        while self._prepared:
            key, prepared = self._prepared.popleft()
            group = self._groups.pop(key, [])
            if error := error_of(prepared):
                lost += [(ticket, error) for ticket in group]
            else:
                self.ready += group
        self._change(-len(lost))
        return lost

    def take(self) -> Ticket:
        """Remove and return the first ready ticket."""
        ticket = self.ready.popleft()
        self._leave([ticket])
        return ticket

    def drop(self, is_over: Callable[[Ticket], bool]) -> list[Ticket]:
        """Remove and return the tickets that need not be run any more."""
        dropped = [ticket for ticket in self._all() if is_over(ticket)]
        if dropped:
            serials = {ticket.serial for ticket in dropped}
            self.ready = deque([ticket for ticket in self.ready if ticket.serial not in serials])
            for key, group in list(self._groups.items()):
                self._groups[key] = [ticket for ticket in group if ticket.serial not in serials]
            self._leave(dropped)
        return dropped

    def wake(self) -> None:
        """Wake the worker if anything is deferred, until `close`. Any thread."""
        with self._closing:
            if self.count and not self._closed:
                self._wake()

    def close(self) -> list[Ticket]:
        """Stop waking the worker. Returns all deferred tickets in order of arrival, for the next worker; `count` stays."""
        with self._closing:
            self._closed = True
        return sorted(self._all(), key=_serial)

    def _all(self) -> list[Ticket]:
        return [*self.ready, *[ticket for group in self._groups.values() for ticket in group]]

    def _on_prepared(self, key: Key, prepared: "Future[None]") -> None:
        """Runs on the thread that completed the future."""
        self._prepared.append((key, prepared))
        self.wake()

    def _leave(self, tickets: list[Ticket]) -> None:
        if self.held in tickets:
            self.held = None
        self._change(-len(tickets))

    def _change(self, by: int) -> None:
        if by:
            self.count += by
            self._on_change(self.count - (self.held is not None))


def error_of(prepared: "Future[None]") -> Exception | None:
    """The error of this completed future; None if it succeeded."""
    try:
        prepared.result()
    except Exception as error:
        return error
    return None


def _serial(ticket: Ticket) -> int:
    return ticket.serial
