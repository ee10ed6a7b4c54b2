"""The way between the HTTP side and the device side of one tenant: a ring each way, each with an eventfd that wakes.

A ring's cells hold numbers of slots; what is said about a slot lies in its own page. The eventfd's count is the number of
cells that were written and not yet read, so that neither side ever looks at the other's place in the ring, and the kernel
orders the memory. A slot is in a ring at most once, so a ring of as many cells as there are slots never overflows.
"""

import marshal
import os
import select
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from engines import Memo

from ..errors import BadRequest
from . import arena
from .arena import Arena, TensorMemory
from .messages import Done, Extent, Failure, Ticket

_WAKE = 1 << 32
"""Added to the count of an eventfd it wakes the reader though nothing was put; there are never so many tickets."""
_TICKET, _DONE = struct.Struct("=QdQQI"), struct.Struct("=qqI")
"""What is new each time: serial, deadline, capacity, start; began, ended; and how many bytes of what seldom is come after."""
_LONGEST = arena.MESSAGE - _TICKET.size
_ALL = (1 << 32) - 1
_REMEMBERED = 256
_MOST_TEXT = 2000
"""Characters, of up to four bytes each."""


class Descriptors(NamedTuple):
    """What two processes need to share a link, of so many slots and bytes of tensors; each closes its own."""

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
    """Tickets on their way to the device side, in order. One thread writes and puts; `wake` is for any thread.

    Several threads of the device side may be in `listen`. What comes out of it, and everything else that reads, is for one
    thread at a time. `kept` is what was said about each slot, where both ends are in one process.
    """

    def __init__(self, arena: Arena, event: int, kept: dict[int, Ticket] | None = None) -> None:
        self._arena = arena
        self._event = event
        self._kept = kept
        self._words = _Words(tuple)
        self._cells = arena.cells(0)
        self._announced = arena.announced
        self._written = self._read = self._unread = 0
        self._left: list[Ticket] = []
        self._poller = select.poll()

    def __repr__(self) -> str:
        return f"<Tickets {self._written} put, {self._read} got>"

    def write(self, ticket: Ticket) -> None:
        """Say this of its slot, for `put` to hand it over. Raises BadRequest for one that is longer than the slot's page."""
        if self._kept is not None:
            self._kept[ticket.slot] = ticket
            return
        slot, serial, model, shapes, deadline, capacity, start = ticket
        data, page = self._words.spell((model, shapes)), self._arena.slot(slot).ticket
        if len(data) > _LONGEST:
            raise BadRequest(f"inputs: {len(shapes)} tensors have shapes too long to be told, {len(data)} bytes")
        _TICKET.pack_into(page, 0, serial, deadline, capacity, start, len(data))
        page[_TICKET.size : _TICKET.size + len(data)] = data

    def put(self, tickets: Iterable[Ticket]) -> None:
        """Hand over these, which were written, and wake the other side."""
        count = 0
        for ticket in tickets:
            self._cells[self._written % self._arena.count] = ticket.slot
            self._written += 1
            count += 1
        if count:
            self._announced[0] = self._written & _ALL
            os.eventfd_write(self._event, count)

    def waiting(self) -> bool:
        """Whether more were put than were got. Any thread of the side that reads, for which it is a hint."""
        return self._announced[0] != self._read & _ALL

    def listen(self) -> int:
        """Block until tickets were put, or until `wake`; return how many tickets, for one thread to tell `heard`.

        Of several threads that listen one is told. A wake that nobody waited for is kept for the next who listens.
        """
        while True:
            try:
                return os.eventfd_read(self._event) & _ALL
            except InterruptedError:
                pass  # By a signal, which any thread may get.

    def heard(self, count: int) -> None:
        """`listen` said that so many tickets came: `poll` gives them."""
        self._unread += count

    def poll(self, look: bool = True) -> Ticket | None:
        """The next ticket if there is one now; what is not asked for is there for who reads next. Does not block.

        Without `look` it is one that was heard of, which costs no call of the system. With it, nobody else may be in `listen`.
        """
        if look and not self._unread and self._poller.poll(0):
            self.heard(self.listen())
        return self._take() if self._unread else None

    def wake(self) -> None:
        """Make one call of `listen` return. Any thread."""
        os.eventfd_write(self._event, _WAKE)

    def give_back(self, tickets: Iterable[Ticket]) -> None:
        """These were taken and not begun: they are for whoever reads next."""
        self._left += tickets

    def left(self) -> list[Ticket]:
        """What was given back, in the order it came; from here on it is the caller's."""
        left, self._left = self._left, []
        return left

    def open(self) -> None:
        """Make this the end that reads."""
        self._poller.register(self._event, select.POLLIN)

    def _take(self) -> Ticket:
        slot = self._cells[self._read % self._arena.count]
        self._read += 1
        self._unread -= 1
        if self._kept is not None:
            return self._kept[slot]
        page = self._arena.slot(slot).ticket
        serial, deadline, capacity, start, length = _TICKET.unpack_from(page)
        model, shapes = self._words.read(bytes(page[_TICKET.size : _TICKET.size + length]))
        return Ticket(slot, serial, model, shapes, deadline, capacity, start)


