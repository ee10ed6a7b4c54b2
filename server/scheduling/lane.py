"""The HTTP side of a tenant: holds each request from its decoded inputs to its completion.

A request owns a slot. Whatever ends its wait (the completion, its deadline, its client going away), its owner calls
`release`, which withdraws what still waits, stops what runs, and frees the slot once nothing touches its memory.

Requests that run together do so in a slot more, which their inputs are copied to and their outputs are read from. It is
free when the work has ended and the last of them was released; the work is stopped when all were released before.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from engines import TensorMismatch

from ..config.tables import dotted
from ..errors import DeadlineExceeded, Failed, Outgrown, QueueFull, RequestError, Unavailable
from ..link.messages import Done, Failure, ModelKey, Ticket
from ..link.ring import Link
from ..link.slots import Slot
from .batching import Batching, Choice, Queued
from .deadlines import Deadlines
from .gather import gather, split
from .pending import OnDone, PendingBatch, PendingRequest
from .queue_policy import QueueLimits, QueuePolicy
from .scheduler import Scheduler
from .slot_pool import SlotPool

log = logging.getLogger("greenlane.lane")


class LaneStatistics(NamedTuple):
    """Requests waiting, in flight, and abandoned by their clients; and so far those that were refused for want of room, those
    whose timeout passed, and those that were wrong themselves.
    """

    waiting: int
    in_flight: int
    abandoned: int
    rejected: int
    expired: int = 0
    invalid: int = 0


class Canceller(Protocol):
    """What the HTTP side asks of the device side, apart from inferences; it is done at some later time."""

    def cancel(self, slot: int, serial: int) -> None:
        """Stop this ticket if that is possible; its completion still comes."""


class Lane:
    """One tenant's way to its worker. Every method belongs to the event loop."""

    def __init__(self, name: str, scheduler: Scheduler, link: Link, control: Canceller) -> None:
        self.name = name
        self.slots = SlotPool(link.arena, dotted(("tenants", name, "memory")))
        self.deadlines = Deadlines()
        self.refusing = self.suspended = ""
        self._scheduler = scheduler
        self._link = link
        self._control = control
        self._pending: dict[int, PendingRequest] = {}
        self._abandoned: dict[int, PendingRequest] = {}
        self._joints: dict[int, PendingBatch] = {}
        self._unjoinable: set[ModelKey] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._settling: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._gathered: list[Ticket] = []
        self._handing_over = False
        self._serial = self._rejected = self._expired = self._invalid = 0

    def __repr__(self) -> str:
        return f"<Lane {self.name} {self._scheduler!r}>"

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear completions on this event loop from now on."""
        loop.add_reader(self._link.completions.event, self._hear)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear no more."""
        self._wake_at(None)
        self.deadlines.close()
        loop.remove_reader(self._link.completions.event)

    def statistics(self) -> LaneStatistics:
        scheduler = self._scheduler.statistics()
        abandoned = len(self._abandoned) + sum(len(joint.members) - len(joint.left) for joint in self._joints.values())
        refused = (self._rejected, self._expired, self._invalid)
        return LaneStatistics(scheduler.waiting, scheduler.in_flight, abandoned, *refused)

    def backlog(self) -> Counter[ModelKey]:
        """How many requests for each model wait for their turn."""
        begun = self._scheduler.in_flight
        waiting = [p for p in self._pending.values() if not p.ended and not p.joint and p.slot.index not in begun]
        return Counter(pending.ticket.model for pending in waiting)

    def check(self) -> None:
        """Raise QueueFull, or Unavailable while draining, if a request that came now would be refused.

        Those whose deadline has passed are told before.
        """
        self.deadlines.look()
        if self.refusing:
            raise Unavailable(self.refusing)
        try:
            self._scheduler.check()
        except QueueFull:
            self._rejected += 1
            raise

    def suspend(self, reason: str) -> None:
        """Refuse new requests for this reason, and tell it those that wait or run; with "" take new ones again.

        What is refused for good (`refusing`) stays so.
        """
        if self.refusing == self.suspended:
            self.refusing = reason
        self.suspended = reason
        for pending in list(self._pending.values()) if reason else ():
            pending.tell(Unavailable(reason))

    def expire(self, timeout: float) -> DeadlineExceeded:
        """Count a request that so many seconds were not enough for; what to tell its owner."""
        self._expired += 1
        return DeadlineExceeded(f"Request timeout expired: {timeout * 1e6:.0f} microseconds (parameters.timeout) passed")

    def count_invalid(self) -> None:
        """Count a request that was wrong itself, such as one that is no JSON: that is no failure of its model."""
        self._invalid += 1

    def reject(self, text: str) -> QueueFull:
        """Count a request that there is no room for; what to tell its owner."""
        self._rejected += 1
        return QueueFull(text)

    def admit(self) -> Slot:
        """Take a slot to decode a request into. Raises as `check` does."""
        self.check()
        return self.slots.acquire()

    def submit(
        self,
        slot: Slot,
        model: ModelKey,
        shapes: tuple[tuple[int, ...], ...],
        priority: int = 0,
        timeout: float | None = None,
        batching: Batching | None = None,
    ) -> "asyncio.Future[Done]":
        """As `begin`, for whoever would rather wait: the future gives the completion, or raises what `heard` is told."""
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self.begin(slot, model, shapes, partial(_resolve, future), priority, timeout, batching)
        return future

    def begin(
        self,
        slot: Slot,
        model: ModelKey,
        shapes: tuple[tuple[int, ...], ...],
        heard: OnDone,
        priority: int = 0,
        timeout: float | None = None,
        batching: Batching | None = None,
        queues: QueuePolicy | None = None,
    ) -> None:
        """Queue a decoded request, with `batching` to be joined with others; `timeout` is in seconds from now.

        Outputs of one that was joined, whose completion has `rows`, lie in the completion's slot instead of its own. A request
        told Outgrown may begin again, with a larger block. Raises QueueFull, BadRequest, and Unavailable for full `queues`.
        """
        if queues is not None:
            priority = self._check_queue(model, queues.priority(priority), queues)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._serial += 1
        ticket = Ticket(slot.index, self._serial, model, shapes, deadline, slot.capacity, slot.start)
        self._link.tickets.write(ticket)
        part = None
        if batching and not self._scheduler.idle and model not in self._unjoinable:  # An idle one launches it at once.
            part = batching.part(ticket, time.monotonic())
        self._scheduler.add(ticket, priority, part)
        pending = self._pending[slot.index] = PendingRequest(slot, ticket, heard)
        if timeout is not None:
            pending.timeout = timeout
            self.deadlines.add(deadline, ticket.serial, partial(self._expire, pending))
        if queues is not None and (limits := queues.of(priority)).timeout:
            pending.patience = time.monotonic() + limits.timeout
            self.deadlines.add(pending.patience, -ticket.serial, partial(self._tire, pending, limits))
        self._launch()

    def release(self, slot: Slot) -> None:
        """The owner is no longer interested: withdraw, stop or forget the request, and free its slot when that is safe."""
        pending = self._pending.pop(slot.index, None)
        if pending and (pending.timeout < math.inf or pending.patience < math.inf):
            self.deadlines.remove(pending.ticket.deadline, pending.ticket.serial)
            self.deadlines.remove(pending.patience, -pending.ticket.serial)
        if pending and pending.joint:
            self._leave(pending.joint, slot)  # Its own memory is not what runs.
        elif pending and not pending.ended and not self._scheduler.withdraw(slot.index):
            self._abandoned[slot.index] = pending
            self._control.cancel(slot.index, pending.ticket.serial)
            return
        self.slots.release(slot)
        self._settle()

    def _leave(self, joint: PendingBatch, slot: Slot) -> None:
        joint.left.remove(slot.index)
        if joint.left:
            return
        if joint.ended:
            self.slots.release(joint.slot)
        else:
            self._control.cancel(joint.slot.index, joint.ticket.serial)

    def _hear(self) -> None:
        """Completions arrived."""
        ended = self._link.completions.take()
        self._scheduler.deferred = self._link.completions.deferred()
        self._scheduler.on_host_cores = self._link.completions.on_host_cores()
        for done in ended:
            self._scheduler.finish(done.slot, None if done.failure else done.ended - done.began)
        if self._scheduler.batchable:
            self._launch()  # The answers of many take their time, in which the next may run.
        for done in ended:
            self.deadlines.look()
            self._end(done)
        self._launch()
        self._settle()

    def _end(self, done: Done) -> None:
        if abandoned := self._abandoned.pop(done.slot, None):
            self.slots.release(abandoned.slot)
        elif joint := self._joints.pop(done.slot, None):
            self._end_joint(joint, done)
        else:
            self._told(self._pending[done.slot], done)

    def _told(self, pending: PendingRequest, done: Done) -> None:
        pending.ended = True
        if done.failure and done.failure.kind == "expired":
            self._expire(pending)
        else:
            pending.tell(done if done.failure is None else _error(done.failure))

    def _expire(self, pending: PendingRequest) -> None:
        """Its time is over, whichever side saw that first."""
        if pending.heard:
            pending.tell(self.expire(pending.timeout))

    def _check_queue(self, model: ModelKey, priority: int, queues: QueuePolicy) -> int:
        """The priority. Raises Unavailable if as many requests wait for the model as may."""
        limits = queues.of(priority)
        if limits.size and self._scheduler.queued(model, priority if queues.levels else None) >= limits.size:
            self._rejected += 1
            raise Unavailable(limits.full)
        return priority

    def _tire(self, pending: PendingRequest, limits: QueueLimits) -> None:
        """It has waited for its turn as long as requests for its model may; one that has had it goes on."""
        if pending.heard and self._scheduler.waits(pending.slot.index):
            self._expired += 1
            pending.tell(Unavailable(limits.over))

    def _end_joint(self, joint: PendingBatch, done: Done) -> None:
        joint.ended = True
        if not joint.left:
            self.slots.release(joint.slot)
        elif done.failure and done.failure.kind in ("raised", "outgrown", "overrun"):
            self._part(joint)
        else:
            self._share(joint, done)

    def _share(self, joint: PendingBatch, done: Done) -> None:
        """Tell each who is left of its rows."""
        rows = [ticket.shapes[0][0] for _, _, ticket, _ in joint.members]
        try:
            shares = [()] * len(rows) if done.failure else split(done.outputs, rows, joint.batching.signature, joint.slot)
        except ValueError as error:
            log.warning("model %s: requests are not joined any more: %s", joint.ticket.model, error)
            self._unjoinable.add(joint.ticket.model)
            self._part(joint)
            return
        slot, _, failure, began, ended, _ = done
        total = sum(rows)
        for (_, _, ticket, _), outputs in zip(joint.members, shares, strict=True):
            if ticket.slot in joint.left:
                self._told(self._pending[ticket.slot], Done(slot, outputs, failure, began, ended, total))

    def _part(self, joint: PendingBatch) -> None:
        """What did not work together is tried once more, each alone, so that one's data fails nobody else."""
        left = [each for each in joint.members if each[2].slot in joint.left]
        for _, _, ticket, _ in left:
            self._pending[ticket.slot].joint = None
        self._scheduler.put_back(left)
        self.slots.release(joint.slot)

    def drained(self) -> Awaitable[None]:
        """Wait until no request is left, and every one that was has been answered."""
        return self._settled(lambda: not self._all())

    def model_drained(self, model: ModelKey) -> Awaitable[None]:
        """Wait until no request for this model is left."""
        return self._settled(lambda: not any(each.ticket.model == model for each in self._all()))

    def _all(self) -> list[PendingRequest | PendingBatch]:
        return [*self._pending.values(), *self._abandoned.values(), *self._joints.values()]

    def _launch(self) -> None:
        """Hand over what may run: at once if the worker has nothing to do, else together with what else comes in this turn."""
        batchable = self._scheduler.batchable
        if not self._scheduler.busy:
            self._link.tickets.put(self._choose() if batchable else self._scheduler.take())
        elif batchable or (tickets := self._scheduler.take()):
            if not self._handing_over:
                self._handing_over = True
                asyncio.get_running_loop().call_soon(self._hand_over)
            if not batchable:
                self._gathered += tickets

    def _hand_over(self) -> None:
        tickets, self._gathered, self._handing_over = self._gathered, [], False
        if self._scheduler.batchable:
            tickets += self._choose()
        self._link.tickets.put(tickets)

    def _choose(self) -> list[Ticket]:
        """As `Scheduler.take`, where some may be joined."""
        tickets, now = [], time.monotonic()
        while (choice := self._scheduler.choose(now)).members:
            tickets.append(self._launch_one(choice))
        self._wake_at(choice.due)
        return tickets

    def _launch_one(self, choice: Choice) -> Ticket:
        """The ticket of all that were chosen, or of the first alone where they cannot be put together."""
        joint = self._join(choice.members, choice.batching) if choice.batching else None
        if joint is None:
            ticket = choice.members[0][2]
            self._scheduler.launch(choice.members[:1], ticket.slot)
            return ticket
        self._joints[joint.slot.index] = joint
        for _, _, ticket, _ in joint.members:
            self._pending[ticket.slot].joint = joint
        self._scheduler.launch(joint.members, joint.slot.index)
        return joint.ticket

    def _join(self, members: Sequence[Queued], batching: Batching) -> PendingBatch | None:
        """Their inputs in one slot more; None where there is no slot, or no room in one, or the model does not take so many."""
        try:
            slot = self.slots.acquire()
        except QueueFull:
            return None
        tickets = [ticket for _, _, ticket, _ in members]
        try:
            sources = [(self._pending[ticket.slot].slot, ticket.shapes) for ticket in tickets]
            shapes = gather(sources, batching.signature, slot)
            self._serial += 1
            deadline = max([ticket.deadline for ticket in tickets])
            whole = Ticket(slot.index, self._serial, tickets[0].model, shapes, deadline, slot.capacity, slot.start)
            self._link.tickets.write(whole)
        except (RequestError, TensorMismatch):
            self.slots.release(slot)
            return None
        return PendingBatch(slot, whole, batching, members, {ticket.slot for ticket in tickets})

    def _wake_at(self, due: float | None) -> None:
        """Look again at this time, on the clock of `time.monotonic`, and at no other."""
        if self._alarm:
            self._alarm.cancel()
        self._alarm = None
        if due is not None:  # In whole milliseconds, which is as well as an event loop can tell the time.
            delay = math.ceil((due - time.monotonic()) * 1000) / 1000
            self._alarm = asyncio.get_running_loop().call_later(delay, self._launch)

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
    if failure.kind == "lost":
        return Unavailable(f"the device is lost: {failure.text}")
    if failure.kind == "stopped":
        return Unavailable(failure.text)
    if failure.kind == "overrun":
        return DeadlineExceeded(failure.text)
    if failure.kind == "outgrown":
        return Outgrown(int(failure.text))
    return Failed(f"the model raised: {failure.text}")
