"""The link between the HTTP side and the device side of one tenant: a ring in each direction, each with an eventfd to wake.

A ring's cells hold slot numbers; the message about a slot is in the slot's page. The eventfd counts the cells that were
written and not yet read, so neither side reads the other's position in the ring, and the kernel orders the memory accesses. A
slot is in a ring at most once, so a ring with as many cells as there are slots cannot overflow. Between two processes the
device side reads tickets as `listener` says.
"""

import os
import select
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..errors import BadRequest
from . import arena
from .arena import Arena, TensorMemory
from .encoding import Serializer, decode_outcome, decode_request
from .listener import Listener, take
from .messages import Done, Failure, Malformed, Ticket

_WAKE = 1 << 32
"""Added to an eventfd's count to wake the reader without a message; there are never this many."""
_TICKET, _DONE = struct.Struct("=QdQQQI"), struct.Struct("=qqI")
"""What differs each time: serial, deadline, capacity, start, after; began, ended. Then the size of the rest, which follows."""
_MAX_BODY = arena.MESSAGE - _TICKET.size
_ALL = (1 << 32) - 1
_MAX_TEXT = 2000
"""Characters of an error text, of up to four bytes each."""


RunNow = Callable[[Ticket], Done | None]
"""Called with a ticket that was not put, while no other is on its way. Returns its completion, or None: then the ticket has to
be put. Only for a link whose ends share an interpreter."""


class Descriptors(NamedTuple):
    """File descriptors of a link of `slots` slots and `nbytes` bytes of tensors. Each process closes its own."""

    arena: int
    memory: int
    tickets: int
    completions: int
    slots: int
    nbytes: int

    def close(self) -> None:
        """Close all of them."""
        for descriptor in (self.arena, self.memory, self.tickets, self.completions):
            os.close(descriptor)


