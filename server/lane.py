"""The HTTP side of a tenant: holds each request from its decoded inputs to its completion.

A request owns a slot. Whatever ends its wait (the completion, its deadline, its client going away), its owner calls
`release`, which withdraws what still waits, stops what runs, and frees the slot once nothing touches its memory.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from .errors import DeadlineExceeded, Failed, QueueFull, RequestError, Unavailable
from .link import Link
from .pool import SlotPool
from .scheduler import Scheduler
from .slots import Slot
from .ticket import Done, Failure, ModelKey, Ticket

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """Requests waiting, in flight, and abandoned by their clients while in flight; and those refused so far."""

    waiting: int
    in_flight: int
    abandoned: int
    rejected: int


Heard = Callable[[Done | RequestError], None]
"""Told how a request ended, once: its completion, or Failed, Unavailable, or DeadlineExceeded, the latter at the deadline."""


@dataclass(slots=True)
class Pending:
    """A request whose inputs are in its slot; `ended` once nothing of it waits or runs, `heard` None once it was told."""

    slot: Slot
    ticket: Ticket
    heard: Heard | None
    timer: asyncio.TimerHandle | None = None
    ended: bool = False

    def tell(self, end: Done | RequestError) -> None:
        """Tell the owner how it ended, unless it knows."""
        heard, self.heard = self.heard, None
        if heard:
            heard(end)


class Control(Protocol):
    """What the HTTP side asks of the device side, apart from inferences; both are done at some later time."""

    def cancel(self, slot: int, serial: int) -> None:
        """Stop this ticket if that is possible; its completion still comes."""

    def retire(self, slot: int) -> None:
        """Let go of a slot's memory, then call `SlotPool.retired`."""


class Lane:
    """One tenant's way to its worker. Every method belongs to the event loop."""

    def __init__(self, name: str, scheduler: Scheduler, link: Link, control: Control) -> None:
        self.name = name
        self.slots = SlotPool(link.arena, control.retire)
        self.refusing = ""
        self._scheduler = scheduler
        self._link = link
        self._control = control
        self._serial = 0
        self._pending: dict[int, Pending] = {}
        self._abandoned: dict[int, Pending] = {}
        self._settling: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._gathered: list[Ticket] = []
        self._rejected = 0

    def __repr__(self) -> str:
        return f"<Lane {self.name} {self._scheduler!r}>"

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear completions on this event loop from now on."""
        loop.add_reader(self._link.completions.event, self._hear)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear no more."""
        loop.remove_reader(self._link.completions.event)

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
        except QueueFull:
            self._rejected += 1
            raise

    def admit(self) -> Slot:
        """Take a slot to decode a request into. Raises as `check` does."""
        self.check()
        return self.slots.acquire()

    def submit(
        self, slot: Slot, model: ModelKey, shapes: tuple[tuple[int, ...], ...], priority: int = 0, timeout: float | None = None
    ) -> "asyncio.Future[Done]":
        """As `begin`, for whoever would rather wait: the future gives the completion, or raises what `heard` is told."""
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self.begin(slot, model, shapes, partial(_resolve, future), priority, timeout)
        return future

    def begin(
        self,
        slot: Slot,
        model: ModelKey,
        shapes: tuple[tuple[int, ...], ...],
        heard: Heard,
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Queue a decoded request; `timeout` is in seconds from now. Raises QueueFull, BadRequest."""
        deadline = _NEVER if timeout is None else time.monotonic() + timeout
        self._serial += 1
        ticket = Ticket(slot.index, self._serial, model, shapes, deadline, slot.capacity)
        self._link.tickets.write(ticket)
        self._scheduler.add(ticket, priority)
        pending = self._pending[slot.index] = Pending(slot, ticket, heard)
        if timeout is not None:
            late = DeadlineExceeded("Request timeout expired")
            pending.timer = asyncio.get_running_loop().call_later(timeout, pending.tell, late)
        self._launch()

    def release(self, slot: Slot) -> None:
        """The owner is no longer interested: withdraw, stop or forget the request, and free its slot when that is safe."""
        pending = self._pending.pop(slot.index, None)
        if pending and pending.timer:
            pending.timer.cancel()
        if pending and not pending.ended and not self._scheduler.withdraw(slot.index):
            self._abandoned[slot.index] = pending
            self._control.cancel(slot.index, pending.ticket.serial)
        else:
            self.slots.release(slot)
            self._settle()

    def _hear(self) -> None:
        """Completions arrived."""
        for done in self._link.completions.take():
            self._end(done)
        self._launch()
        self._settle()

    def _end(self, done: Done) -> None:
        self._scheduler.finish(done.slot, None if done.failure else done.ended - done.began)
        self.slots.heard(done)
        if abandoned := self._abandoned.pop(done.slot, None):
            self.slots.release(abandoned.slot)
        else:
            pending = self._pending[done.slot]
            pending.ended = True
            pending.tell(done if done.failure is None else _error(done.failure))

    def empty(self) -> Awaitable[None]:
        """Wait until no request is left, and every one that was has been answered."""
        return self._settled(lambda: not self._all())

    def forgotten(self, model: ModelKey) -> Awaitable[None]:
        """Wait until no request for this model is left."""
        return self._settled(lambda: not any(pending.ticket.model == model for pending in self._all()))

    def _all(self) -> list[Pending]:
        return [*self._pending.values(), *self._abandoned.values()]

    def _launch(self) -> None:
        """Hand over what may run: at once if the worker has nothing to do, else together with what else comes in this turn."""
        idle = not self._scheduler.busy
        tickets = self._scheduler.take()
        if idle:
            self._link.tickets.put(tickets)
        elif tickets:
            if not self._gathered:
                asyncio.get_running_loop().call_soon(self._hand_over)
            self._gathered += tickets

    def _hand_over(self) -> None:
        tickets, self._gathered = self._gathered, []
        self._link.tickets.put(tickets)

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


def _resolve(future: "asyncio.Future[Done]", end: Done | RequestError) -> None:
    if future.done():
        return  # Its owner waits no more, and is about to release the slot.
    if isinstance(end, Done):
        future.set_result(end)
    else:
        future.set_exception(end)


def _error(failure: Failure) -> RequestError:
    if failure.kind == "expired":
        return DeadlineExceeded("Request timeout expired")
    if failure.kind == "lost":
        return Unavailable(f"the device is lost: {failure.text}")
    return Failed(f"the model raised: {failure.text}")
