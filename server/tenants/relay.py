"""The lead's end of the link to one helper: takes the helper's requests into the tenant's one queue, and sends answers back.

A helper is a further HTTP process of a tenant. It reads, checks and decodes requests into the tenant's tensor memory, and sends
a ticket for each over a link as that of a worker; the tensors stay where they are. Here each gets a slot of the lead's, which
uses their memory, and waits in the lead's lane with all others of the tenant. A completion is sent once nothing uses that
memory any more: so the helper frees it when it has answered, as it does with a worker at the other end.
"""

import asyncio
import logging
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from engines import Tensor

from ..errors import Failed, QueueFull, RequestError
from ..link.messages import Done, Failure, Malformed, Ticket
from ..link.occupancy import Occupancy
from ..link.ring import Link
from ..link.slots import Slot
from ..scheduling.lane import Lane
from ..scheduling.part_runs import goes_on, has_begun
from ..scheduling.pending import failure_of
from .catalog import Catalog, ServedModel

log = logging.getLogger("greenlane")

CANCELLATION = struct.Struct("=IQ")
"""What a helper sends over the socket beside its link to stop a ticket: slot and serial."""
_CANCELLED = Failure("cancelled", "")


class RelayedRequest:
    """One request of a helper in the lead's lane. `ticket` is the helper's last one, and `slot` the lead's slot for it.

    `asked` is whether that ticket has no completion yet; only an answer in parts goes on without one. `end` is the completion
    to send when the memory is free, and `released` whether the lane was asked to release the request.
    """

    __slots__ = ("_relay", "asked", "end", "freed", "released", "served", "slot", "ticket")

    def __init__(self, relay: "Relay", ticket: Ticket, served: ServedModel | None) -> None:
        self._relay = relay
        self.ticket = ticket
        self.served = served
        self.slot: Slot | None = None
        self.end: Done | None = None
        self.asked = True
        self.released = self.freed = False

    def on_done(self, end: Done | RequestError) -> None:
        """Called by the lane, as its `OnDone`."""
        self._relay.on_done(self, end)

    def on_free(self) -> None:
        """Called when nothing in this process or on the device uses the memory any more."""
        self._relay.on_free(self)