class Tickets:
    """Tickets to the device side, in order. One thread writes and puts; `wake` is for any thread.

    Several threads of the device side may block in `listen`; everything else that reads is for one thread at a time. `kept` has
    the ticket of each slot if both ends are in one process. `unfinished` is for the reading side: what it keeps between two
    parts of an answer, by slot; like tickets that were given back, that is for the next reader. `run_now` is set by the device
    side while it may run short models on the thread of the HTTP side; see `RunNow`.
    """

    def __init__(self, arena: Arena, event: int, kept: dict[int, Ticket] | None = None) -> None:
        self.event = event
        self.in_pages = kept is None
        """Whether tickets are written to the slots' pages."""
        self._arena = arena
        self._kept = kept
        self._serializer = Serializer(decode_request)
        self._cells = arena.cells(0)
        self._total_put = arena.total_put
        self._put_count = self._read_count = self._unread_count = 0
        self._returned: list[Ticket] = []
        self.unfinished: dict[int, Any] = {}
        self.run_now: RunNow | None = None
        self._listener: Listener | None = None
        self._poller = select.poll()

    def write(self, ticket: Ticket) -> None:
        """Write a ticket to its slot's page, before `put`. Raises BadRequest if its shapes do not fit."""
        if self._kept is not None:
            self._kept[ticket.slot] = ticket
            return
        slot, serial, model, shapes, deadline, capacity, start, after, priority, unasked, begun = ticket
        try:
            data, page = self._serializer.encode((model, shapes, priority, unasked, begun)), self._arena.slot(slot).ticket
        except OverflowError:
            raise BadRequest("inputs: a shape has a size of more than 64 bits") from None
        if len(data) > _MAX_BODY:
            raise BadRequest(f"inputs: {len(shapes)} tensors have shapes too long to send, {len(data)} bytes")
        _TICKET.pack_into(page, 0, serial, deadline, capacity, start, after, len(data))
        page[_TICKET.size : _TICKET.size + len(data)] = data

    def put(self, tickets: Iterable[Ticket]) -> None:
        """Send these tickets, which were written, and wake the device side."""
        count = 0
        for ticket in tickets:
            self._cells[self._put_count % self._arena.count] = ticket.slot
            self._put_count += 1
            count += 1
        if count:
            self._total_put[0] = self._put_count & _ALL
            os.eventfd_write(self.event, count)

    def waiting(self) -> bool:
        """Whether more tickets were put than taken; only a hint. Any thread of the reading side."""
        return self._total_put[0] != self._read_count & _ALL

    def listen(self, seconds: float | None = None) -> int:
        """Block until tickets are put, `wake` is called, or so many seconds have passed; return how many tickets, to be passed
        to `add_unread`.

        One of several listening threads returns. A `wake` without a listener makes the next `listen` return.
        """
        if self._listener is not None:
            return self._listener.listen(seconds)
        if seconds is not None:
            poller = select.poll()  # One of its own, as two threads may be here.
            poller.register(self.event, select.POLLIN)
            poller.poll(1e3 * seconds)
            return take(self.event) & _ALL
        while True:
            try:
                return os.eventfd_read(self.event) & _ALL
            except InterruptedError:
                pass  # A signal; any thread may receive it.

    def add_unread(self, count: int) -> None:
        """`listen` returned this number: `poll` returns so many more tickets. Raises Malformed if there are fewer slots."""
        if self._unread_count + count > self._arena.count:
            raise Malformed(f"{self._unread_count + count} tickets in {self._arena.count} slots")
        self._unread_count += count

    def poll(self, look: bool = True) -> Ticket | None:
        """The next ticket if there is one; the rest stay for the next reader. Does not block. Raises Malformed.

        Without `look` it returns only tickets that `listen` reported, without a system call. With it no other thread may be in
        `listen`.
        """
        if look and self._unread_count <= 0:
            self.add_unread(self._look())
        return self._take() if self._unread_count > 0 else None

    def put_back(self) -> None:
        """The ticket that `poll` returned last is the next one again."""
        self._read_count -= 1
        self._unread_count += 1

    def peek(self, look: bool = True) -> bytes | None:
        """What the ticket that `poll` would return says, as `body` does; None if that would be None. Raises Malformed."""
        if look and self._unread_count <= 0:
            self.add_unread(self._look())
        return self.body(self._cells[self._read_count % self._arena.count]) if self._unread_count > 0 else None

    def body(self, slot: int) -> bytes:
        """What the ticket in this slot's page says besides its numbers; equal ones are equal bytes. Only if `in_pages`."""
        page = self._page(slot)
        return bytes(page[_TICKET.size : _TICKET.size + _TICKET.unpack_from(page)[-1]])

    def hand_over(self) -> tuple[int, int]:
        """Let another reader continue: how many tickets were read so far, and how many that were announced were not."""
        return self._read_count, self._unread_count

    def take_back(self, read: int, unread: int) -> None:
        """Continue where another reader stopped. `unread` is negative if it read tickets before they were announced.

        Raises Malformed if it is more than there can be.
        """
        self._read_count, self._unread_count = read, 0
        if abs(unread) > self._arena.count:
            raise Malformed(f"{unread} tickets announced and not read in {self._arena.count} slots")
        self._unread_count = unread

    def wake(self) -> None:
        """Make one call of `listen` return. Does not block. Any thread of the reading side."""
        if self._listener is not None:
            self._listener.wake()
        else:
            os.eventfd_write(self.event, _WAKE)

    @property
    def wakes(self) -> int:
        """The descriptor that `wake` makes readable. Only if `in_pages`, after `open`."""
        assert self._listener
        return self._listener.wakes

    def give_back(self, tickets: Iterable[Ticket]) -> None:
        """Return tickets that were taken and not started, for the next reader."""
        self._returned += tickets

    def take_returned(self) -> list[Ticket]:
        """Take all tickets that were given back, in their order."""
        returned, self._returned = self._returned, []
        return returned

    def open(self) -> None:
        """Make this the reading end."""
        if not self.in_pages:
            self._poller.register(self.event, select.POLLIN)
        elif self._listener is None:
            self._listener = Listener(self.event)

    def _look(self) -> int:
        """How many tickets were put and not announced yet. Does not block."""
        if self._listener is not None:
            return self._listener.take()
        return self.listen() if self._poller.poll(0) else 0

    def _take(self) -> Ticket:
        slot = self._cells[self._read_count % self._arena.count]
        self._read_count += 1
        self._unread_count -= 1
        if self._kept is not None:
            return self._kept[slot]
        page = self._page(slot)
        serial, deadline, capacity, start, after, length = _TICKET.unpack_from(page)
        model, shapes, priority, unasked, begun = self._serializer.decode(bytes(page[_TICKET.size : _TICKET.size + length]))
        return Ticket(slot, serial, model, shapes, deadline, capacity, start, after, priority, unasked, begun)

    def _page(self, slot: int) -> memoryview:
        """The page of the ticket in this slot, which the other end has named."""
        try:
            return self._arena.slot(slot).ticket
        except IndexError:
            raise Malformed(f"slot {slot} of {self._arena.count}") from None


