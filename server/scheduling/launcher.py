"""Launches a lane's requests: on this thread where the device side can run them there, else by the ring, several at a time."""

import asyncio
import math
import time
from collections.abc import Callable

from ..link.messages import Done, Ticket
from ..link.ring import Tickets
from .batch_runs import BatchRuns
from .scheduler import Scheduler

PATIENCE = 100_000
"""Nanoseconds to stay awake after an answer. Some 40 us pass before a client on the same machine has asked again."""
_LONGEST = 8 * PATIENCE
"""A longer pause counts as one of this length."""
_SHARE = 3
"""Each pause counts for 1 / 2**3 of the average: a single long one ends it, half a dozen short ones begin it again."""


class BatchTimer:
    """Calls `launch` at one time, on the clock of `time.monotonic`. Belongs to the event loop."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch = launch
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        """Whether a time is set, and has not been reached."""
        return self._timer is not None

    def set(self, due: float | None) -> None:
        """Call at this time, instead of any that was set before; None: not at all."""
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if due is not None:  # Event loops count in whole milliseconds.
            delay = math.ceil((due - time.monotonic()) * 1000) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._launch()


def _call_soon(function: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(function)


class Awake:
    """Of one lane whose short models run on the event loop; belongs to that. `clock` is in nanoseconds.

    Problem: a client that asks again as soon as it has its answer lets the core sleep in between. To wake the core of a virtual
    machine takes longer than a short model, and its caches are cold then. Solution: while pauses are shorter than PATIENCE on
    average, the event loop looks for requests, of all connections, instead of sleeping, for PATIENCE at most. It runs whatever
    else it has to run, and other threads get the GIL and the core as always. So this costs a tenant whose requests come further
    apart nothing, and others a part of the time in which their core would be idle.
    """

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], object] = _call_soon, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._call_soon = call_soon
        self._clock = clock
        self._pause = _LONGEST
        self._answered = 0
        self._looking = False

    def __repr__(self) -> str:
        return f"<Awake {'looking' if self._looking else 'resting'}, pauses of {self._pause // 1000} us>"

    def arrived(self) -> None:
        """A request has come."""
        if self._answered:
            pause = min(self._clock() - self._answered, _LONGEST)
            self._pause += (pause - self._pause) >> _SHARE
            self._answered = 0

    def answered(self) -> None:
        """All requests are answered, and nothing is in flight."""
        self._answered = self._clock()
        if self._pause < PATIENCE and not self._looking:
            self._looking = True
            self._call_soon(self._look)

    def _look(self) -> None:
        """Called once in each iteration of the event loop, which does not sleep before the next."""
        if self._answered and self._clock() - self._answered < PATIENCE:
            self._call_soon(self._look)
        else:
            self._looking = False


class Launcher:
    """Of one lane; belongs to the event loop.

    `tickets` are those of the lane's current link, and `end` is called with the completions of what ran on this thread.
    """

    def __init__(self, scheduler: Scheduler, batches: BatchRuns, tickets: Tickets, end: Callable[[Done], None]) -> None:
        self.tickets = tickets
        self._scheduler = scheduler
        self._batches = batches
        self._end = end
        self._batch_timer = BatchTimer(self.launch)
        self._awake = Awake()
        self._scheduled = False

    def launch(self, new: bool = False) -> None:
        """Send or run what may run: at once if the worker is idle, else together with what else comes in this loop iteration.

        What may run on this thread waits for the iteration's other `new` requests: so each step of them is done for all in a
        row, with its code in the processor's caches, and batches form.
        """
        if new:
            self._awake.arrived()
        if not self._scheduler.launches:
            return
        if self._scheduler.busy or (new and self.tickets.run_now is not None):
            self._launch_soon()
        else:
            self._launch_now()

    def close(self) -> None:
        """Cancel the timer."""
        self._batch_timer.set(None)

    def _run_or_put(self, tickets: list[Ticket]) -> bool:
        """Run these tickets, the only ones in flight, one after the other, and then call `end` with each completion.

        The first that cannot run now is put, and all behind it. Returns whether nothing is left to launch: some were put, or
        all requests are answered.
        """
        run_now = self.tickets.run_now
        ran = 0
        ended: list[Done] = []
        if run_now is not None:
            for ticket in tickets:
                done = run_now(ticket)
                if done is None:
                    break
                ran += 1
                ended.append(done)
            for done in ended:
                self._scheduler.finish(done.slot, done.ended - done.began)
            for done in ended:
                self._end(done)
            if ended and self._scheduler.idle:
                self._awake.answered()
                return True
        left = tickets[ran:] if ran else tickets
        if left:
            self.tickets.put(left)
        return bool(left)

    def _launch_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._launch_now)

    def _launch_now(self) -> None:
        self._scheduled = False
        while not self._scheduler.busy:
            tickets = self._take()
            if not tickets or self._run_or_put(tickets):
                return
        self.tickets.put(self._take())

    def _take(self) -> list[Ticket]:
        """The tickets to launch now; they count as in flight from now on."""
        if not self._scheduler.batchable:
            return self._scheduler.take()
        tickets, now = [], time.monotonic()
        while (choice := self._scheduler.choose(now)).members:
            tickets.append(self._batches.launch(choice))
        self._batch_timer.set(choice.due)
        return tickets
