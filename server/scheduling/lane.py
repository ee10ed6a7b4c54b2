"""The HTTP side of a tenant's queue: holds each request from its decoded inputs to its completion.

A request owns a slot. However its wait ends (completion, deadline, disconnect), its owner calls `release`, which withdraws the
request if it is queued, cancels it if it runs, and frees the slot once nothing uses its memory any more.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any

from ..config.tables import dotted
from ..errors import Unavailable
from ..link.blocks import BlockAllocator
from ..link.messages import Done, ModelKey, Ticket
from ..link.ring import Link
from ..link.slots import Slot
from .admission import Admission
from .batch_runs import BatchRuns
from .batching import batchable
from .lane_statistics import LaneStatistics
from .launcher import Launcher
from .part_runs import PartRuns, goes_on, has_begun
from .pending import Canceller, Deadlines, OnDone, PendingBatch, PendingRequest, error_of
from .queue_policy import Batching, QueueLimits, QueuePolicy
from .scheduler import Scheduler
from .slot_pool import SlotPool

_LOOK_AGAIN = 0.005
"""Seconds after which a helper looks again whether the lead's queue has room."""


class Lane:
    """One tenant's queue to its worker. Every method belongs to the event loop.

    A request passes `admission.admit` when its headers are known, `take_slot` when its body is complete, `submit` when its
    inputs are in the slot, and `release` at its end; an answer in parts also `proceed`, after each.

    `blocks` allocates the tensor memory, if other processes do so too. The lane of a `helper` has no queue of its own: it sends
    requests on to the lead's (see `tenants.relay`), with their priorities.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        link: Link,
        canceller: Canceller,
        blocks: BlockAllocator | None = None,
        helper: bool = False,
    ) -> None:
        self.name = name
        self.slots = SlotPool(link.arena, dotted(("tenants", name, "memory")), blocks)
        self.deadlines = Deadlines()
        self.admission = Admission(scheduler, self.deadlines)
        self._several = 0
        """Requests of several inferences that are not answered yet."""
        self._scheduler = scheduler
        self._link = link
        self._helper = helper
        self._loop: Any = None  # Compiled code would check that `remove_reader` returns a bool; uvloop's does not.
        self._canceller = canceller
        self._pending: dict[int, PendingRequest] = {}
        self._abandoned: dict[int, PendingRequest] = {}
        self._serials = count(1)
        self._batches = BatchRuns(
            scheduler, self.slots, link.tickets, self._pending, self._serials, canceller.cancel, self._finish
        )
        self._parts = PartRuns(scheduler, link.tickets, self.deadlines, self._serials, self._expire)
        self._launcher = Launcher(scheduler, self._batches, link.tickets, self._end)
        self._waiters = Waiters()
        self._relinking = Relinking(scheduler, self._waiters, self._use, self._launcher.launch)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive completions on this event loop from now on."""
        self._loop = loop
        loop.add_reader(self._link.completions.event, self._on_completions)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop receiving completions, and cancel all timers."""
        self._launcher.close()
        self.deadlines.close()
        self.admission.close()
        if self._loop:
            self._loop.remove_reader(self._link.completions.event)
        self._loop = None

    def statistics(self) -> LaneStatistics:
        scheduler = self._scheduler.statistics()
        abandoned = len(self._abandoned) + self._batches.released()
        requests, nbytes, connections, bodies = self.admission.limited.values()
        return LaneStatistics(
            scheduler.waiting,
            scheduler.in_flight,
            abandoned,
            self.admission.rejected,
            self.admission.expired,
            self.admission.invalid,
            (requests, nbytes, connections, bodies),
            self.admission.unread,
            self._scheduler.ran,
        )

    def backlog(self) -> Counter[ModelKey]:
        """How many requests are queued for each model."""
        begun = self._scheduler.in_flight
        waiting = [p for p in self._pending.values() if not (p.ended or p.batch or p.paused or p.slot.index in begun)]
        return Counter(pending.ticket.model for pending in waiting)

    def take_slot(self, begun: bool = False, retried: bool = False) -> Slot:
        """A slot to decode an admitted request into; `submit` it before the event loop goes on.

        Raises as `Admission.check_room` does.
        """
        self.admission.check_room(begun, retried)
        return self.slots.acquire()

    def begin_several(self) -> None:
        """A request that was admitted takes several inferences: it is drained once `end_several` is called, and not between."""
        self._several += 1

    def end_several(self) -> None:
        """That request is answered."""
        self._several -= 1
        self._waiters.wake()

    @property
    def full(self) -> bool:
        """Whether the queue has no room for one more request."""
        return self._scheduler.full

    def suspend(self, reason: str) -> None:
        """Refuse new requests for this reason, and fail those that are queued or run; with "" accept requests again.

        A lane that refuses for good (`refusing` was set) goes on refusing.
        """
        self.admission.suspend(reason)
        for pending in list(self._pending.values()) if reason else ():
            pending.complete(Unavailable(reason))

    def fail_in_flight(self, reason: str, queued: bool = True) -> None:
        """The device side has ended, and no thread or device uses the memory of launched requests any more: end them at once.

        They fail with Unavailable, and the memory of those that were released before is freed. Requests that only wait fail
        too, and new ones are refused until `suspend("")`, or with `queued=False` all of them wait. Nothing is launched before
        `relink`.
        """
        self._relinking.cut_off()
        self._on_completions()  # Works that ended before are answered.
        if self._loop:
            self._loop.remove_reader(self._link.completions.event)
        begun = self._scheduler.end_all()
        launched = [p for p in self._pending.values() if p.slot.index in begun or (p.batch and not p.batch.ended)]
        for pending in launched:
            pending.ended = True
        for pending in self._abandoned.values():
            self._scheduler.withdraw(pending.slot.index)  # One that was to free an answer in parts, which has been lost.
            self.slots.release(pending.slot)
        self._abandoned.clear()
        self._batches.end_all()
        if queued:
            self.suspend(reason)
        for pending in launched:
            pending.complete(Unavailable(reason))
        self._waiters.wake()

    async def relink(self, link: Link, limit: float = math.inf) -> bool:
        """Send tickets over this link, to the same tensor memory, and take completions from it; True once that is so.

        What is in flight ends on the old link before, and requests wait in the queue meanwhile. False if it does not end within
        `limit` seconds: then the old link stays in use. Afterwards the lane uses nothing of the link that it has left.
        """
        self.slots.check(link.arena)
        return await self._relinking.change(link, limit)

    def submit(
        self,
        slot: Slot,
        model: ModelKey,
        shapes: tuple[tuple[int, ...], ...],
        on_done: OnDone,
        priority: int = 0,
        timeout: float | None = None,
        batching: Batching | None = None,
        queues: QueuePolicy | None = None,
        in_parts: bool = False,
        deadline: float = math.inf,
        unasked: int = 0,
        begun: bool = False,
    ) -> None:
        """Queue a decoded request; `timeout` is in seconds from now, and with `batching` it may run in a batch.

        A `deadline` in place of a `timeout` is watched by the caller; the worker does not begin the request after it. `unasked`
        is as in `Ticket`.

        Outputs of a batched request, whose completion has `rows`, are in the slot that the completion names. A request that
        ended with Outgrown may be submitted again in the same slot with a larger block; whether there is room in the queue is
        not checked here. With `in_parts` the model answers in parts, and `on_done` is called with each; `proceed` or `release`
        follows. Such an answer ends with a completion without outputs, or with an error. Raises BadRequest for shapes that are
        too long to send, and Unavailable if its queue of `queues` is full, unless it is part of a request that has `begun`.
        """
        if queues is not None:
            priority = queues.priority(priority)
            if not begun:
                self._check_queue(model, priority, queues)
        if timeout is not None:
            deadline = time.monotonic() + timeout
        serial = next(self._serials)
        after, (passed_on, begun) = serial if in_parts else 0, (priority, begun) if self._helper else (0, False)
        ticket = Ticket(
            slot.index, serial, model, shapes, deadline, slot.capacity, slot.start, after, passed_on, unasked, begun
        )
        self._link.tickets.write(ticket)
        batch = None
        if batching and not self._scheduler.idle and model not in self._batches.unbatchable:  # Launched at once if idle.
            batch = batchable(batching, ticket, time.monotonic())
        self._scheduler.add(ticket, priority, batch)
        pending = self._pending[slot.index] = PendingRequest(slot, ticket, on_done)
        pending.priority = priority
        if timeout is not None:
            pending.timeout = timeout
            self.deadlines.add(deadline, ticket.serial, partial(self._expire, pending))
        if queues is not None and (limits := queues.limits_for(priority)).timeout:
            pending.queue_deadline = time.monotonic() + limits.timeout
            self.deadlines.add(pending.queue_deadline, -ticket.serial, partial(self._expire_in_queue, pending, limits))
        self._launcher.launch(True)

    def hold(self, slot: Slot, model: ModelKey, shapes: tuple[tuple[int, ...], ...], on_done: OnDone) -> None:
        """A request of this slot is prepared elsewhere, before `submit`: it counts as one of the model's, and can fail."""
        ticket = Ticket(slot.index, 0, model, shapes, math.inf, slot.capacity, slot.start)
        self._pending[slot.index] = PendingRequest(slot, ticket, on_done, ended=True)

    def proceed(self, slot: Slot) -> None:
        """Queue the next part of the answer in this slot, whose memory is written again; after Outgrown, the same part."""
        self._parts.proceed(self._pending[slot.index])
        self._launcher.launch()

    def end_parts(self, model: ModelKey, reason: str) -> None:
        """End the answers in parts of a model with Unavailable."""
        for pending in [each for each in self._pending.values() if each.ticket.after and each.ticket.model == model]:
            pending.complete(Unavailable(reason))

    def release(self, slot: Slot) -> None:
        """Give up the request in this slot: withdraw, cancel or forget it, and free the slot when nothing uses it any more."""
        pending = self._pending.pop(slot.index, None)
        if pending and (pending.timeout < math.inf or pending.queue_deadline < math.inf):
            self.deadlines.remove(pending.ticket.deadline, pending.ticket.serial)
            self.deadlines.remove(pending.queue_deadline, -pending.ticket.serial)
        if pending and pending.batch:
            self._batches.release(pending.batch, slot.index)  # The work runs in the batch's memory, not in this slot's.
        elif pending and not pending.ended:
            withdrawn = self._scheduler.withdraw(slot.index)
            if pending.paused or (withdrawn and has_begun(pending.ticket)):
                self._free_answer(pending)
                return
            if not withdrawn:
                self._abandoned[slot.index] = pending
                self._canceller.cancel(slot.index, pending.ticket.serial)
                return
        self.slots.release(slot)
        self._waiters.wake()

    async def has_room(self) -> None:
        """Wait until the queue has room for one more request."""
        if self._helper:
            while self._scheduler.full:  # The lead's queue: nothing is called here when it has room.
                await asyncio.sleep(_LOOK_AGAIN)
        else:
            await self._waiters.wait_until(lambda: not self._scheduler.full)

    def call_when_room(self, function: Callable[[], object]) -> None:
        """Call this once the queue has room for one more request, before anything else can see that. Not in a helper."""
        self._waiters.call_when(lambda: not self._scheduler.full, function)

    def drained(self) -> Awaitable[None]:
        """Wait until every request has been answered and released."""
        return self._waiters.wait_until(lambda: not (self._all() or self._several))

    def model_drained(self, model: ModelKey) -> Awaitable[None]:
        """Wait until no request for this model is left."""
        return self._waiters.wait_until(lambda: not self.has_requests(model))

    def has_requests(self, model: ModelKey) -> bool:
        """Whether a request for this model is queued or in flight."""
        return any(each.ticket.model == model for each in self._all())

    def _use(self, link: Link) -> None:
        """Change links; nothing is in flight. Queued tickets, which were written when they were queued, are written again."""
        self.slots.move(link.arena)
        for ticket in self._scheduler.waiting:
            link.tickets.write(ticket)
        if self._loop:
            self._loop.remove_reader(self._link.completions.event)
            self._loop.add_reader(link.completions.event, self._on_completions)
        self._link = link
        self._batches.tickets = self._parts.tickets = self._launcher.tickets = link.tickets
        self._scheduler.deferred = link.completions.deferred()
        self._scheduler.on_host_cores = link.completions.on_host_cores()

    def _on_completions(self) -> None:
        completions, scheduler = self._link.completions, self._scheduler
        ended = completions.take()
        scheduler.deferred = completions.deferred()
        scheduler.on_host_cores = completions.on_host_cores()
        for done in ended:
            scheduler.finish(done.slot, done.ended - done.began, done.failure is not None)
        if scheduler.batchable and self._link.tickets.run_now is None:
            self._launcher.launch()  # Before the answers are written, which takes a while; the next work can run meanwhile.
        for done in ended:
            self.deadlines.fire_due()
            self._end(done)
        self._launcher.launch()
        self._waiters.wake()

    def _end(self, done: Done) -> None:
        if abandoned := self._abandoned.pop(done.slot, None):
            if abandoned.ticket.after and goes_on(done):  # The cancellation came when the part had ended.
                self._parts.pause(abandoned)
                self._free_answer(abandoned)
            else:
                self.slots.release(abandoned.slot)
        elif batch := self._batches.running.pop(done.slot, None):
            self._batches.end(batch, done)
        else:
            self._finish(self._pending[done.slot], done)

    def _finish(self, pending: PendingRequest, done: Done) -> None:
        if pending.ticket.after and goes_on(done):
            self._parts.pause(pending)
            if pending.on_done:
                pending.on_done(done if done.failure is None else error_of(done.failure))
            return
        pending.ended = True
        if done.failure and done.failure.kind == "expired":
            self._expire(pending)
        else:
            pending.complete(done if done.failure is None else error_of(done.failure))

    def _free_answer(self, pending: PendingRequest) -> None:
        """Have the worker free what it keeps of an answer in parts; the slot is free when that has ended."""
        self._abandoned[pending.slot.index] = pending
        self._parts.free(pending)
        self._launcher.launch()

    def _expire(self, pending: PendingRequest) -> None:
        """Its deadline has passed, whether the timer or the worker noticed first."""
        if pending.on_done:
            pending.complete(self.admission.expire(pending.timeout))

    def _expire_in_queue(self, pending: PendingRequest, limits: QueueLimits) -> None:
        """It has been queued for as long as its model allows; if it has been launched it goes on."""
        if pending.on_done and self._scheduler.waits(pending.slot.index):
            self.admission.expired += 1
            pending.complete(Unavailable(limits.timeout_text))

    def _check_queue(self, model: ModelKey, priority: int, queues: QueuePolicy) -> None:
        """Raise Unavailable if as many requests are queued for the model as its configuration allows."""
        limits = queues.limits_for(priority)
        if limits.size and self._scheduler.queued(model, priority if queues.levels else None) >= limits.size:
            self.admission.rejected += 1
            raise Unavailable(limits.full_text)

    def _all(self) -> list[PendingRequest | PendingBatch]:
        return [*self._pending.values(), *self._abandoned.values(), *self._batches.running.values()]


