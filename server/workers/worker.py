"""The device side of a tenant: tickets in, completions out, on two threads of one partition.

One thread waits for the oldest work in flight while the other listens for tickets and enqueues them, so the partition's stream
is never empty while the HTTP side may launch more (see `server.workers.thread_roles`). On CPU partitions
(`Partition.host_cores`) the thread that waits for a work also runs it, and there is no second thread, which would only take
its time. No error of a model ends the threads.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, Semaphore, Thread
from typing import Any, NamedTuple

from engines import Cancelled, Executor, Room, Work
from partitions import DeviceLost, Partition
from partitions.base import Closing

from ..errors import Outgrown
from ..link.messages import Done, Extent, Failure, ModelKey, Ticket
from ..link.ring import Link
from .deferred import DeferredTickets, failed
from .gil_priority import GilPriorities, GilPriority
from .thread_roles import ThreadRoles

log = logging.getLogger("greenlane.worker")

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
RESUMED = 2
"""The most in flight for a ticket that was put aside to be begun: one runs, and one is behind it. The other side does not count
them, so all at once would be far more than its credits."""

WITHDRAWN = Failure("cancelled", "withdrawn before it began")
"""What is said of tickets that are not begun, which nobody waits for any more."""


def _ignore(_: Exception) -> None:
    """Nothing has to be done."""


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """Inferences that ended well, and otherwise, and models bound."""

    done: int
    failed: int
    models: int


@dataclass(slots=True)
class InFlight:
    """One ticket on the stream."""

    ticket: Ticket
    work: Work
    room: Room


class Endpoint(NamedTuple):
    """Where a worker works: the tenant's link, and what keeps the memory of its tensors reachable for the device."""

    link: Link
    pinned: Closing


class Session:
    """What the threads of a worker share from `serve` to `halt`.

    The one that has `enqueuing` takes tickets and enqueues them, to `flights`; the one that has `telling` writes completions;
    and one waits for the flights, as `roles` has it.
    """

    def __init__(self, endpoint: Endpoint, place: GilPriority, threads: int) -> None:
        self.link = endpoint.link
        self.place = place
        self.roles = ThreadRoles(threads, endpoint.link.tickets.wake)
        self.deferred = DeferredTickets(
            endpoint.link.tickets.left(), endpoint.link.completions.report_deferred, endpoint.link.tickets.wake
        )
        self.flights: deque[InFlight] = deque()
        self.enqueuing = Lock()
        self.telling = Lock()
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # So that nobody who waits for it cancels it.
        """Done once its last thread ends: nothing is in flight any more."""
        self.broken: Exception | None = None
        self.begun = Semaphore(0)
        """Released by each thread once it is attached, or cannot be."""

    def __repr__(self) -> str:
        return f"<Session {self.roles!r}, {len(self.flights)} in flight, {self.deferred!r}>"


