"""The device side of a tenant: tickets in, completions out, on one or two threads of one partition.

What the threads do is `TicketRunner`'s; what happens to them and to the models, partitions and requests meanwhile is here.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from threading import Semaphore, Thread

from engines import Executor
from partitions import DeviceLost

from ..accounts.meter import Meter, Place
from ..launch_loop.loop import LaunchLoop, open_loop
from ..link.messages import Failure, ModelKey
from .gil_priority import GilPriorities
from .narrow import NarrowPlacement
from .pace import Pace
from .placement import Placement, SidePlacement
from .session import EXPIRED, WITHDRAWN, Cancellations, Endpoint, Metering, Session
from .stretching import Measured
from .ticket_runner import BUNDLE, TicketRunner
from .wide import WidePlacement


def _ignore(_: Exception) -> None:
    """The default for `on_error`."""


class Worker:
    """Runs tickets on its `home`, in order, from `serve` to `halt`; the next worker on the link continues where it stopped.

    Both callbacks run on a thread of the worker: `on_lost` when the device is lost, `on_error` when a thread ends with another
    error; then the worker stops, and may `serve` again. `priorities` are shared by all workers of the process, and
    `meter` by all workers of the tenant.
    """

    def __init__(
        self,
        home: Placement,
        on_lost: Callable[[DeviceLost], None],
        priorities: GilPriorities,
        on_error: Callable[[Exception], None] = _ignore,
        meter: Meter | None = None,
    ) -> None:
        self.home = home
        self.partition = partition = home.partition
        self.executors = home.executors
        self._wide: WidePlacement | None = None
        self._narrow: NarrowPlacement | None = None
        self._pace: Pace | None = None
        self.metering = Metering(meter or Meter(), Place(partition.size), partition.host_cores is not None)
        self._on_lost = on_lost
        self._on_error = on_error
        self._priorities = priorities
        self._endpoint: Endpoint | None = None
        self.runner: TicketRunner | None = None
        """Of the link that it serves."""
        self._threads: list[Thread] = []
        self._ending: list[Thread] = []
        """Those that have ended, or are parked and end once their gate is released."""
        self._gates = Semaphore(0), Semaphore(0)
        """Of the first of these threads, and of the second, which goes on parked behind it."""
        self._attached = Semaphore(0)
        self._unattached: list[Exception] = []
        """Why threads could not be attached to the partition."""
        self._ready: TicketRunner | None = None
        """Of the link that this worker is to serve next."""
        self._cancellations = Cancellations()

    def __repr__(self) -> str:
        state = "running" if self.runner else "not running"
        return f"<Worker {len(self.executors)} models on {self.partition!r}, {state}>"

    @property
    def idle(self) -> bool:
        """Whether no inference runs or waits in this worker now. Any thread."""
        runner = self.runner
        return runner is None or not (runner.in_flight or runner.session.deferred.count or runner.session.has_work)

    @property
    def wide(self) -> WidePlacement | None:
        """The wide partition and what runs there, None if there is none. Set while nothing is in flight there."""
        return self._wide

    @wide.setter
    def wide(self, wide: WidePlacement | None) -> None:
        self._wide = wide
        self._have_threads_follow()

    @property
    def narrow(self) -> NarrowPlacement | None:
        """The narrow placement and what runs there, None if there is none. Set while nothing is in flight there."""
        return self._narrow

    @narrow.setter
    def narrow(self, narrow: NarrowPlacement | None) -> None:
        self._narrow = narrow
        self._have_threads_follow()

    def _have_threads_follow(self) -> None:
        if runner := self.runner:
            runner.wide, runner.narrow, runner.pace = self._wide, self._narrow, self._pace
            runner.session.link.tickets.wake()  # A ticket may wait for what was there before.

    def resume(self, placement: SidePlacement) -> None:
        """Let works go to the wide or narrow placement from now on; `revoke` first if a model has come to be ready there."""
        placement.resume()
        if (runner := self.runner) and (loop := runner.session.loop):
            self._use_placements(loop)
            loop.wake()

    def _use_placements(self, loop: LaunchLoop) -> None:
        """Have the launch loop use those that are not suspended, from its next run on."""
        wide, narrow = self._wide, self._narrow
        loop.use(
            wide.shared if wide and not wide.suspended else None, narrow.shared if narrow and not narrow.suspended else None
        )

    @property
    def pace(self) -> Pace | None:
        """What keeps the tenant to its shares of PCIe and memory, None without any. May be set at any time."""
        return self._pace

    @pace.setter
    def pace(self, pace: Pace | None) -> None:
        before, self._pace = self._pace, pace
        if (pace or before) and (runner := self.runner):
            if loop := runner.session.loop:
                loop.use_pace(pace.shared if pace else None)
                loop.wake()
            self._have_threads_follow()

    def too_long(self) -> list[Measured]:
        """As `WidePlacement.too_long`, with what the launch loop has measured. Any thread."""
        if (wide := self.wide) is None:
            return []
        loop = self.runner.session.loop if self.runner else None
        return wide.too_long([Measured(*each) for each in loop.times()] if loop else [])

    def revoke(self) -> None:
        """Have the launch loop forget all that it knows, and use no placement that is suspended. Blocks until it has."""
        if (runner := self.runner) and (loop := runner.session.loop):
            self._use_placements(loop)
            loop.revoke()

    def warm_up(self) -> None:
        """Start the threads, which wait until `serve` is called: that takes less time then. Blocks for about a millisecond.

        Raises RuntimeError if there can be no more threads.
        """
        if not self._threads:
            before, self._gates = self._gates, (Semaphore(0), Semaphore(0))
            for gate in before:  # One of `_ending` may be parked there.
                gate.release()
            self._attached, self._unattached = Semaphore(0), []
            self._ending = [thread for thread in self._ending if thread.is_alive()]
        for second in range(len(self._threads), 1 if self.partition.host_cores is not None else 2):
            name = f"worker {self.partition!r}{', second' * second}"
            thread = Thread(target=self._run, args=(self._gates[second],), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def take_over(self, endpoint: Endpoint, before: "Worker") -> None:
        """Have ready what `serve` needs to go on where the worker stops that serves this link now, and graphs for the tickets
        that its launch loop runs, so that the interpreter has nothing to do for the first ones. Blocks, and delays nothing of
        the other worker. Raises RuntimeError if there can be no more threads.
        """
        if (running := before.runner) is None or running.session.link is not endpoint.link:
            return
        ready = self._make_runner(endpoint)
        if (mine := ready.session.loop) and (loop := running.session.loop):
            for known in loop.known:
                if executor := self.executors.get(known.model):
                    counter, narrow = self.metering.counter(executor, known.model), self.metering.twin(self.narrow, known.model)
                    mine.take_over(known, executor, counter, narrow)
        self._ready = ready

    def serve(self, endpoint: Endpoint) -> None:
        """Have the threads run the tickets of this link."""
        if endpoint is not self._endpoint:  # Serials start again at 1 with each link.
            self._cancellations.by_slot = {}
        self._endpoint, self._cancellations.abandoned = endpoint, None
        endpoint.link.tickets.open()
        endpoint.link.completions.set_on_host_cores(self.partition.host_cores is not None)
        if self._ready and self._ready.session.link is not endpoint.link:
            self._drop_ready()
        runner, self._ready = self._ready or self._make_runner(endpoint), None
        session = runner.session
        if loop := session.loop:
            self._use_placements(loop)
            loop.use_pace(self.pace.shared if self.pace else None)
        runner.wide, runner.narrow, runner.pace = self.wide, self.narrow, self.pace
        self.runner = runner
        runner.open()
        if session.deferred.count or endpoint.link.tickets.waiting():
            endpoint.link.tickets.wake()  # The previous worker consumed the wake-ups for these tickets.
        self._gates[0].release()

    def _make_runner(self, endpoint: Endpoint) -> TicketRunner:
        """A runner for this link, and the threads for it. Raises RuntimeError if there can be no more threads."""
        self.warm_up()
        loop, parking = None, None
        if self.partition.host_cores is None:
            loop = open_loop(endpoint.link, BUNDLE, EXPIRED, WITHDRAWN, self._cancellations.by_slot)
            parking = self._gates[1]
        session = Session(endpoint, self._priorities.make(endpoint.link.tickets.waiting), parking, loop)
        return TicketRunner(
            session,
            self.partition,
            self.executors,
            self._cancellations,
            self.metering,
            self._priorities,
            self._on_lost,
            self._on_error,
        )

    def _drop_ready(self) -> None:
        ready, self._ready = self._ready, None
        if ready and (loop := ready.session.loop):
            loop.close()

    def abandon(self, reason: Failure = WITHDRAWN) -> None:
        """Cancel what is in flight and start nothing more; all of it fails with this reason. Does not block. Any thread."""
        self._cancellations.abandoned = reason
        if runner := self.runner:
            for flight in list(runner.in_flight.values()):
                flight.work.cancel()
            runner.session.deferred.wake()
            if loop := runner.session.loop:
                loop.wake()

    @property
    def oldest(self) -> int | None:
        """The serial of the oldest work in flight, None if there is none. Any thread."""
        runner = self.runner
        if runner is None:
            return None
        flights, loop = list(runner.in_flight.values()), runner.session.loop
        return flights[0].ticket.serial if flights else loop.oldest if loop else None

    def overrun(self, serial: int, reason: Failure) -> None:
        """Cancel the work with this serial, if it is in flight; it then fails with this reason. Any thread."""
        runner = self.runner
        for flight in list(runner.in_flight.values()) if runner else ():
            if flight.ticket.serial == serial:
                self._cancellations.overrun = serial, reason
                flight.work.cancel()

    def wait_until_started(self) -> bool:
        """Whether it serves, with all threads attached to the partition. Blocks until each is, or has failed."""
        for _ in self._threads:
            self._attached.acquire()
        return self.runner is not None and not self._unattached

    def stop(self) -> "Future[None]":
        """Begin to halt, without blocking; call `halt`, or first `hand_over`, when the future is done."""
        if runner := self.runner:
            runner.session.roles.stop()
            return runner.session.ended
        ended: Future[None] = Future()
        ended.set_result(None)
        return ended

    def halt(self) -> None:
        """Start nothing more, and wait for what is in flight. Blocks. Deferred tickets are left to the next worker."""
        self.stop().result()
        self.hand_over()
        self._drop_ready()
        for gate in self._gates:  # For threads that are parked, or have not served.
            gate.release()
        for thread in (*self._ending, *self._threads):
            thread.join()
        self._ending, self._threads = [], []

    def hand_over(self) -> None:
        """Leave the link to the worker that serves it next; `halt` ends the threads, later. The future of `stop` is done."""
        if runner := self.runner:
            session = runner.session
            runner.close()
            self._ending += self._threads
            self._threads, self.runner = [], None
            if session.loop:
                session.loop.close()
            session.link.tickets.give_back(session.deferred.close())

    def cancel(self, slot: int, serial: int) -> None:
        """Cancel this ticket if it is still here; its completion is reported all the same. Does not block. Any thread."""
        self._cancellations.by_slot[slot] = serial
        if (runner := self.runner) is None:
            return
        if loop := runner.session.loop:
            loop.cancel(slot, serial)
        flight = runner.in_flight.get(slot)
        if flight and flight.ticket.serial == serial:
            flight.work.cancel()
        else:
            runner.session.deferred.wake()

    def exchange(self, model: ModelKey, other: Executor) -> Executor | None:
        """Run this model's tickets by another executor from now on, and return the one before, of which nothing is in flight.

        None, and nothing changes, if a work of it is in flight. What the launch loop runs does not count: closing the executor
        waits for that. Blocks while tickets are being enqueued. Any thread.
        """
        runner = self.runner
        with runner.session.enqueuing if runner else nullcontext():
            executor = self.executors[model]
            names = [name for name, each in self.executors.items() if each is executor]
            if runner and any(flight.ticket.model in names for flight in list(runner.in_flight.values())):
                return None
            self.executors.update(dict.fromkeys(names, other))
        return executor

    def retire(self) -> None:
        """Halt; executors and partition stay open, for another worker. Blocks."""
        self.halt()
        for placement in (self.wide, self.narrow):
            if placement:
                placement.close()
        self.wide = self.narrow = None

    def close(self) -> None:
        """Halt, then close executors and partition. Blocks. Failures are logged."""
        self.retire()
        self.home.close()

    def trim(self, after: float) -> None:
        """Have executors free memory unused for `after` seconds. Blocks; not while an executor is being closed."""
        idle = self.idle
        for executor in list(self.executors.values()):
            if (trim := getattr(executor, "trim", None)) is not None:
                trim(after, idle)

    def _run(self, gate: Semaphore) -> None:
        """A thread: wait for `serve`, or for `halt` without it; the second one until it is parked no more."""
        failed: Exception | None = None
        try:
            self.partition.attach()
        except Exception as error:
            failed = error
            self._unattached.append(error)
        self._attached.release()
        gate.acquire()
        if (runner := self.runner) and gate in self._gates:
            runner.run(failed)
