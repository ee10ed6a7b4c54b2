"""What a worker's threads do from `Worker.serve` to `Worker.halt`: start tickets, wait for their works, report how these ended.

One thread waits for the oldest work in flight while the other listens for tickets and enqueues them, so the partition's stream
is never empty while the HTTP side may launch more (see `session.ThreadRoles`). On CPU partitions
(`Partition.host_cores`) the thread that waits for a work also runs it, and there is no second thread, which would only take
its time; where the event loop is the same tenant's, short models run there (`loop_runs`). No error of a model ends the threads.

An answer in parts is a ticket for each part, so other tickets run between two parts, and the limit on execution time applies to
each. What is kept between two parts belongs to the link: a worker on another partition goes on with it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from engines import Executor
from partitions import DeviceLost, Partition

from ..errors import Outgrown
from ..launch_loop.structures import IN, MEMORY, OUT
from ..link.messages import Done, Extent, Failure, Malformed, ModelKey, Ticket
from .deferred import MAX_RESUMED, error_of
from .gil_priority import GilPriorities
from .loop_runs import LoopRuns
from .narrow import NarrowPlacement
from .pace import Pace
from .session import Cancellations, InFlight, Metering, Session, failure_of
from .wide import WidePlacement

log = logging.getLogger("greenlane.worker")

BUNDLE = 50_000
"""For how many nanoseconds completions of short works may be collected, to wake the HTTP side once for
several: where the HTTP process has cores of its own."""
BUNDLE_ON_SAME_CORES = 300_000
"""If the HTTP process runs on the partition's cores: each wakes at the other's expense, and evicts its cache lines."""
BUNDLE_ON_SAME_INTERPRETER = 1_000_000
"""If both sides also share one interpreter."""
LOOK_INTERVAL = 10_000
"""Nanoseconds between two polls for tickets, each of which is a system call; after an idle phase with short works, `BUNDLE`."""


def longest_delay(shares_interpreter: bool, hosted: bool) -> int:
    """The delay for a link; `hosted`: works run on cores of the host."""
    if shares_interpreter:
        return BUNDLE_ON_SAME_INTERPRETER
    return BUNDLE_ON_SAME_CORES if hosted else BUNDLE


class TicketRunner:
    """Runs the tickets of one session on a partition, in order. `run` is for the worker's threads, which call all the rest too.

    A ticket is only overtaken while its executor prepares itself for its shapes, by tickets of other models and shapes.
    `executors`, `cancellations`, `metering` and the callbacks are the worker's; it changes `executors` while it serves.
    `in_flight` has the works in flight by slot, also those that run on the event loop, and may be read by any thread.
    `wide` and `narrow` may be replaced while nothing is in flight there, `pace` at any time.
    """

    def __init__(
        self,
        session: Session,
        partition: Partition,
        executors: Mapping[ModelKey, Executor],
        cancellations: Cancellations,
        metering: Metering,
        priorities: GilPriorities,
        on_lost: Callable[[DeviceLost], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.in_flight: dict[int, InFlight] = {}
        self.wide: WidePlacement | None = None
        self.narrow: NarrowPlacement | None = None
        self._on_narrow = False
        """Whether the last work was enqueued on the narrow placement. All that are in flight are there, or none."""
        self.pace: Pace | None = None
        self.session = session
        self._partition = partition
        self._executors = executors
        self._cancellations = cancellations
        self._metering = metering
        self._priorities = priorities
        self._on_lost = on_lost
        self._on_error = on_error
        self._loop_runs: LoopRuns | None = None
        self._can_prepare: dict[type, bool] = {}
        self._last_model: ModelKey | None = None
        self._last_duration = self._rung_at = self._next_look = 0
        self._paced = 0
        hosted = partition.host_cores is not None
        self._max_delay = longest_delay(session.link.shares_interpreter, hosted)
        self._ring_before = self._max_delay if hosted else BUNDLE

    def open(self) -> None:
        """Called when the worker before has left the link and before the threads start: go on with what it has deferred, and
        let short models run on the event loop, if that is the tenant's own.
        """
        session = self.session
        self._priorities.join(session.priority)
        session.deferred.go_on(session.link.tickets.take_returned())
        if self._partition.host_cores is not None and session.link.shares_interpreter:
            self._loop_runs = LoopRuns(
                session, self._partition, self._executors, self.in_flight, self._cancellations, self._prepares, self._metering
            )
            self._loop_runs.open()

    def close(self) -> None:
        """Called when the threads have ended: run nothing more on the event loop. Blocks as long as a short model takes."""
        if self._loop_runs is not None:
            self._loop_runs.close()

    def run(self, failed: Exception | None) -> None:
        """A thread, which may have `failed` already: until `Session.roles.stop` was called and nothing is in flight."""
        try:
            if failed:
                raise failed
            self._work()
        except Exception as error:
            self._fail_session(error)
        finally:
            if self.session.roles.end():
                self._priorities.remove(self.session.priority)
                if self._cancellations.abandoned:
                    self.session.unfinished.clear()
                if self.session.error:
                    self._fail_in_flight()
                self.session.ended.set_result(None)

    def _fail_session(self, error: Exception) -> None:
        """A thread has failed: end the other one too, and call `on_lost` or `on_error`."""
        session = self.session
        log.error("%s failed: %s", self, error, exc_info=error)
        session.error = error
        session.roles.stop()
        if isinstance(error, DeviceLost):
            self._on_lost(error)
        else:
            self._on_error(error)

    def _fail_in_flight(self) -> None:
        """When no thread is left, wait for the works in flight, so that their memory is free, and report them as failed."""
        for flight in list(self.in_flight.values()):
            with suppress(Exception):
                flight.work.wait()
            with suppress(Exception):
                self._fail(flight.ticket.slot, Failure("stopped", f"the worker failed: {self.session.error}"), 0)
        with suppress(Exception):
            self._ring()

    def _work(self) -> None:
        session = self.session
        roles = session.roles
        while roles.listens(bool(self._paced)):
            self._enqueue(self._listen())
            while session.flights and roles.waits():
                self._wait()
                roles.done()
            self._ring()  # Before this thread blocks, to listen or parked.
            session.wake_listener(bool(self.in_flight or self._paced))

    def _listen(self) -> int:
        """As `Session.listen`. If the driver fails meanwhile, what the launch loop had in flight has failed."""
        found = self.session.listen(bool(self.in_flight), self._cancellations.abandoned is not None, self._paced)
        if isinstance(found, int):
            return found
        failure = self._failure(found.error)
        for slot in found.slots:
            self._fail(slot, failure, time.monotonic_ns())
        return 0

    def _enqueue(self, count: int) -> None:
        """Start `count` new tickets, and deferred ones that are ready."""
        session = self.session
        session.enqueuing.acquire()
        try:
            if session.loop:
                session.answered_wakes = session.loop.wakes
            now = time.monotonic_ns()
            session.link.tickets.add_unread(count)
            self._next_look = now + (BUNDLE if self._last_duration < BUNDLE else LOOK_INTERVAL)
            self._start_all(now)
        finally:
            session.enqueuing.release()

    def _wait(self) -> None:
        """Wait for works, in order, until none is in flight."""
        session = self.session
        flights, deferred, roles, priority = session.flights, session.deferred, session.roles, session.priority
        priority.start_completing()
        while flights:
            flight = flights.popleft()
            self._finish(flight)
            alone = self.wide is not None and (self.wide.held or flight.placement is self.wide)
            if deferred.count or flights or alone:
                now = time.monotonic_ns()
                priority.yield_gil(now)
                if deferred.ready or alone or (roles.alone and now > self._next_look):
                    with session.enqueuing:
                        self._start_all(now)
        priority.start_waiting(False)

    def _start_all(self, now: int) -> None:
        """Start all tickets that have arrived. If no other thread listens, also poll, once per LOOK_INTERVAL.

        A work on the wide partition is alone in flight: the thread that waits for others starts it after them, and the next
        after it. So it does with one that goes to another placement than those in flight. A ticket that waits for the tenant's
        shares stays the next one: a thread listens until then.
        """
        session = self.session
        pacing, waited = 0, self._paced
        priority, roles, tickets, flights = session.priority, session.roles, session.link.tickets, session.flights
        if session.deferred.count:
            pacing = self._start_deferred()
        while not roles.stopped and session.deferred.held is None and not self._is_held():
            if look := roles.alone and now > self._next_look and bool(flights):
                self._next_look = now + LOOK_INTERVAL
            if session.loop and session.is_left_to_loop(look, self._cancellations.abandoned is not None):
                break
            ticket = tickets.poll(look)
            if ticket is None:
                break
            if (left := self._share_in(now)) and not self._cancellations.is_refused(ticket):
                pacing = left
                tickets.put_back()
                break
            priority.start_enqueuing(now)
            self._start(ticket)
            now, waited = time.monotonic_ns(), 0
            priority.yield_gil(now)
        priority.end_enqueuing()
        if pacing and not waited and (pace := self.pace) is not None:
            pace.count_wait(now)
        if pacing and not self._paced:
            tickets.wake()  # Another thread may listen already, until the next ticket comes.
        self._paced = pacing

    def _is_held(self) -> bool:
        """Whether the next ticket, whatever it is, waits for a work on the wide partition, or to go there."""
        wide = self.wide
        return wide is not None and not (self._on_narrow and self.in_flight) and wide.holds(self.in_flight)

    def _share_in(self, now: int) -> int:
        """As `Pace.wait`."""
        return 0 if (pace := self.pace) is None else pace.wait(now)

    def _start_deferred(self) -> int:
        """Start deferred tickets that are ready, a few at a time, and fail those that need not be run any more.

        Returns how long the next has to wait for the tenant's shares.
        """
        session = self.session
        deferred = session.deferred
        for ticket, error in deferred.collect():
            self._fail(ticket.slot, self._failure(error), time.monotonic_ns())
        for ticket in deferred.drop(self._cancellations.is_refused):  # None is enqueued, whatever is in flight.
            self._start(ticket)
        while deferred.ready and len(self.in_flight) < MAX_RESUMED and not session.roles.stopped:
            if self.wide is not None and self.wide.running:
                break
            if left := self._share_in(time.monotonic_ns()):
                return left
            self._start(deferred.take(), again=True)
            if deferred.held is not None:
                break
        return 0

    def _start(self, ticket: Ticket, again: bool = False) -> None:
        """Enqueue a ticket, defer it (perhaps `again`), or report it as failed. Raises Malformed."""
        session = self.session
        if ticket.slot in self.in_flight:
            raise Malformed(f"a ticket in slot {ticket.slot}, in which a work is in flight")
        if refused := self._cancellations.refusal(ticket):
            session.unfinished.pop(ticket.slot, None)
            self._fail(ticket.slot, refused, time.monotonic_ns())
            return
        try:
            executor = self._executors[ticket.model]
            if self._prepares(executor) and self._defer(ticket, executor, again):
                return
            while (flight := self._launch(executor, ticket)) is None:
                session.deferred.hold(ticket)
                if self.in_flight:  # The thread that waits looks for it after it has taken the last one out.
                    if self._cancellations.covers(ticket):
                        session.deferred.wake()
                    return
                session.deferred.take()
        except Exception as error:
            self._fail(ticket.slot, self._failure(error), time.monotonic_ns())
            return
        self.in_flight[ticket.slot] = flight
        if (pace := self.pace) is not None:
            pace.charge(IN, _moved_in(executor, ticket), flight.launched)
            if flight.placement is not None and flight.placement is self.narrow:
                pace.charge(MEMORY, abs(self.narrow.demand(ticket.model).moved), flight.launched)
        counter = flight.counter = self._metering.counter(executor, ticket.model)
        if (placement := flight.placement) is not None:
            flight.counter = self._metering.counter(flight.executor, ticket.model, placement.place)
        session.flights.append(flight)
        if session.loop and not ticket.after:
            twin = self._metering.twin
            session.loop.learn(ticket, executor, counter, twin(self.wide, ticket.model), twin(self.narrow, ticket.model))
        if self._cancellations.covers(ticket):  # Cancelled since `_refusal`, when the work could not be found yet.
            flight.work.cancel()

    def _launch(self, executor: Executor, ticket: Ticket) -> InFlight | None:
        """Enqueue a ticket where it goes: to the narrow placement, the wide one or home. None if works are in flight elsewhere.
        Raises what the executor raises.
        """
        session, narrow, wide = self.session, self.narrow, self.wide
        goes = narrow is not None and narrow.takes(ticket)
        if goes != self._on_narrow:
            if self.in_flight:
                return None
            self._on_narrow = goes
        if narrow is not None and goes:
            return narrow.enqueue(session, ticket) or self._launch(executor, ticket)  # It was suspended meanwhile.
        if wide is None:
            return session.enqueue(executor, ticket)
        fenced = narrow is not None and narrow.keeps_home(ticket.model, *wide.sizes)
        return wide.enqueue(session, executor, ticket, self.in_flight, fenced)

    def _prepares(self, executor: Executor) -> bool:
        """Whether the executor is a `Preparing`; cached by type, because a failed `hasattr` takes half a microsecond."""
        kind = type(executor)
        known = self._can_prepare.get(kind)
        if known is None:
            known = self._can_prepare[kind] = hasattr(executor, "preparing")
        return known

    def _defer(self, ticket: Ticket, executor: Any, again: bool) -> bool:
        """Defer a ticket whose executor first has to prepare itself for its shapes; whether it did. Raises what that raised."""
        deferred = self.session.deferred
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

    def _finish(self, flight: InFlight) -> None:
        session = self.session
        slot, model, began = flight.ticket.slot, flight.ticket.model, time.monotonic_ns()
        took = self._last_duration if model == self._last_model else self._max_delay + 1
        if (took > BUNDLE) != session.roles.long:
            session.roles.expect(took > BUNDLE)
        if took > BUNDLE:
            session.priority.start_waiting(session.roles.alone)
        if took > self._ring_before or began - self._rung_at > self._max_delay:
            self._ring()  # Earlier completions must not wait for a long work.
            self._rung_at = began
        self._metering.begin(flight, began)
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
                self._metering.end(flight, ended, own)
            if loop_runs is not None:
                loop_runs.learn(flight.ticket, own)
            if (pace := self.pace) is not None:
                pace.charge(OUT, sum([each.nbytes for each in outputs]), flight.launched)
            session.priority.start_completing()
            self._last_model, self._last_duration = model, ended - began
            extents = session.link.arena.slot(slot).store_outputs(outputs, flight.room)
            if flight.ticket.after and outputs:
                session.keep(flight, True)
        except Exception as error:
            if flight.ticket.after and isinstance(error, Outgrown):
                session.keep(flight, False)
            self._fail(slot, self._cancellations.reason(flight.ticket, error) or self._failure(error), began)
        else:
            self._end(Done(slot, extents, None, began, ended))

    def _ring(self) -> None:
        session = self.session
        session.reporting.acquire()  # Not `with`, which takes twice the time when compiled.
        try:
            session.link.completions.ring()
        finally:
            session.reporting.release()

    def _fail(self, slot: int, failure: Failure, began: int) -> None:
        self._end(Done(slot, _NOTHING, failure, began, time.monotonic_ns()))

    def _end(self, done: Done) -> None:
        session = self.session
        flight = self.in_flight.pop(done.slot, None)
        if flight is not None and self.wide is not None:
            self.wide.finish(flight, done)
        if flight is not None and self.narrow is not None:
            self.narrow.finish(flight, done)
        session.reporting.acquire()
        try:
            session.link.completions.put(done)
        finally:
            session.reporting.release()

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, DeviceLost):
            self._on_lost(error)
        return failure_of(error)


def _moved_in(executor: Any, ticket: Ticket) -> int:
    """The bytes that a work of this ticket moves to the device: weights that stay on the host, and the inputs in its slot.

    Of an answer in parts only the first part reads these.
    """
    streamed: int = getattr(executor, "streamed", 0)
    if ticket.after and ticket.after != ticket.serial:
        return streamed
    specs = executor.engine.signature.inputs
    moved: int = sum([spec.nbytes(shape) for spec, shape in zip(specs, ticket.shapes, strict=True)])
    return streamed + moved


_NOTHING: tuple[Extent, ...] = ()