class Completions:
    """Completions on their way to the HTTP side. One thread puts, one other takes when `event` becomes readable.

    `kept` is as for `Tickets`.
    """

    def __init__(self, arena: Arena, event: int, kept: dict[int, Done] | None = None) -> None:
        self.event = event
        self._arena = arena
        self._kept = kept
        self._words = _Words(_told)
        self._cells = arena.cells(1)
        self._deferred = arena.deferred
        self._on_host_cores = arena.on_host_cores
        self._written = self._rung = self._read = 0

    def __repr__(self) -> str:
        return f"<Completions {self._written} put, {self._read} taken>"

    def put(self, done: Done) -> None:
        """Write this down, for `ring` to hand it over."""
        if self._kept is None:
            self._write(done)
        else:
            self._kept[done.slot] = done
        self._cells[self._written % self._arena.count] = done.slot
        self._written += 1

    def ring(self) -> None:
        """Hand over what was put, and wake the other side, if there is anything."""
        count, self._rung = self._written - self._rung, self._written
        if count:
            os.eventfd_write(self.event, count)

    def report_deferred(self, count: int) -> None:
        """So many tickets are put aside now, and use no credit; if that is more than before, wake the other side."""
        before, self._deferred[0] = self._deferred[0], count
        if count > before:
            os.eventfd_write(self.event, _WAKE)

    def deferred(self) -> int:
        """How many tickets the other side has put deferred."""
        return self._deferred[0]

    def set_on_host_cores(self, hosted: bool) -> None:
        """Say whether works are done on cores of the host from now on."""
        self._on_host_cores[0] = hosted

    def on_host_cores(self) -> bool:
        """Whether works are done on cores of the host, as the other side said last; it did not before its worker began."""
        return bool(self._on_host_cores[0])

    def take(self) -> list[Done]:
        """All that there are; none if there are none."""
        try:
            count = os.eventfd_read(self.event) & _ALL
        except BlockingIOError:
            return []
        return [self._next() for _ in range(count)]

    def _next(self) -> Done:
        slot = self._cells[self._read % self._arena.count]
        self._read += 1
        return self._decode(slot) if self._kept is None else self._kept[slot]

    def _write(self, done: Done) -> None:
        slot, outputs, failure, began, ended, _ = done
        data = self._words.spell((outputs, failure and failure._replace(text=failure.text[:_MOST_TEXT])))
        if len(data) > _LONGEST:
            text = f"{len(outputs)} outputs have shapes too long to be told, {len(data)} bytes"
            data = self._words.spell(((), Failure("raised", text)))
        page = self._arena.slot(slot).completion
        _DONE.pack_into(page, 0, began, ended, len(data))
        page[_DONE.size : _DONE.size + len(data)] = data

    def _decode(self, slot: int) -> Done:
        page = self._arena.slot(slot).completion
        began, ended, length = _DONE.unpack_from(page)
        outputs, failure = self._words.read(bytes(page[_DONE.size : _DONE.size + length]))
        return Done(slot, outputs, failure, began, ended)


class _Words:
    """What is said of slots as bytes and back: nearly all of it was said before, so both are remembered. For one thread."""

    def __init__(self, understand: Callable[[Any], Any]) -> None:
        self._understand = understand
        self._spelt: Memo[object, bytes] = Memo(_REMEMBERED)
        self._read: Memo[bytes, Any] = Memo(_REMEMBERED)

    def spell(self, said: tuple[Any, ...]) -> bytes:
        try:
            return self._spelt[said]
        except KeyError:
            data = marshal.dumps(_plain(said))
            self._spelt.remember(said, data)
            return data

    def read(self, data: bytes) -> Any:
        try:
            return self._read[data]
        except KeyError:
            said = self._understand(marshal.loads(data))
            self._read.remember(data, said)
            return said


def _plain(said: Any) -> Any:
    """Without named tuples, which marshal does not take."""
    return tuple([_plain(part) for part in said]) if isinstance(said, tuple) else said


def _told(said: Any) -> tuple[tuple[Extent, ...], Failure | None]:
    outputs, failure = said
    return tuple([Extent._make(extent) for extent in outputs]), failure and Failure._make(failure)


class Link(NamedTuple):
    """One end of it, or both. `together`: two threads that take turns with one interpreter, and no third that has to wait."""

    arena: Arena
    tickets: Tickets
    completions: Completions
    shares_interpreter: bool = False


def create(count: int, nbytes: int) -> Descriptors:
    """Make what a link of so many slots consists of, with so many bytes for their tensors."""
    return _create(count, nbytes, arena.create_memory(nbytes))


def renew(before: Descriptors) -> Descriptors:
    """Make what a link consists of that takes this one's place: its tensors lie in the same memory.

    Only once nothing works on those of the link before, in neither process.
    """
    return _create(before.slots, before.nbytes, os.dup(before.memory))


def attach(descriptors: Descriptors, memory: TensorMemory | None = None) -> Link:
    """One end of a link, or both. The eventfds have to stay open as long as it is used; the memory's may be closed.

    `memory` is where this process has that of the tensors already, if it does.
    """
    shared = _attach(descriptors, memory)
    return Link(shared, Tickets(shared, descriptors.tickets), Completions(shared, descriptors.completions))


def join(descriptors: Descriptors, shares_interpreter: bool = False) -> Link:
    """Both ends of a link in this process, where what is said about a slot need not become bytes; else as `attach`."""
    shared = _attach(descriptors, None)
    tickets, completions = Tickets(shared, descriptors.tickets, {}), Completions(shared, descriptors.completions, {})
    return Link(shared, tickets, completions, shares_interpreter)


def _create(count: int, nbytes: int, memory: int) -> Descriptors:
    events = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    return Descriptors(arena.create(count), memory, *events, count, nbytes)


def _attach(descriptors: Descriptors, memory: TensorMemory | None) -> Arena:
    memory = memory or arena.attach_memory(descriptors.memory, descriptors.nbytes)
    return arena.attach(descriptors.arena, descriptors.slots, memory)