class Worker:
    """Runs tickets on a partition, in order, from `serve` to `halt`; whoever serves the link next goes on where it stopped.

    Only tickets whose executor has to prepare itself for their shapes first are overtaken, by those of other models and shapes.
    `lost` is called, on a thread of the worker's, when the device turns out to be lost, `broke` when a thread of it ends with
    another error: then it stops, and may `serve` again. `priorities` is that of all workers of the process.
    """

    def __init__(
        self,
        partition: Partition,
        executors: Mapping[ModelKey, Executor],
        lost: Callable[[DeviceLost], None],
        priorities: GilPriorities,
        broke: Callable[[Exception], None] = _ignore,
    ) -> None:
        self.partition = partition
        self.executors = dict(executors)
        self._lost = lost
        self._broke = broke
        self._priorities = priorities
        self._endpoint: Endpoint | None = None
        self._session: Session | None = None
        self._running: list[Thread] = []
        self._flying: dict[int, InFlight] = {}
        self._cancelled: dict[int, int] = {}
        self._kinds: dict[type, bool] = {}
        self._last: ModelKey | None = None
        self._took = self._rung = self._look_at = 0
        self._patience = self._gathers = BUNDLE
        self._abandoned: Failure | None = None
        self._overrun: tuple[int, Failure] | None = None
        self._done = self._failed = 0

    def __repr__(self) -> str:
        state = "running" if self._running else "not running"
        return f"<Worker {len(self.executors)} models on {self.partition!r}, {state}>"

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(self._done, self._failed, len(self.executors))

    @property
    def idle(self) -> bool:
        """Whether no inference runs or waits here, as of now. Any thread."""
        session = self._session
        return session is None or not (self._flying or session.deferred.count or session.link.tickets.waiting())

    def serve(self, endpoint: Endpoint) -> None:
        """Run what comes over this link, from now on and on threads of its own."""
        if endpoint is not self._endpoint:  # Another link counts its serials anew.
            self._cancelled = {}
        self._endpoint, self._abandoned = endpoint, None
        hosted = self.partition.host_cores is not None
        self._patience = BUNDLE_TOGETHER if endpoint.link.shares_interpreter else BUNDLE_BESIDE if hosted else BUNDLE
        self._gathers = self._patience if hosted else BUNDLE
        endpoint.link.tickets.open()
        endpoint.link.completions.set_on_host_cores(hosted)
        session = Session(endpoint, self._priorities.join(endpoint.link.tickets.waiting), 1 if hosted else 2)
        self._session = session
        if session.deferred.count or endpoint.link.tickets.waiting():
            endpoint.link.tickets.wake()  # Of what the worker before heard and did not begin, nothing else tells.
        names = [f"worker {self.partition!r}", f"worker {self.partition!r}, second"]
        self._running = [
            Thread(target=self._run, args=(session, second), name=name, daemon=True)
            for second, name in enumerate(names[:1] if hosted else names)
        ]
        for thread in self._running:
            thread.start()

    def abandon(self, reason: Failure = WITHDRAWN) -> None:
        """Stop what is in flight, begin nothing, and say this of all of it. Does not block. Any thread."""
        self._abandoned = reason
        for flight in list(self._flying.values()):
            flight.work.cancel()
        if session := self._session:
            session.deferred.wake()

    @property
    def oldest(self) -> int | None:
        """The serial of the work that has been in flight the longest, if there is any. Any thread."""
        flights = list(self._flying.values())
        return flights[0].ticket.serial if flights else None

    def overrun(self, serial: int, reason: Failure) -> None:
        """Stop the work of this serial if it is in flight and can be stopped, and say this of it. Any thread."""
        for flight in list(self._flying.values()):
            if flight.ticket.serial == serial:
                self._overrun = serial, reason
                flight.work.cancel()

    def wait_until_started(self) -> bool:
        """Whether every thread that `serve` started is at work. Blocks until each of them is, or has failed."""
        session = self._session
        if session is None:
            return False
        for _ in self._running:
            session.begun.acquire()
        return session.broken is None

    def stop(self) -> "Future[None]":
        """As `halt`, which is to be called once this is done, but does not block."""
        if session := self._session:
            session.roles.stop()
            return session.ended
        ended: Future[None] = Future()
        ended.set_result(None)
        return ended

    def halt(self) -> None:
        """Begin nothing more, and finish what is in flight. Blocks for that long, and not for what is put deferred."""
        if session := self._session:
            session.roles.stop()
            for thread in self._running:
                thread.join()
            self._running, self._session = [], None
            session.link.tickets.give_back(session.deferred.close())

    def cancel(self, slot: int, serial: int) -> None:
        """Stop this ticket if it is here and can be stopped; its Done is still reported. Does not block. Any thread."""
        self._cancelled[slot] = serial
        flight = self._flying.get(slot)
        if flight and flight.ticket.serial == serial:
            flight.work.cancel()
        elif session := self._session:
            session.deferred.wake()

    def close(self) -> None:
        """Halt, then close executors and partition. Blocks."""
        self.halt()
        for executor in self.executors.values():
            executor.close()
        self.partition.close()

    def trim(self, after: float) -> None:
        """Have executors give back memory that no inference has needed for so many seconds. Blocks; not while one is closed."""
        idle = self.idle
        for executor in list(self.executors.values()):
            if (trim := getattr(executor, "trim", None)) is not None:
                trim(after, idle)

    def _run(self, session: Session, second: int) -> None:
        try:
            self.partition.attach()
            session.begun.release()
            if second:
                session.roles.enter()
            self._work(session)
        except Exception as error:
            self._break(session, error)
        finally:
            if session.roles.end():
                self._priorities.remove(session.place)
                if session.broken:
                    self._clear(session)
                session.ended.set_result(None)

    def _break(self, session: Session, error: Exception) -> None:
        """A thread cannot go on, so the other is to end, too."""
        log.error("%s cannot go on: %s", self, error, exc_info=error)
        session.broken = error
        session.begun.release()
        session.roles.stop()
        if isinstance(error, DeviceLost):
            self._lost(error)
        else:
            self._broke(error)

    def _clear(self, session: Session) -> None:
        """Wait for what is in flight when no thread is left that would, so that its memory is free, and say that it failed."""
        for flight in list(self._flying.values()):
            with suppress(Exception):
                flight.work.wait()
            with suppress(Exception):
                self._fail(session, flight.ticket.slot, Failure("stopped", f"the worker failed: {session.broken}"), 0)
        with suppress(Exception):
            self._ring(session)

    def _work(self, session: Session) -> None:
        roles = session.roles
        while roles.listens():
            self._enqueue(session, session.link.tickets.listen())
            while session.flights and roles.waits():
                self._wait(session)
                roles.done()
            self._ring(session)  # Before this thread blocks, to listen or parked.

    def _enqueue(self, session: Session, count: int) -> None:
        """Begin what came: so many tickets, or some that were put deferred."""
        session.enqueuing.acquire()
        try:
            now = time.monotonic_ns()
            session.link.tickets.heard(count)
            self._look_at = now + (BUNDLE if self._took < BUNDLE else FRESH)
            self._begin_all(session, now)
        finally:
            session.enqueuing.release()

    def _wait(self, session: Session) -> None:
        """Until nothing is in flight."""
        flights, deferred, roles, place = session.flights, session.deferred, session.roles, session.place
        place.go_on()
        while flights:
            self._finish(session, flights.popleft())
            if deferred.count or flights:
                now = time.monotonic_ns()
                place.yield_gil(now)
                if deferred.ready or (roles.alone and now > self._look_at):
                    with session.enqueuing:
                        self._begin_all(session, now)
        place.leave(False)

    def _begin_all(self, session: Session, now: int) -> None:
        """Begin those that are there; where no other thread listens, they are looked for as well, but not too often."""
        place, roles, tickets, flights = session.place, session.roles, session.link.tickets, session.flights
        if session.deferred.count:
            self._resume(session)
        while not roles.stopped:
            if look := roles.alone and now > self._look_at and bool(flights):
                self._look_at = now + FRESH
            ticket = tickets.poll(look)
            if ticket is None:
                break
            place.come(now)
            self._begin(session, ticket)
            now = time.monotonic_ns()
            place.yield_gil(now)
        place.rest()

    def _resume(self, session: Session) -> None:
        """Begin what was put aside and may go on, a few at a time, and end what need not be begun any more."""
        deferred = session.deferred
        for ticket, error in deferred.collect():
            self._fail(session, ticket.slot, self._failure(error), time.monotonic_ns())
        for ticket in deferred.drop(self._is_over):
            self._begin(session, ticket)
        while deferred.ready and len(self._flying) < RESUMED and not session.roles.stopped:
            self._begin(session, deferred.take(), again=True)

    def _begin(self, session: Session, ticket: Ticket, again: bool = False) -> None:
        """Enqueue a ticket, or put it deferred, perhaps `again`; what may not be begun, or cannot, has failed."""
        if refused := self._refusal(ticket):
            self._fail(session, ticket.slot, refused, time.monotonic_ns())
            return
        try:
            executor = self.executors[ticket.model]
            if self._may_prepare(executor) and self._puts_aside(session, ticket, executor, again):
                return
            slot = session.link.arena.slot(ticket.slot)
            slot.use_block(ticket.start, ticket.capacity)
            inputs, room = slot.inputs(executor.engine.signature, ticket.shapes, ticket.capacity)
            flight = InFlight(ticket, executor.enqueue(inputs, room), room)
        except Exception as error:
            self._fail(session, ticket.slot, self._failure(error), time.monotonic_ns())
            return
        self._flying[ticket.slot] = flight
        session.flights.append(flight)
        if self._is_cancelled(ticket):  # Since the first look, by somebody who did not find the work.
            flight.work.cancel()

    def _may_prepare(self, executor: Executor) -> bool:
        """Whether it is a `Preparing`; remembered by kind, for to ask for what is not there takes half a microsecond."""
        kind = type(executor)
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = hasattr(executor, "preparing")
        return known

    def _puts_aside(self, session: Session, ticket: Ticket, executor: Any, again: bool) -> bool:
        """Whether the executor has to prepare itself for a ticket's shapes, so that the ticket waits. Raises why it cannot."""
        deferred = session.deferred
        if not (deferred.count and deferred.follow(ticket, again)):
            prepared = executor.preparing(ticket.shapes)
            if prepared is None:
                return False
            if prepared.done():
                if error := failed(prepared):
                    raise error
                return False
            deferred.put(ticket, prepared)
        if self._is_cancelled(ticket):  # By somebody who saw nothing deferred.
            deferred.wake()
        return True

    def _refusal(self, ticket: Ticket) -> Failure | None:
        if self._is_cancelled(ticket):
            return self._abandoned or WITHDRAWN
        if time.monotonic() > ticket.deadline:
            return Failure("expired", "Request timeout expired before it began")
        return None

    def _is_over(self, ticket: Ticket) -> bool:
        return self._refusal(ticket) is not None

    def _is_cancelled(self, ticket: Ticket) -> bool:
        return self._abandoned is not None or self._cancelled.get(ticket.slot) == ticket.serial

    def _finish(self, session: Session, flight: InFlight) -> None:
        slot, model, began = flight.ticket.slot, flight.ticket.model, time.monotonic_ns()
        took = self._took if model == self._last else self._patience + 1
        if (took > BUNDLE) != session.roles.long:
            session.roles.expect(took > BUNDLE)
        if took > BUNDLE:
            session.place.leave(session.roles.alone)
        if took > self._gathers or began - self._rung > self._patience:
            self._ring(session)  # Nobody should have to wait for a long work to hear of an earlier one.
            self._rung = began
        try:
            outputs = flight.work.wait()
            ended = time.monotonic_ns()
            session.place.go_on()
            self._last, self._took = model, ended - began
            extents = session.link.arena.slot(slot).store_outputs(outputs, flight.room)
        except Exception as error:
            self._fail(session, slot, self._stopped(flight.ticket, error) or self._failure(error), began)
        else:
            self._end(session, Done(slot, extents, None, began, ended))

    def _ring(self, session: Session) -> None:
        session.telling.acquire()  # In place of `with`, which takes twice the time where this is compiled.
        try:
            session.link.completions.ring()
        finally:
            session.telling.release()

    def _fail(self, session: Session, slot: int, failure: Failure, began: int) -> None:
        self._end(session, Done(slot, _NOTHING, failure, began, time.monotonic_ns()))

    def _end(self, session: Session, done: Done) -> None:
        self._flying.pop(done.slot, None)
        session.telling.acquire()
        try:
            if done.failure:
                self._failed += 1
            else:
                self._done += 1
            session.link.completions.put(done)
        finally:
            session.telling.release()

    def _stopped(self, ticket: Ticket, error: Exception) -> Failure | None:
        """Why a work was told to end, where that was not its client's doing."""
        if not isinstance(error, Cancelled):
            return None
        if self._overrun and self._overrun[0] == ticket.serial:
            return self._overrun[1]
        return self._abandoned if self._abandoned is not WITHDRAWN else None

    def _failure(self, error: Exception) -> Failure:
        text = str(error) or type(error).__name__
        if isinstance(error, DeviceLost):
            self._lost(error)
            return Failure("lost", text)
        if isinstance(error, Outgrown):
            return Failure("outgrown", str(error.nbytes))
        return Failure("cancelled" if isinstance(error, Cancelled) else "raised", text)


_NOTHING: tuple[Extent, ...] = ()
