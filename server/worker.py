"""The device side of a tenant: tickets in, completions out, on one thread of one partition.

It enqueues every ticket it is given and waits for the oldest, so the partition's stream is never empty while the HTTP side
has credits left. Nothing a model does ends the thread.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import NamedTuple

from engines import Cancelled, Executor, Room, Work
from partitions import DeviceLost, Partition
from partitions.base import Closing

from .errors import Outgrown
from .link import Link
from .precedence import Place, Precedence
from .ticket import Done, Extent, Failure, ModelKey, Ticket

BUNDLE = 50_000
"""Nanoseconds for which completions of short works may be gathered before the other side is woken."""
BUNDLE_BESIDE = 300_000
"""The same where the other side is a process on the partition's own cores: whichever is woken makes the other wait, and
brings its own data into the cache."""
BUNDLE_TOGETHER = 1_000_000
"""The same where both sides share an interpreter as well."""
FRESH = 10_000
"""Nanoseconds after a look for tickets within which another, which takes a call of the system, would find none; where a
worker had nothing to do, and its works are short, those of a bundle."""


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """Inferences that ended well, and otherwise, and models bound."""

    done: int
    failed: int
    models: int


@dataclass(slots=True)
class Flight:
    """One ticket on the stream."""

    ticket: Ticket
    work: Work
    room: Room


class Seat(NamedTuple):
    """Where a worker works: the tenant's link, and what keeps the memory of its tensors reachable for the device."""

    link: Link
    pinned: Closing


