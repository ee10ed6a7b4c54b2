"""Runs short models at once, on the thread of the event loop, where it belongs to the same tenant and to its cores.

An inference is then a function call. It goes the usual way, by a ticket to the worker's thread, whenever anything speaks
against that: the model is not known to be short, something else is in flight, the worker is being halted, or the run fails.
"""

import logging
import time
from collections.abc import Callable, Mapping
from threading import Semaphore, Thread
from typing import Any

from engines import Executor, Memo, Work
from partitions import Partition

from ..link.messages import Done, Extent, ModelKey, Shape, Ticket
from .session import Cancellations, InFlight, Metering, Session

log = logging.getLogger("greenlane.worker")

BOUND = 200_000
"""Nanoseconds that a model may take on the event loop. It is about what the way to the thread and back takes while the event
loop is busy, so other connections wait no longer than they would for the thread."""
BUDGET = 1_000_000
"""Nanoseconds that models may take of the event loop beyond their share (see `LoopTime`). Then the thread runs them: the event
loop reads what has come meanwhile, a queue forms, in which priorities and batches count, and on several cores both work."""

_UNPROVEN = 2 * BOUND
"""The bound of a model that has not run yet: it may run on the event loop after half a dozen short runs."""
_DECAY = 3
"""After each run the bound sinks by 1 / 2**3, unless the run was longer."""
_SHARE = 1, 2
"""Models may take half as long on the event loop as all else does there, where the thread has another core to run them on."""
_SHARE_OF_ONE_CORE = 4, 1
"""Where it has none, four times as long: there the thread only takes turns with the event loop, at a switch for each turn."""
INTERVAL = 0.02
"""Seconds between two looks: a work is cancelled when it has run for this long, or at the latest for twice as long. Looking so
rarely costs nothing, and a client hardly notices such a pause."""
FRESH = BOUND // 8
"""Nanoseconds for which a reading of the thread's CPU time does for the runs that follow: it is a system call."""
_MAX_ENTRIES = 256

Key = tuple[ModelKey, tuple[Shape, ...]]


