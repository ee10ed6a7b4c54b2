"""The event-loop side of a tenant: holds each request from its decoded inputs to its completion.

A request owns a slot. Whatever ends its wait (the completion, its deadline, its client going away), its owner calls
`release`, which withdraws what still waits, stops what runs, and frees the slot once nothing touches its memory.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .errors import DeadlineExceeded, Failed, RequestError, Unavailable
from .scheduler import Scheduler
from .slots import Slot, SlotPool
from .ticket import Done, Failure, ModelKey, Ticket
from .worker import Worker


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """Requests waiting, in flight, and abandoned by their clients while in flight; and those refused so far."""

    waiting: int
    in_flight: int
    abandoned: int
    rejected: int


@dataclass(slots=True)
class Pending:
    """A request whose inputs are in its slot; `ended` once nothing of it waits or runs."""

    slot: Slot
    ticket: Ticket
    answer: "asyncio.Future[Done]"
    timer: asyncio.TimerHandle | None = None
    ended: bool = False


class Lane:
    """One tenant's way to its worker. Every method belongs to the event loop."""

    def __init__(self, name: str, scheduler: Scheduler, slots: SlotPool) -> None:
        self.name = name
        self.slots = slots
        self.refusing = ""
        self._scheduler = scheduler
        self._worker: Worker | None = None
        self._pending: dict[int, Pending] = {}
        self._abandoned: dict[int, Pending] = {}
        self._settling: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._rejected = 0

    def __repr__(self) -> str:
        return f"<Lane {self.name} {self._scheduler!r}, {self._worker!r}>"

    def statistics(self) -> LaneStatistics:
        scheduler = self._scheduler.statistics()
        return LaneStatistics(scheduler.waiting, scheduler.in_flight, len(self._abandoned), self._rejected)

    def backlog(self) -> Counter[ModelKey]:
        """How many requests for each model wait for their turn."""
        begun = self._scheduler.in_flight
        return Counter(p.ticket.model for p in self._pending.values() if not p.ended and p.slot.index not in begun)

    def check(self) -> None:
        """Raise QueueFull, or Unavailable while draining, if a request that came now would be refused."""
        if self.refusing:
            raise Unavailable(self.refusing)
        try:
            self._scheduler.check()
        except RequestError:
            self._rejected += 1
            raise

    def admit(self) -> Slot:
        """Take a slot to decode a request into. Raises as `check` does."""
        self.check()
        return self.slots.acquire()

    def submit(
        self, slot: Slot, model: ModelKey, shapes: tuple[tuple[int, ...], ...], priority: int = 0, timeout: float | None = None
    ) -> "asyncio.Future[Done]":
        """Queue a decoded request; `timeout` is in seconds from now. Raises QueueFull.

        The future gives the completion, or raises Failed or DeadlineExceeded, the latter at the deadline.
        """
        loop = asyncio.get_running_loop()
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        pending = Pending(slot, Ticket(slot.index, model, shapes, deadline), loop.create_future())
        self._scheduler.add(pending.ticket, priority)
        self._pending[slot.index] = pending
        if timeout is not None:
            pending.timer = loop.call_later(timeout, _expire, pending.answer)
        self._launch()
        return pending.answer

    def release(self, slot: Slot) -> None:
        """The owner is no longer interested: withdraw, stop or forget the request, and free its slot when that is safe."""
        pending = self._pending.pop(slot.index, None)
        if pending and pending.timer:
            pending.timer.cancel()
        if pending and not pending.ended and not self._scheduler.withdraw(slot.index):
            self._abandoned[slot.index] = pending
            self._running.cancel(slot.index)
        else:
            self.slots.release(slot)
            self._settle()

    def hear(self, done: Done) -> None:
        """A completion arrived from the worker."""
        self._scheduler.finish(done.slot, None if done.failure else done.ended - done.began)
        self._launch()
        if abandoned := self._abandoned.pop(done.slot, None):
            self.slots.release(abandoned.slot)
        else:
            pending = self._pending[done.slot]
            pending.ended = True
            _resolve(pending.answer, done)
        self._settle()

    def pause(self) -> None:
        """Launch nothing more until `resume`; requests are still taken and wait."""
        self._scheduler.paused = True

    def resume(self) -> None:
        """Launch what waits."""
        self._scheduler.paused = False
        self._launch()

    def swap(self, worker: Worker) -> Worker | None:
        """Launch on this worker from now on, and return the one before. Nothing may be in flight."""
        if self._scheduler.in_flight:
            raise RuntimeError(f"{self!r} has work in flight and cannot change its worker")
        before, self._worker = self._worker, worker
        return before

    def quiet(self) -> Awaitable[None]:
        """Wait until nothing is in flight."""
        return self._settled(lambda: not self._scheduler.in_flight)

    def empty(self) -> Awaitable[None]:
        """Wait until no request is left, and every one that was has been answered."""
        return self._settled(lambda: not self._all())

    def forgotten(self, model: ModelKey) -> Awaitable[None]:
        """Wait until no request for this model is left."""
        return self._settled(lambda: not any(pending.ticket.model == model for pending in self._all()))

    def _all(self) -> list[Pending]:
        return [*self._pending.values(), *self._abandoned.values()]

    @property
    def _running(self) -> Worker:
        if self._worker is None:
            raise Unavailable(f"tenant {self.name!r} has no partition yet")
        return self._worker

    def _launch(self) -> None:
        for ticket in self._scheduler.take():
            self._running.submit(ticket)

    async def _settled(self, condition: Callable[[], bool]) -> None:
        if not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._settling.append((condition, waiter))
            await waiter

    def _settle(self) -> None:
        if not self._settling:
            return
        waiting, self._settling = self._settling, []
        for condition, waiter in waiting:
            if not condition():
                self._settling.append((condition, waiter))
            elif not waiter.done():
                waiter.set_result(None)


def _expire(answer: "asyncio.Future[Done]") -> None:
    if not answer.done():
        answer.set_exception(DeadlineExceeded("Request timeout expired"))


def _resolve(answer: "asyncio.Future[Done]", done: Done) -> None:
    if answer.done():
        return  # Its deadline passed, or its client left; its owner is about to release the slot.
    if done.failure is None:
        answer.set_result(done)
    else:
        answer.set_exception(_error(done.failure))


def _error(failure: Failure) -> RequestError:
    if failure.kind == "expired":
        return DeadlineExceeded("Request timeout expired")
    return Failed(f"the model raised: {failure.text}")