class Worker:
    """Runs tickets on a partition, in order, from `serve` to `halt`; whoever serves the link next goes on where it stopped.

    `lost` is called, on the worker's thread, when the device turns out to be lost. `precedence` is that of all workers of
    the process.
    """

    def __init__(
        self,
        partition: Partition,
        executors: Mapping[ModelKey, Executor],
        lost: Callable[[DeviceLost], None],
        precedence: Precedence,
    ) -> None:
        self.partition = partition
        self.executors = dict(executors)
        self._lost = lost
        self._precedence = precedence
        self._seat: Seat | None = None
        self._running: Thread | None = None
        self._flying: dict[int, Flight] = {}
        self._cancelled: dict[int, int] = {}
        self._last: ModelKey | None = None
        self._took = self._rung = self._look_at = 0
        self._patience = BUNDLE
        self._abandoned = False
        self._done = self._failed = 0

    def __repr__(self) -> str:
        state = "running" if self._running else "not running"
        return f"<Worker {len(self.executors)} models on {self.partition!r}, {state}>"

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(self._done, self._failed, len(self.executors))

    def serve(self, seat: Seat) -> None:
        """Run what comes over this link, from now on and on a thread of its own."""
        if seat is not self._seat:  # Another link counts its serials anew.
            self._cancelled = {}
        self._seat, self._abandoned = seat, False
        self._patience = BUNDLE_TOGETHER if seat.link.together else BUNDLE_BESIDE if self.partition.host_cores else BUNDLE
        place = self._precedence.join(seat.link.tickets.waiting)
        self._running = Thread(target=self._run, args=(seat, place), name=f"worker {self.partition!r}", daemon=True)
        self._running.start()

    def abandon(self) -> None:
        """Nobody is there any more to hear of what this link brought: stop what is in flight, begin nothing. Any thread."""
        self._abandoned = True
        for flight in list(self._flying.values()):
            flight.work.cancel()

    def halt(self) -> None:
        """Begin nothing more, and finish what is in flight. Blocks for that long."""
        if self._running and self._seat:
            self._seat.link.tickets.stop()
            self._running.join()
            self._running = None

    def cancel(self, slot: int, serial: int) -> None:
        """Stop this ticket if it is here and can be stopped; its Done is still reported. Does not block. Any thread."""
        self._cancelled[slot] = serial
        flight = self._flying.get(slot)
        if flight and flight.ticket.serial == serial:
            flight.work.cancel()

    def close(self) -> None:
        """Halt, then close executors and partition. Blocks."""
        self.halt()
        for executor in self.executors.values():
            executor.close()
        self.partition.close()

    def _run(self, seat: Seat, place: Place) -> None:
        try:
            self._work(seat, place)
        finally:
            self._precedence.part(place)

    def _work(self, seat: Seat, place: Place) -> None:
        self.partition.attach()
        seat.link.tickets.open()
        flights: deque[Flight] = deque()
        while (ticket := self._next(seat, place) if flights else self._first(seat, place)) or flights:
            if ticket is None:
                self._finish(seat, place, flights.popleft())
            elif flight := self._begin(seat, ticket):
                flights.append(flight)

    def _first(self, seat: Seat, place: Place) -> Ticket | None:
        """The next ticket, waited for as nothing is in flight."""
        seat.link.completions.ring()
        place.rest()
        ticket = seat.link.tickets.get()
        now = time.monotonic_ns()
        place.come(now)
        self._look_at = now + (BUNDLE if self._took < BUNDLE else FRESH)
        return ticket

    def _next(self, seat: Seat, place: Place) -> Ticket | None:
        """One that is there while others are in flight, which is not looked for too often."""
        now = time.monotonic_ns()
        place.step_aside(now)
        if look := now > self._look_at:
            self._look_at = now + FRESH
        if ticket := seat.link.tickets.poll(look):
            place.come(now)
        return ticket

    def _begin(self, seat: Seat, ticket: Ticket) -> Flight | None:
        if failure := self._refusal(ticket):
            self._fail(seat, ticket.slot, failure, time.monotonic_ns())
            return None
        try:
            executor = self.executors[ticket.model]
            slot = seat.link.arena.slot(ticket.slot)
            slot.occupy(ticket.start, ticket.capacity)
            inputs, room = slot.inputs(executor.engine.signature, ticket.shapes, ticket.capacity)
            flight = Flight(ticket, executor.enqueue(inputs, room), room)
        except Exception as error:
            self._fail(seat, ticket.slot, self._failure(error), time.monotonic_ns())
            return None
        self._flying[ticket.slot] = flight
        if self._is_cancelled(ticket):  # Since the first look, by somebody who did not find the work.
            flight.work.cancel()
        return flight

    def _refusal(self, ticket: Ticket) -> Failure | None:
        if self._is_cancelled(ticket):
            return Failure("cancelled", "withdrawn before it began")
        if time.monotonic() > ticket.deadline:
            return Failure("expired", "Request timeout expired before it began")
        return None

    def _is_cancelled(self, ticket: Ticket) -> bool:
        return self._abandoned or self._cancelled.get(ticket.slot) == ticket.serial

    def _finish(self, seat: Seat, place: Place, flight: Flight) -> None:
        slot, model, began = flight.ticket.slot, flight.ticket.model, time.monotonic_ns()
        took = self._took if model == self._last else self._patience + 1
        if took > BUNDLE:
            place.leave()
        if took > self._patience or began - self._rung > self._patience:
            seat.link.completions.ring()  # Nobody should have to wait for a long work to hear of an earlier one.
            self._rung = began
        try:
            outputs = flight.work.wait()
            ended = time.monotonic_ns()
            place.go_on()
            self._last, self._took = model, ended - began
            extents = seat.link.arena.slot(slot).keep(outputs, flight.room)
        except Exception as error:
            self._fail(seat, slot, self._failure(error), began)
        else:
            self._end(seat, Done(slot, extents, None, began, ended))

    def _fail(self, seat: Seat, slot: int, failure: Failure, began: int) -> None:
        self._end(seat, Done(slot, _NOTHING, failure, began, time.monotonic_ns()))

    def _end(self, seat: Seat, done: Done) -> None:
        self._flying.pop(done.slot, None)
        if done.failure:
            self._failed += 1
        else:
            self._done += 1
        seat.link.completions.put(done)

    def _failure(self, error: Exception) -> Failure:
        text = str(error) or type(error).__name__
        if isinstance(error, DeviceLost):
            self._lost(error)
            return Failure("lost", text)
        if isinstance(error, Outgrown):
            return Failure("outgrown", str(error.nbytes))
        return Failure("cancelled" if isinstance(error, Cancelled) else "raised", text)


_NOTHING: tuple[Extent, ...] = ()