class LoopTime:
    """How long each model recently took for each set of shapes, at most: a bound that rises at once and sinks slowly. So one
    slow run sends a model to the thread, until as many short ones have followed as the run was slow.

    Models that run on the event loop may take a share of its time that depends on the number of `cores` of the tenant's
    partition, and `BUDGET` more at once.

    `learn` may be called by another thread than the rest. Times are in nanoseconds.
    """

    def __init__(self, cores: int) -> None:
        self._share = _SHARE if cores > 1 else _SHARE_OF_ONE_CORE
        self._longest: Memo[Key, int] = Memo(_MAX_ENTRIES)
        self._taken = self._since = 0

    def __repr__(self) -> str:
        short = [longest for longest in list(self._longest.values()) if longest <= BOUND]
        return f"<LoopTime {len(short)} of {len(self._longest)} models and shapes are short>"

    def allows(self, key: Key, now: int) -> bool:
        """Whether one more run may take place on the event loop at this time."""
        longest = self._longest.get(key)
        if longest is None or longest > BOUND:
            return False
        times, parts = self._share
        self._taken = max(0, self._taken - (now - self._since) * times // parts)
        self._since = now
        return self._taken <= BUDGET

    def took(self, key: Key, ended: int, duration: int) -> None:
        """A run that was allowed ended at this time, and `duration` of what it took was the model's own."""
        self._taken += duration
        self._since = ended
        self.learn(key, duration)

    def learn(self, key: Key, duration: int) -> None:
        """A run took this long, on any thread."""
        longest = self._longest.get(key)
        if longest is None:
            self._longest.remember(key, max(duration, _UNPROVEN - (_UNPROVEN >> _DECAY)))
        else:
            self._longest[key] = max(duration, longest - (longest >> _DECAY))


class LoopGuard:
    """A thread that looks at what runs on the event loop, while anything does.

    Whether a work is short is known from its shapes, but a loop in a model may depend on the numbers in its inputs. `begin` and
    `end` are for the event loop's thread, `close` for any. After an interval without a run the thread rests; it ends after
    `close`. `sleep` blocks for so many seconds.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.thread: Thread | None = None
        self.resting = False
        self._sleep = sleep
        self._work: Work | None = None
        self._runs = 0
        self._closed = False
        self._rest = Semaphore(0)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "resting" if self.resting or self.thread is None else "looking"
        return f"<LoopGuard {state}, {self._runs} runs>"

    def begin(self, work: Work) -> None:
        """This work runs on the event loop from now on."""
        self._work = work
        self._runs += 1
        if self.resting:
            self.resting = False
            self._rest.release()
        elif self.thread is None:
            self.thread = Thread(target=self._look, name="guard of the event loop", daemon=True)
            self.thread.start()

    def end(self) -> None:
        """It has ended."""
        self._work = None

    def close(self) -> None:
        """End the thread, within an interval; nothing begins after this."""
        self._closed = True
        self._rest.release()

    def _look(self) -> None:
        while not self._closed:
            runs = self._runs
            work = self._work
            self._sleep(INTERVAL)
            if work is not None and self._work is work:
                work.cancel()
            elif self._runs == runs:
                self.resting = True
                if self._runs == runs:  # Otherwise `begin` may not have seen that this thread rests.
                    self._rest.acquire()
                self.resting = False
            work = None


class LoopRuns:
    """What one worker runs on the event loop while it serves a link: from `open` to `close`, `run` is the link's `run_now`.

    `run` is for the event loop's thread, `start_measuring`, `duration` and `learn` for the worker's. `executors`, `in_flight`
    and `cancellations` are the worker's; what runs on the event loop is in flight there too. `prepares` is whether an executor
    is a `Preparing`, `metering` counts what runs take, and `cpu_time` returns the nanoseconds of CPU time that the calling
    thread has used.
    """

    def __init__(
        self,
        session: Session,
        partition: Partition,
        executors: Mapping[str, Executor],
        in_flight: dict[int, InFlight],
        cancellations: Cancellations,
        prepares: Callable[[Executor], bool],
        metering: Metering,
        cpu_time: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._session = session
        self._partition = partition
        self._executors = executors
        self._in_flight = in_flight
        self._cancellations = cancellations
        self._prepares = prepares
        self._metering = metering
        self._cpu_time = cpu_time
        self._time = LoopTime(partition.size)
        self._guard = LoopGuard()
        self._attached = False
        self._began = 0
        self._read = self._read_at = 0

    def open(self) -> None:
        """Let the HTTP side call `run`."""
        self._session.link.tickets.run_now = self.run

    def close(self) -> None:
        """Run nothing more, and wait for what runs; the worker's threads have ended. Blocks as long as a short model takes."""
        self._session.link.tickets.run_now = None
        with self._session.enqueuing:
            self._guard.close()

    def run(self, ticket: Ticket) -> Done | None:
        """Run this ticket now, and return its completion; None if it has to go the usual way.

        Nothing else is in flight, and what was not launched yet is behind this ticket. An answer in parts always goes the
        usual way.
        """
        began, key = time.monotonic_ns(), (ticket.model, ticket.shapes)
        session = self._session
        if ticket.after or not self._time.allows(key, began) or not session.enqueuing.acquire(False):
            return None
        try:
            flight = self._enqueue(ticket)
            if flight is None:
                return None
            if began - self._read_at > FRESH:
                self._read, self._read_at = self._cpu_time(), began
            extents = self._wait(flight)
            ended = time.monotonic_ns()
            duration = self._duration(ended - began, self._read)
            self._time.took(key, ended, duration)
            if (counter := flight.counter) is not None:
                counter.add(min(duration, ended - flight.launched))
            return None if extents is None else Done(ticket.slot, extents, None, began, ended)
        finally:
            session.enqueuing.release()

    def start_measuring(self) -> None:
        """The worker's thread begins to wait for a work, which it also runs."""
        self._began = self._cpu_time()

    def duration(self, took: int) -> int:
        """How long that work ran of itself, which took so many nanoseconds; see `_duration`."""
        return self._duration(took, self._began)

    def learn(self, ticket: Ticket, duration: int) -> None:
        """The work of this ticket has ended on the worker's thread, and ran so many nanoseconds of itself."""
        self._time.learn((ticket.model, ticket.shapes), duration)

    def _duration(self, took: int, cpu: int) -> int:
        """How long a run took of itself: `took` may have waits for the GIL, and for the core while other programs had it.

        Under load those are longer than short models are. CPU time since `cpu` has none of them, and hardly anything else than
        the run; other threads that worked on the run took no more of it than this one.
        """
        return took if took <= BOUND else min(took, (self._cpu_time() - cpu) * self._partition.size)

    def _enqueue(self, ticket: Ticket) -> InFlight | None:
        """Put it on the partition's stream; None if it could not run at once, or if that fails, for the worker to report."""
        session = self._session
        if session.roles.stopped or self._in_flight or session.deferred.count or self._cancellations.refusal(ticket):
            return None
        try:
            if not self._attached:
                self._attach()
            executor: Any = self._executors[ticket.model]
            if not self._partition.idle or (self._prepares(executor) and executor.preparing(ticket.shapes) is not None):
                return None
            flight = session.enqueue(executor, ticket)
            flight.counter = self._metering.counter(executor, ticket.model)
            return flight
        except Exception:
            return None

    def _attach(self) -> None:
        """Attach the event loop's thread, before its first run here. Raises what that raises, and is not tried again then."""
        try:
            self._partition.attach()
        except Exception as error:
            log.warning("the event loop runs no models of %r: %s", self._partition, error)
            self._session.link.tickets.run_now = None
            raise
        self._attached = True

    def _wait(self, flight: InFlight) -> tuple[Extent, ...] | None:
        """Run a work; None if it fails or was cancelled: the worker runs it again, and reports what it fails with."""
        slot = flight.ticket.slot
        self._in_flight[slot] = flight
        self._guard.begin(flight.work)
        try:
            return self._session.link.arena.slot(slot).store_outputs(flight.work.wait(), flight.room)
        except Exception:
            return None
        finally:
            self._guard.end()
            self._in_flight.pop(slot, None)
