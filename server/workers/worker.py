"""The device side of a tenant: tickets in, completions out, on two threads of one partition.

One thread waits for the oldest work in flight while the other listens for tickets and enqueues them, so the partition's stream
is never empty while the HTTP side may launch more (see `server.workers.thread_roles`). On CPU partitions
(`Partition.host_cores`) the thread that waits for a work also runs it, and there is no second thread, which would only take
its time; where the event loop is the same tenant's, short models run there (`loop_runs`). No error of a model ends the threads.

An answer in parts is a ticket for each part, so other tickets run between two parts, and the limit on execution time applies to
each. What is kept between two parts belongs to the link: a worker on another partition goes on with it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from threading import Semaphore, Thread
from typing import Any

from engines import Executor
from partitions import DeviceLost, Partition

from ..accounts.meter import Meter, Place
from ..errors import Outgrown
from ..launch_loop.loop import Twin, open_loop
from ..link.messages import Done, Extent, Failure, ModelKey, Ticket
from .borrowing import Borrowing
from .bundling import BUNDLE, longest_delay
from .cancellations import EXPIRED, WITHDRAWN, Cancellations, failure_of
from .deferred import MAX_RESUMED, error_of
from .gil_priority import GilPriorities
from .loop_runs import LoopRuns
from .metering import Metering
from .session import Endpoint, InFlight, Session
from .stretching import Measured

log = logging.getLogger("greenlane.worker")

LOOK_INTERVAL = 10_000
"""Nanoseconds between two polls for tickets, each of which is a system call; after an idle phase with short works, `BUNDLE`."""


def _ignore(_: Exception) -> None:
    """The default for `on_error`."""


class Worker:
    """Runs tickets on a partition, in order, from `serve` to `halt`; the next worker on the link continues where it stopped.

    A ticket is only overtaken while its executor prepares itself for its shapes, by tickets of other models and shapes.
    Both callbacks run on a thread of the worker: `on_lost` when the device is lost, `on_error` when a thread ends with another
    error; then the worker stops, and may `serve` again. `priorities` are shared by all workers of the process, and
    `meter` by all workers of the tenant.
    """

    def __init__(
        self,
        partition: Partition,
        executors: Mapping[ModelKey, Executor],
        on_lost: Callable[[DeviceLost], None],
        priorities: GilPriorities,
        on_error: Callable[[Exception], None] = _ignore,
        launch_loop: bool = True,
        meter: Meter | None = None,
    ) -> None:
        self.partition = partition
        self.executors = dict(executors)
        self.borrowing: Borrowing | None = None
        self._uses_loop = launch_loop
        self.metering = Metering(meter or Meter(), Place(partition.size), partition.host_cores is not None)
        self._on_lost = on_lost
        self._on_error = on_error
        self._priorities = priorities
        self._endpoint: Endpoint | None = None
        self._session: Session | None = None
        self._loop_runs: LoopRuns | None = None
        self._threads: list[Thread] = []
        self._gate = Semaphore(0)
        self._in_flight: dict[int, InFlight] = {}
        self._cancellations = Cancellations()
        self._can_prepare: dict[type, bool] = {}
        self._last_model: ModelKey | None = None
        self._last_duration = self._rung_at = self._next_look = 0
        self._max_delay = self._ring_before = BUNDLE

    def __repr__(self) -> str:
        state = "running" if self._session else "not running"
        return f"<Worker {len(self.executors)} models on {self.partition!r}, {state}>"

    @property
    def idle(self) -> bool:
        """Whether no inference runs or waits in this worker now. Any thread."""
        session = self._session
        return session is None or not (self._in_flight or session.deferred.count or session.has_work)

    def stretch(self, borrowing: Borrowing | None) -> None:
        """Use this wide partition too, once `widen` was called, in place of one on which nothing is in flight. Blocks."""
        if borrowing is not None:
            self.metering.wide = borrowing.place
        self.borrowing = borrowing
        self.revoke()

    def widen(self) -> None:
        """Let works go to the wide partition from now on."""
        if borrowing := self.borrowing:
            borrowing.widen()
            if (session := self._session) and session.loop:
                session.loop.borrow(borrowing.shared)
                session.loop.wake()

    def too_long(self) -> list[Measured]:
        """As `Borrowing.too_long`, with what the launch loop has measured. Any thread."""
        if (borrowing := self.borrowing) is None:
            return []
        session = self._session
        return borrowing.too_long([Measured(*each) for each in session.loop.times()] if session and session.loop else [])

    def revoke(self) -> None:
        """Have the launch loop forget all that it knows, and stay on the home partition until `widen`. Blocks until it has."""
        if (session := self._session) and session.loop:
            session.loop.borrow(None)
            session.loop.revoke()

    def warm_up(self) -> None:
        """Start the threads, which wait until `serve` is called: that takes less time then. Blocks for about a millisecond."""
        if not self._threads:
            names = [f"worker {self.partition!r}", f"worker {self.partition!r}, second"]
            hosted = self.partition.host_cores is not None
            self._threads = [
                Thread(target=self._run, args=(second,), name=name, daemon=True)
                for second, name in enumerate(names[:1] if hosted else names)
            ]
            for thread in self._threads:
                thread.start()

    def serve(self, endpoint: Endpoint) -> None:
        """Have the threads run the tickets of this link."""
        if endpoint is not self._endpoint:  # Serials start again at 1 with each link.
            self._cancellations.by_slot = {}
        self._endpoint, self._cancellations.abandoned = endpoint, None
        hosted = self.partition.host_cores is not None
        self._max_delay = longest_delay(endpoint.link.shares_interpreter, hosted)
        self._ring_before = self._max_delay if hosted else BUNDLE
        endpoint.link.tickets.open()
        endpoint.link.completions.set_on_host_cores(hosted)
        uses_loop = self._uses_loop and not hosted
        loop = open_loop(endpoint.link, BUNDLE, EXPIRED, WITHDRAWN, self._cancellations.by_slot) if uses_loop else None
        session = Session(endpoint, self._priorities.join(endpoint.link.tickets.waiting), 1 if hosted else 2, loop)
        if loop and self.borrowing and not self.borrowing.suspended:
            loop.borrow(self.borrowing.shared)
        self._session = session
        if hosted and endpoint.link.shares_interpreter:
            self._loop_runs = LoopRuns(
                session,
                self.partition,
                self.executors,
                self._in_flight,
                self._cancellations,
                self._prepares,
                self.metering,
            )
            self._loop_runs.open()
        if session.deferred.count or endpoint.link.tickets.waiting():
            endpoint.link.tickets.wake()  # The previous worker consumed the wake-ups for these tickets.
        self.warm_up()
        for _ in self._threads:
            self._gate.release()

    def abandon(self, reason: Failure = WITHDRAWN) -> None:
        """Cancel what is in flight and start nothing more; all of it fails with this reason. Does not block. Any thread."""
        self._cancellations.abandoned = reason
        for flight in list(self._in_flight.values()):
            flight.work.cancel()
        if session := self._session:
            session.deferred.wake()
            if session.loop:
                session.loop.wake()

    @property
    def oldest(self) -> int | None:
        """The serial of the oldest work in flight, None if there is none. Any thread."""
        flights = list(self._in_flight.values())
        loop = self._session.loop if self._session else None
        return flights[0].ticket.serial if flights else loop.oldest if loop else None

    def overrun(self, serial: int, reason: Failure) -> None:
        """Cancel the work with this serial, if it is in flight; it then fails with this reason. Any thread."""
        for flight in list(self._in_flight.values()):
            if flight.ticket.serial == serial:
                self._cancellations.overrun = serial, reason
                flight.work.cancel()

    def wait_until_started(self) -> bool:
        """Whether all threads that `serve` started are attached to the partition. Blocks until each is, or has failed."""
        session = self._session
        if session is None:
            return False
        for _ in self._threads:
            session.started.acquire()
        return session.error is None

    def stop(self) -> "Future[None]":
        """Begin to halt, without blocking; call `halt` when the future is done."""
        if session := self._session:
            session.roles.stop()
            return session.ended
        ended: Future[None] = Future()
        ended.set_result(None)
        return ended

    def halt(self) -> None:
        """Start nothing more, and wait for what is in flight. Blocks. Deferred tickets are left to the next worker."""
        if session := self._session:
            session.roles.stop()
            for thread in self._threads:
                thread.join()
            if self._loop_runs is not None:
                self._loop_runs.close()
            self._threads, self._session, self._loop_runs = [], None, None
            if session.loop:
                session.loop.close()
            session.link.tickets.give_back(session.deferred.close())
        elif self._threads:  # They wait in vain.
            for _ in self._threads:
                self._gate.release()
            for thread in self._threads:
                thread.join()
            self._threads = []

    def cancel(self, slot: int, serial: int) -> None:
        """Cancel this ticket if it is still here; its completion is reported all the same. Does not block. Any thread."""
        self._cancellations.by_slot[slot] = serial
        if (session := self._session) and session.loop:
            session.loop.cancel(slot, serial)
        flight = self._in_flight.get(slot)
        if flight and flight.ticket.serial == serial:
            flight.work.cancel()
        elif session:
            session.deferred.wake()

    def exchange(self, model: ModelKey, other: Executor) -> Executor | None:
        """Run this model's tickets by another executor from now on, and return the one before, of which nothing is in flight.

        None, and nothing changes, if a work of it is in flight. What the launch loop runs does not count: closing the executor
        waits for that. Blocks while tickets are being enqueued. Any thread.
        """
        session = self._session
        with session.enqueuing if session else nullcontext():
            executor = self.executors[model]
            names = [name for name, each in self.executors.items() if each is executor]
            if any(flight.ticket.model in names for flight in list(self._in_flight.values())):
                return None
            self.executors.update(dict.fromkeys(names, other))
        return executor

    def retire(self) -> None:
        """Halt; executors and partition stay open, for another worker. Blocks."""
        self.halt()
        if self.borrowing:
            self.borrowing.close()
            self.borrowing = None

    def close(self) -> None:
        """Halt, then close executors and partition. Blocks."""
        self.retire()
        for executor in self.executors.values():
            executor.close()
        self.partition.close()

    def trim(self, after: float) -> None:
        """Have executors free memory unused for `after` seconds. Blocks; not while an executor is being closed."""
        idle = self.idle
        for executor in list(self.executors.values()):
            if (trim := getattr(executor, "trim", None)) is not None:
                trim(after, idle)

    def _run(self, second: int) -> None:
        self._gate.acquire()
        if session := self._session:
            self._serve(session, second)

    def _serve(self, session: Session, second: int) -> None:
        try:
            self.partition.attach()
            session.started.release()
            if second:
                session.roles.enter()
            self._work(session)
        except Exception as error:
            self._fail_session(session, error)
        finally:
            if session.roles.end():
                self._priorities.remove(session.priority)
                if self._cancellations.abandoned:
                    session.unfinished.clear()
                if session.error:
                    self._fail_in_flight(session)
                session.ended.set_result(None)

    def _fail_session(self, session: Session, error: Exception) -> None:
        """A thread has failed: end the other one too, and call `on_lost` or `on_error`."""
        log.error("%s failed: %s", self, error, exc_info=error)
        session.error = error
        session.started.release()
        session.roles.stop()
        if isinstance(error, DeviceLost):
            self._on_lost(error)
        else:
            self._on_error(error)

    def _fail_in_flight(self, session: Session) -> None:
        """When no thread is left, wait for the works in flight, so that their memory is free, and report them as failed."""
        for flight in list(self._in_flight.values()):
            with suppress(Exception):
                flight.work.wait()
            with suppress(Exception):
                self._fail(session, flight.ticket.slot, Failure("stopped", f"the worker failed: {session.error}"), 0)
        with suppress(Exception):
            self._ring(session)

    def _work(self, session: Session) -> None:
        roles = session.roles
        while roles.listens():
            self._enqueue(session, self._listen(session))
            while session.flights and roles.waits():
                self._wait(session)
                roles.done()
            self._ring(session)  # Before this thread blocks, to listen or parked.
            session.wake_listener(bool(self._in_flight))

    def _listen(self, session: Session) -> int:
        """As `Session.listen`. If the driver fails meanwhile, what the launch loop had in flight has failed."""
        found = session.listen(bool(self._in_flight), self._cancellations.abandoned is not None)
        if isinstance(found, int):
            return found
        failure = self._failure(found.error)
        for slot in found.slots:
            self._fail(session, slot, failure, time.monotonic_ns())
        return 0

    def _enqueue(self, session: Session, count: int) -> None:
        """Start `count` new tickets, and deferred ones that are ready."""
        session.enqueuing.acquire()
        try:
            if session.loop:
                session.answered_wakes = session.loop.wakes
            now = time.monotonic_ns()
            session.link.tickets.add_unread(count)
            self._next_look = now + (BUNDLE if self._last_duration < BUNDLE else LOOK_INTERVAL)
            self._start_all(session, now)
        finally:
            session.enqueuing.release()

    def _wait(self, session: Session) -> None:
        """Wait for works, in order, until none is in flight."""
        flights, deferred, roles, priority = session.flights, session.deferred, session.roles, session.priority
        priority.start_completing()
        while flights:
            flight = flights.popleft()
            self._finish(session, flight)
            alone = flight.wide is not None or (self.borrowing is not None and self.borrowing.held)
            if deferred.count or flights or alone:
                now = time.monotonic_ns()
                priority.yield_gil(now)
                if deferred.ready or alone or (roles.alone and now > self._next_look):
                    with session.enqueuing:
                        self._start_all(session, now)
        priority.start_waiting(False)

    def _start_all(self, session: Session, now: int) -> None:
        """Start all tickets that have arrived. If no other thread listens, also poll, once per LOOK_INTERVAL.

        A work on the wide partition is alone in flight: the thread that waits for others starts it after them, and the next
        after it.
        """
        priority, roles, tickets, flights = session.priority, session.roles, session.link.tickets, session.flights
        if session.deferred.count:
            self._start_deferred(session)
        while not roles.stopped and not (self.borrowing is not None and self.borrowing.holds(self._in_flight)):
            if look := roles.alone and now > self._next_look and bool(flights):
                self._next_look = now + LOOK_INTERVAL
            if session.loop and session.is_left_to_loop(look, self._cancellations.abandoned is not None):
                break
            ticket = tickets.poll(look)
            if ticket is None:
                break
            priority.start_enqueuing(now)
            self._start(session, ticket)
            now = time.monotonic_ns()
            priority.yield_gil(now)
        priority.end_enqueuing()

    def _start_deferred(self, session: Session) -> None:
        """Start deferred tickets that are ready, a few at a time, and fail those that need not be run any more."""
        deferred = session.deferred
        for ticket, error in deferred.collect():
            self._fail(session, ticket.slot, self._failure(error), time.monotonic_ns())
        for ticket in deferred.drop(self._cancellations.is_refused):  # None is enqueued, whatever is in flight.
            self._start(session, ticket)
        while deferred.ready and len(self._in_flight) < MAX_RESUMED and not session.roles.stopped:
            if self.borrowing is not None and self.borrowing.wide:
                break
            self._start(session, deferred.take(), again=True)

    def _start(self, session: Session, ticket: Ticket, again: bool = False) -> None:
        """Enqueue a ticket, defer it (perhaps `again`), or report it as failed."""
        if refused := self._cancellations.refusal(ticket):
            session.unfinished.pop(ticket.slot, None)
            self._fail(session, ticket.slot, refused, time.monotonic_ns())
            return
        try:
            executor = self.executors[ticket.model]
            if self._prepares(executor) and self._defer(session, ticket, executor, again):
                return
            if (borrowing := self.borrowing) is None:
                flight = session.enqueue(executor, ticket)
            else:
                flight = borrowing.enqueue(session, executor, ticket, self._in_flight)
        except Exception as error:
            self._fail(session, ticket.slot, self._failure(error), time.monotonic_ns())
            return
        self._in_flight[ticket.slot] = flight
        counter = flight.counter = self.metering.counter(executor, ticket.model)
        if flight.wide is not None:
            flight.counter = self.metering.counter(flight.wide, ticket.model, True)
        session.flights.append(flight)
        if session.loop and not ticket.after:
            session.loop.learn(ticket, executor, counter, self._twin(ticket))
        if self._cancellations.covers(ticket):  # Cancelled since `_refusal`, when the work could not be found yet.
            flight.work.cancel()

    def _twin(self, ticket: Ticket) -> Twin | None:
        """What runs tickets like this one on the wide partition."""
        borrowing = self.borrowing
        executor = None if borrowing is None else borrowing.executors.get(ticket.model)
        return None if executor is None else Twin(executor, self.metering.counter(executor, ticket.model, True))

    def _prepares(self, executor: Executor) -> bool:
        """Whether the executor is a `Preparing`; cached by type, because a failed `hasattr` takes half a microsecond."""
        kind = type(executor)
        known = self._can_prepare.get(kind)
        if known is None:
            known = self._can_prepare[kind] = hasattr(executor, "preparing")
        return known

    def _defer(self, session: Session, ticket: Ticket, executor: Any, again: bool) -> bool:
        """Defer a ticket whose executor first has to prepare itself for its shapes; whether it did. Raises what that raised."""
        deferred = session.deferred
        if not (deferred.count and deferred.follow(ticket, again)):
            prepared = executor.preparing(ticket.shapes)
            if prepared is None:
                return False
            if prepared.done():
                if error := error_of(prepared):
                    raise error
                return False
            deferred.put(ticket, prepared)
        if self._cancellations.covers(ticket):  # Cancelled before it could be found among the deferred.
            deferred.wake()
        return True

    def _finish(self, session: Session, flight: InFlight) -> None:
        slot, model, began = flight.ticket.slot, flight.ticket.model, time.monotonic_ns()
        took = self._last_duration if model == self._last_model else self._max_delay + 1
        if (took > BUNDLE) != session.roles.long:
            session.roles.expect(took > BUNDLE)
        if took > BUNDLE:
            session.priority.start_waiting(session.roles.alone)
        if took > self._ring_before or began - self._rung_at > self._max_delay:
            self._ring(session)  # Earlier completions must not wait for a long work.
            self._rung_at = began
        self.metering.begin(flight, began)
        loop_runs, ended, own = self._loop_runs, 0, -1
        try:
            if loop_runs is not None:
                loop_runs.start_measuring()
            try:
                outputs = flight.work.wait()
            finally:
                ended = time.monotonic_ns()
                if loop_runs is not None:
                    own = loop_runs.duration(ended - began)
                self.metering.end(flight, ended, own)
            if loop_runs is not None:
                loop_runs.learn(flight.ticket, own)
            session.priority.start_completing()
            self._last_model, self._last_duration = model, ended - began
            extents = session.link.arena.slot(slot).store_outputs(outputs, flight.room)
            if flight.ticket.after and outputs:
                session.keep(flight, True)
        except Exception as error:
            if flight.ticket.after and isinstance(error, Outgrown):
                session.keep(flight, False)
            self._fail(session, slot, self._cancellations.reason(flight.ticket, error) or self._failure(error), began)
        else:
            self._end(session, Done(slot, extents, None, began, ended))

    def _ring(self, session: Session) -> None:
        session.reporting.acquire()  # Not `with`, which takes twice the time when compiled.
        try:
            session.link.completions.ring()
        finally:
            session.reporting.release()

    def _fail(self, session: Session, slot: int, failure: Failure, began: int) -> None:
        self._end(session, Done(slot, _NOTHING, failure, began, time.monotonic_ns()))

    def _end(self, session: Session, done: Done) -> None:
        flight = self._in_flight.pop(done.slot, None)
        if flight is not None and self.borrowing is not None:
            self.borrowing.end(flight, done)
        session.reporting.acquire()
        try:
            session.link.completions.put(done)
        finally:
            session.reporting.release()

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, DeviceLost):
            self._on_lost(error)
        return failure_of(error)


_NOTHING: tuple[Extent, ...] = ()
