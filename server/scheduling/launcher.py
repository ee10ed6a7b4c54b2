"""Launches a lane's requests: on this thread where the device side can run them there, else by the ring, several at a time."""

import asyncio
import time
from collections.abc import Callable

from ..link.messages import Done, Ticket
from ..link.ring import Tickets
from .awake import Awake
from .batch_runs import BatchRuns
from .batch_timer import BatchTimer
from .scheduler import Scheduler


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
        self._collected: list[Ticket] = []
        self._flush_scheduled = False

    def __repr__(self) -> str:
        return f"<Launcher {len(self._collected)} collected, {self._batch_timer!r}>"

    def launch(self, new: bool = False) -> None:
        """Send or run what may run: at once if the worker is idle, else together with what else comes in this loop iteration.

        What may run on this thread waits for the iteration's other `new` requests: so each step of them is done for all in a
        row, with its code in the processor's caches, and batches form.
        """
        if new:
            self._awake.arrived()
        while not self._scheduler.busy:
            if new and self.tickets.run_now is not None:
                self._flush_soon()
                return
            tickets = self._choose() if self._scheduler.batchable else self._scheduler.take()
            if not tickets or self._run_or_put(tickets):
                return
        if self._scheduler.batchable:
            self._flush_soon()
        elif tickets := self._scheduler.take():
            self._collected += tickets
            self._flush_soon()

    def forget(self) -> None:
        """Put nothing that was collected: its requests have ended."""
        self._collected = []

    def close(self) -> None:
        """Cancel the timer."""
        self._batch_timer.set(None)

    def _run_or_put(self, tickets: list[Ticket]) -> bool:
        """Run these tickets, the only ones in flight, one after the other, and then call `end` with each completion.

        The first that cannot run now is put, and all behind it. Returns whether any was put.
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
        left = tickets[ran:] if ran else tickets
        self.tickets.put(left)
        return bool(left)

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        tickets, self._collected, self._flush_scheduled = self._collected, [], False
        if not self._scheduler.busy:
            self.launch()
            return
        if self._scheduler.batchable:
            tickets += self._choose()
        self.tickets.put(tickets)

    def _choose(self) -> list[Ticket]:
        """As `Scheduler.take`, if some requests can be batched."""
        tickets, now = [], time.monotonic()
        while (choice := self._scheduler.choose(now)).members:
            tickets.append(self._batches.launch(choice))
        self._batch_timer.set(choice.due)
        return tickets