class Completions:
    """Completions to the HTTP side. One thread puts; one other takes, when `event` becomes readable.

    `kept` is as for `Tickets`.
    """

    def __init__(self, arena: Arena, event: int, kept: dict[int, Done] | None = None) -> None:
        self.event = event
        self._arena = arena
        self._kept = kept
        self._serializer = Serializer(decode_outcome)
        self._cells = arena.cells(1)
        self._deferred = arena.deferred
        self._on_host_cores = arena.on_host_cores
        self._put_count = self._rung_count = self._read_count = self._deferred_count = 0

    def put(self, done: Done) -> None:
        """Write a completion, which the next `ring` sends."""
        if self._kept is None:
            self._write(done)
        else:
            self._kept[done.slot] = done
        self._cells[self._put_count % self._arena.count] = done.slot
        self._put_count += 1

    def ring(self) -> None:
        """Send the completions that were put, and wake the HTTP side if there are any. Raises Malformed if that cannot be."""
        count, self._rung_count = self._put_count - self._rung_count, self._put_count
        if count:
            self._add(count)

    def hand_over(self) -> int:
        """Let another writer continue, after `ring`: how many completions were put so far."""
        return self._put_count

    def take_back(self, put: int) -> None:
        """Continue where another writer stopped, which has sent all that it put."""
        self._put_count = self._rung_count = put

    def report_deferred(self, count: int) -> None:
        """Set the number of deferred tickets, which do not count as in flight; if it rises, wake the HTTP side."""
        before, self._deferred_count = self._deferred_count, count
        self._deferred[0] = count
        if count > before:
            self._add(_WAKE)

    def _add(self, count: int) -> None:
        try:
            os.eventfd_write(self.event, count)
        except BlockingIOError:
            raise Malformed("the descriptor of completions is full, which no number of completions explains") from None

    def free_writer(self) -> None:
        """Let a writer go on that waits because the other end has filled the descriptor and set it to block.

        Called when the other end has ended. Does not block. Any thread.
        """
        poller = select.poll()
        poller.register(self.event, select.POLLOUT)
        if not poller.poll(0):  # Otherwise its count may be one of completions.
            take(self.event)

    def deferred(self) -> int:
        """How many tickets the device side has deferred."""
        return self._deferred[0]

    def set_on_host_cores(self, hosted: bool) -> None:
        """Set whether works run on cores of the host."""
        self._on_host_cores[0] = hosted

    def on_host_cores(self) -> bool:
        """Whether works run on cores of the host; False before the worker has started."""
        return bool(self._on_host_cores[0])

    def take(self) -> list[Done]:
        """All completions that have arrived."""
        try:
            count = os.eventfd_read(self.event) & _ALL
        except BlockingIOError:
            return []
        return [self._next() for _ in range(count)]

    def _next(self) -> Done:
        slot = self._cells[self._read_count % self._arena.count]
        self._read_count += 1
        return self._decode(slot) if self._kept is None else self._kept[slot]

    def _write(self, done: Done) -> None:
        slot, outputs, failure, began, ended, rows = done
        data = self._serializer.encode((outputs, failure and _sendable(failure), rows))
        if len(data) > _MAX_BODY:
            text = f"{len(outputs)} outputs have shapes too long to send, {len(data)} bytes"
            data = self._serializer.encode(((), Failure("raised", text), 0))
        page = self._arena.slot(slot).completion
        _DONE.pack_into(page, 0, began, ended, len(data))
        page[_DONE.size : _DONE.size + len(data)] = data

    def _decode(self, slot: int) -> Done:
        page = self._arena.slot(slot).completion
        began, ended, length = _DONE.unpack_from(page)
        outputs, failure, rows = self._serializer.decode(bytes(page[_DONE.size : _DONE.size + length]))
        return Done(slot, outputs, failure, began, ended, rows)


def _sendable(failure: Failure) -> Failure:
    """With a text that fits into a page and has an encoding."""
    text = failure.text[:_MAX_TEXT]
    return failure._replace(text=text if text.isascii() else text.encode(errors="replace").decode())


class Link(NamedTuple):
    """One end of a link, or both. `shares_interpreter`: both sides are threads of one process, and no other tenant is there."""

    arena: Arena
    tickets: Tickets
    completions: Completions
    shares_interpreter: bool = False


def create(count: int, nbytes: int) -> Descriptors:
    """Create the shared memory and eventfds of a link with `count` slots and `nbytes` bytes for their tensors."""
    return _create(count, nbytes, arena.create_memory(nbytes))


def renew(before: Descriptors) -> Descriptors:
    """Create a link that replaces this one, with the same tensor memory.

    Each side changes links only when the other works on no tensors of the old link any more.
    """
    return _create(before.slots, before.nbytes, os.dup(before.memory))


def attach(descriptors: Descriptors, memory: TensorMemory | None = None) -> Link:
    """Map a link. The eventfds must stay open while it is used; the memory's descriptors may be closed.

    `memory` is the tensor memory if this process has mapped it before.
    """
    shared = _attach(descriptors, memory)
    return Link(shared, Tickets(shared, descriptors.tickets), Completions(shared, descriptors.completions))


def join(descriptors: Descriptors, shares_interpreter: bool = False, memory: TensorMemory | None = None) -> Link:
    """Both ends of a link in one process, where messages need no bytes; otherwise as `attach`."""
    shared = _attach(descriptors, memory)
    tickets, completions = Tickets(shared, descriptors.tickets, {}), Completions(shared, descriptors.completions, {})
    return Link(shared, tickets, completions, shares_interpreter)


def _create(count: int, nbytes: int, memory: int) -> Descriptors:
    events = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    return Descriptors(arena.create(count), memory, *events, count, nbytes)


def _attach(descriptors: Descriptors, memory: TensorMemory | None) -> Arena:
    memory = memory or arena.attach_memory(descriptors.memory, descriptors.nbytes)
    return arena.attach(descriptors.arena, descriptors.slots, memory)