class Waiters:
    """Conditions that are checked when `wake` is called. Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], Callable[[], object]]] = []

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once this is so: now, or when it is so at a call of `wake`."""
        if not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.call_when(condition, partial(_end, waiter))
            await waiter

    def call_when(self, condition: Callable[[], bool], function: Callable[[], object]) -> None:
        """Call this once, in the first call of `wake` in which it is so."""
        self._waiting.append((condition, function))

    def wake(self) -> None:
        """Something has changed."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for condition, function in waiting:
            if condition():
                function()
            else:
                self._waiting.append((condition, function))


def _end(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():  # What waits may have been cancelled.
        waiter.set_result(None)


class Relinking:
    """Of one lane; belongs to the event loop. While it is changed, and while it is cut off, the scheduler launches nothing.

    `waiters` are woken when a work has ended. `use` has the lane use another link, and `launch` what has waited for that.
    """

    def __init__(self, scheduler: Scheduler, waiters: Waiters, use: Callable[[Link], None], launch: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._waiters = waiters
        self._use = use
        self._launch = launch
        self._changing = asyncio.Lock()
        self._cut_off = False

    def cut_off(self) -> None:
        """The other side of the link has ended: launch nothing before the next `change`."""
        self._cut_off = self._scheduler.held = True

    async def change(self, link: Link, limit: float) -> bool:
        """Use this link once nothing is in flight; False, and nothing has changed, if something is for `limit` seconds."""
        async with self._changing:
            self._scheduler.held = True
            try:
                ended = await self._all_ended(limit)
                if ended:
                    self._use(link)
                    self._cut_off = False
            finally:
                self._scheduler.held = self._cut_off
                self._launch()
        return ended

    async def _all_ended(self, limit: float) -> bool:
        """Wait until nothing is in flight, for at most so many seconds; whether that is so."""
        try:
            async with asyncio.timeout(None if limit == math.inf else limit):
                await self._waiters.wait_until(lambda: not self._scheduler.busy)
        except TimeoutError:
            return not self._scheduler.busy
        return True
