"""The thread side of a tenant: tickets in, completions out, on one thread of one partition.

It enqueues every ticket it is given and waits for the oldest, so the partition's stream is never empty while the lane
has credits left. Nothing a model does ends the thread.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from engines import Cancelled, Executor, Room, Work
from partitions import Partition

from .slots import Slot
from .ticket import Done, Extent, Failure, ModelKey, Ticket


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


class Worker:
    """Runs tickets on a partition, in order. `start` opens it, `close` ends it.

    `submit` and `cancel` belong to one thread (the event loop); `report` is called on the worker's own.
    """

    def __init__(
        self,
        partition: Partition,
        executors: Mapping[ModelKey, Executor],
        slots: Callable[[int], Slot],
        report: Callable[[Done], None],
    ) -> None:
        self.partition = partition
        self.executors = dict(executors)
        self._slots = slots
        self._report = report
        self._tickets: SimpleQueue[Ticket | None] = SimpleQueue()
        self._flying: dict[int, Work] = {}
        self._cancelled: set[int] = set()
        self._done = self._failed = 0
        self._thread = Thread(target=self._run, name=f"worker {partition!r}", daemon=True)

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "not running"
        return f"<Worker {len(self.executors)} models on {self.partition!r}, {state}>"

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(self._done, self._failed, len(self.executors))

    def start(self) -> None:
        """Start the thread and attach it to the partition."""
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Run this one; its Done will be reported. Does not block."""
        self._cancelled.discard(ticket.slot)
        self._tickets.put(ticket)

    def cancel(self, slot: int) -> None:
        """Stop what was submitted for this slot, if it can be stopped; its Done is still reported. Does not block."""
        self._cancelled.add(slot)
        if work := self._flying.get(slot):
            work.cancel()

    def close(self) -> None:
        """Finish what was submitted, end the thread, close executors and partition. Blocks."""
        if self._thread.is_alive():
            self._tickets.put(None)
            self._thread.join()
        for executor in self.executors.values():
            executor.close()
        self.partition.close()

    def _run(self) -> None:
        self.partition.attach()
        flights: deque[Flight] = deque()
        while (ticket := self._next(idle=not flights)) or flights:
            if ticket is None:
                self._finish(flights.popleft())
            elif flight := self._begin(ticket):
                flights.append(flight)

    def _next(self, idle: bool) -> Ticket | None:
        """The next ticket; None when there is none yet, or, if `idle`, when there will be none any more."""
        if idle:
            return self._tickets.get()
        try:
            ticket = self._tickets.get_nowait()
        except Empty:
            return None
        if ticket is None:
            self._tickets.put(None)  # To be met again, once idle.
        return ticket

    def _begin(self, ticket: Ticket) -> Flight | None:
        if failure := self._refusal(ticket):
            self._fail(ticket.slot, failure, time.monotonic_ns())
            return None
        try:
            executor = self.executors[ticket.model]
            inputs, room = self._slots(ticket.slot).inputs(executor.engine.signature, ticket.shapes)
            work = executor.enqueue(inputs, room)
        except Exception as error:
            self._fail(ticket.slot, _failure(error), time.monotonic_ns())
            return None
        self._flying[ticket.slot] = work
        if ticket.slot in self._cancelled:  # Cancelled since the first look, by somebody who did not find the work.
            work.cancel()
        return Flight(ticket, work, room)

    def _refusal(self, ticket: Ticket) -> Failure | None:
        if ticket.slot in self._cancelled:
            return Failure("cancelled", "withdrawn before it began")
        if time.monotonic() > ticket.deadline:
            return Failure("expired", "Request timeout expired before it began")
        return None

    def _finish(self, flight: Flight) -> None:
        slot, began = flight.ticket.slot, time.monotonic_ns()
        try:
            outputs = flight.work.wait()
            ended = time.monotonic_ns()
            extents = self._slots(slot).keep(outputs, flight.room)
        except Exception as error:
            self._fail(slot, _failure(error), began)
        else:
            self._end(Done(slot, extents, None, began, ended))

    def _fail(self, slot: int, failure: Failure, began: int) -> None:
        self._end(Done(slot, _NOTHING, failure, began, time.monotonic_ns()))

    def _end(self, done: Done) -> None:
        self._flying.pop(done.slot, None)
        if done.failure:
            self._failed += 1
        else:
            self._done += 1
        self._report(done)


_NOTHING: tuple[Extent, ...] = ()


def _failure(error: Exception) -> Failure:
    return Failure("cancelled" if isinstance(error, Cancelled) else "raised", str(error) or type(error).__name__)