class Relay:
    """Belongs to the event loop. `number` is the helper's.

    Cancellations come over the socket `on_cancel`. It is closed when the helper ends, which is how that is noticed.
    """

    def __init__(
        self, number: int, lane: Lane, catalog: Catalog, link: Link, on_cancel: socket.socket, occupancy: Occupancy
    ) -> None:
        self.number = number
        self.ended = asyncio.Event()
        """The helper has ended, and nothing works on its memory any more: that is free."""
        self._lane = lane
        self._catalog = catalog
        self._link = link
        self._on_cancel = on_cancel
        self._occupancy = occupancy
        self._running: dict[int, RelayedRequest] = {}
        self._rings = False
        self._gone = False
        self._loop: Any = None
        self._shows_full = False

    def __repr__(self) -> str:
        return f"<Relay of {self._lane.name}, {len(self._running)} requests>"

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take tickets on this event loop from now on."""
        self._loop = loop
        self._on_cancel.setblocking(False)
        self._link.tickets.open()
        loop.add_reader(self._link.tickets.event, self._on_tickets)
        loop.add_reader(self._on_cancel.fileno(), self._on_cancellations)

    def _on_tickets(self) -> None:
        try:
            while (ticket := self._link.tickets.poll()) is not None:
                found = self._running.get(ticket.slot)
                if found is None:
                    self._begin(ticket)
                else:
                    self._go_on(found, ticket)
        except Malformed as error:
            log.error("a helper of tenant %s is cut off: %s", self._lane.name, error)
            self.close()
            return
        if self._lane.full and not self._shows_full:
            self._show_full(True)
            self._lane.call_when_room(lambda: self._show_full(False))

    def _show_full(self, full: bool) -> None:
        """Have helpers refuse requests by themselves, before their bodies have come, or not any more."""
        self._shows_full = full
        self._occupancy.set_queue_is_full(full)

    def _begin(self, ticket: Ticket) -> None:
        """Queue a request, or refuse it."""
        served = self._catalog.with_key(ticket.model)
        request = RelayedRequest(self, ticket, served)
        try:
            if has_begun(ticket):
                raise Failed("a later part of an answer that is not known here")
            self._check_room(ticket.begun)
            request.slot = self._lane.slots.acquire_foreign(ticket.start, ticket.capacity, request.on_free)
        except Exception as error:
            self._refuse(ticket, error)
            return
        self._running[ticket.slot] = request
        batching, queues = (served.batching, served.queues) if served else (None, None)
        _, _, model, shapes, deadline, _, _, after, priority, unasked, begun = ticket
        try:
            self._lane.submit(
                request.slot,
                model,
                shapes,
                request.on_done,
                priority,
                batching=batching,
                queues=queues,
                in_parts=after != 0,
                deadline=deadline,
                unasked=unasked,
                begun=begun,
            )
        except Exception as error:
            self._end(request, self._failed(ticket, error))

    def _check_room(self, begun: bool) -> None:
        """As for the lead's own requests: a run of one that has begun is refused only while the lane is suspended."""
        try:
            self._lane.admission.check_room(True, begun)  # New ones are refused by the helper while the server drains.
        except QueueFull:
            if not begun:
                raise

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        if not isinstance(error, RequestError):
            log.error("a helper of tenant %s sent a ticket that is not valid: %s", self._lane.name, error)
        self._send(self._failed(ticket, error))

    def _failed(self, ticket: Ticket, error: Exception) -> Done:
        now = time.monotonic_ns()
        return Done(ticket.slot, (), failure_of(error), now, now)

    def _go_on(self, request: RelayedRequest, ticket: Ticket) -> None:
        """The helper asks for the next part of an answer, or, with a deadline that has passed, for its end."""
        request.ticket, request.asked = ticket, True
        if request.freed:  # It ended here before the helper asked.
            self._complete(request)
        elif request.released:
            pass  # It ends when its memory is free.
        elif ticket.deadline <= 0:
            self._end(request, None)
        else:
            assert request.slot
            try:
                request.slot.use_block(ticket.start, ticket.capacity)
            except ValueError as error:
                self._end(request, self._failed(ticket, error))
            else:
                self._lane.proceed(request.slot)

    def on_done(self, request: RelayedRequest, end: Done | RequestError) -> None:
        """A request, or a part of its answer, has ended."""
        ticket = request.ticket
        done = end if isinstance(end, Done) else self._failed(ticket, end)
        if ticket.after and goes_on(done):
            request.asked = False
            self._send(_of(ticket, done))
            return
        if done.rows:
            try:
                done = self._from_batch(request, done)
            except Exception as error:  # Outgrown: the helper sends it again, alone and with more memory.
                done = self._failed(ticket, error)
        self._end(request, _of(ticket, done))

    def _from_batch(self, request: RelayedRequest, done: Done) -> Done:
        """Copy the outputs from the batch's memory to the request's own. Raises Outgrown."""
        slot, served = request.slot, request.served
        assert slot
        assert served
        served.statistics.count_run(done)
        batch = self._lane.slots.at(done.slot).address
        _, room = slot.inputs(served.engine_signature, request.ticket.shapes, slot.capacity)
        room = room._replace(unasked=request.ticket.unasked)
        outputs = [Tensor(shape, batch + offset, nbytes) for shape, offset, nbytes in done.outputs]
        return done._replace(outputs=slot.store_outputs(outputs, room))

    def _end(self, request: RelayedRequest, end: Done | None) -> None:
        """Give the request up in the lane; its completion is sent when its memory is free. None: it was cancelled."""
        request.end, request.released = end, True
        assert request.slot
        self._lane.release(request.slot)

    def on_free(self, request: RelayedRequest) -> None:
        request.freed = True
        if request.asked or self._gone:
            self._complete(request)

    def _complete(self, request: RelayedRequest) -> None:
        ticket = request.ticket
        del self._running[ticket.slot]
        if request.end is None:
            now = time.monotonic_ns()
            request.end = Done(ticket.slot, (), _CANCELLED, now, now)
        self._send(request.end)
        self._look_if_ended()

    def _send(self, done: Done) -> None:
        """Send a completion, together with others of this iteration of the event loop."""
        if self._gone:
            return
        self._link.completions.put(done)
        if not self._rings:
            self._rings = True
            self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._rings = False
        self._link.completions.ring()

    def _on_cancellations(self) -> None:
        """The helper stops tickets, or has ended."""
        self._on_tickets()  # Those that were sent before.
        try:
            while not self._gone and (data := self._on_cancel.recv(CANCELLATION.size)):
                slot, serial = CANCELLATION.unpack(data)
                found = self._running.get(slot)
                if found and found.asked and not found.released and found.ticket.serial == serial:
                    self._end(found, None)
        except BlockingIOError:
            return
        except (ConnectionError, struct.error) as error:
            log.error("a helper of tenant %s is cut off: %s", self._lane.name, error)
        self.close()

    def close(self) -> None:
        """Take nothing more from the helper, which has ended or is not trusted any more, and give up what it asked for."""
        if self._gone:
            return
        self._gone = True
        self._loop.remove_reader(self._link.tickets.event)
        self._loop.remove_reader(self._on_cancel.fileno())
        self._on_cancel.close()
        for request in list(self._running.values()):
            if request.freed:
                self._complete(request)
            elif not request.released:
                self._end(request, None)
        self._look_if_ended()

    def _look_if_ended(self) -> None:
        if self._gone and not self._running and not self.ended.is_set():
            self._occupancy.free_all_of(self.number)
            self.ended.set()


def _of(ticket: Ticket, done: Done) -> Done:
    """The completion of a helper's ticket."""
    _, outputs, failure, began, ended, rows = done
    return Done(ticket.slot, outputs, failure, began, ended, rows)


class Cancellations:
    """The helper's end of that socket: a `Canceller`. The lead's end is closed if it has ended."""

    def __init__(self, to_lead: socket.socket) -> None:
        to_lead.setblocking(False)
        self.socket = to_lead

    def cancel(self, slot: int, serial: int) -> None:
        with suppress(OSError):  # The lead is too busy, and the work goes on to its end; or it has ended, and so will this.
            self.socket.send(CANCELLATION.pack(slot, serial))


def sockets() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets for the cancellations of one helper."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
