"""Helpers' requests in the lead's lane, over a link of which the test plays the worker: one queue, limits, and freed memory."""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from server.errors import DeadlineExceeded, Failed, Outgrown, QueueFull, RequestError, Unavailable
from server.link import occupancy as occupancies
from server.link import ring as links
from server.link.messages import Done, Extent, Failure
from server.link.occupancy import LEAD, Occupancy, SharedBlocks
from server.link.slots import Slot
from server.scheduling.lane import Lane
from server.scheduling.pending import error_of, failure_of
from server.scheduling.queue_policy import QueueLimits, QueuePolicy
from server.scheduling.scheduler import HelperScheduler, Scheduler
from server.tenants import relay
from server.tenants.catalog import Catalog, ServedModel
from server.tenants.relay import Relay
from tests.lanes import submit
from tests.server.scheduling.hand import BATCHING, ROWS, SHAPES, Hand, rows_out, settle

SLOTS, QUEUE, MEMORY = 40, 4, 8 << 20
OUT = (Extent((1,), 0, 4),)


@dataclass
class Helper:
    lane: Lane
    relay: Relay
    to_lead: relay.Cancellations
    link: links.Link

    def die(self) -> None:
        """The process ends: nothing more is done for its completions."""
        self.lane.close(asyncio.get_running_loop())
        self.to_lead.socket.close()


class Tenant:
    """A lead with helpers, the device side's hand, and the memory that they share."""

    def __init__(self, stack: AsyncExitStack, queue: int = QUEUE) -> None:
        self._stack = stack
        self._worker = links.create(SLOTS, MEMORY)
        stack.callback(self._worker.close)
        self._page = occupancies.create(MEMORY)
        stack.callback(os.close, self._page)
        link = links.attach(self._worker)
        self._memory, self._queue = link.arena.memory, queue
        self.hand = Hand(links.attach(self._worker, self._memory))
        self.occupancy = Occupancy(self._page, LEAD)
        blocks = SharedBlocks(MEMORY, "memory", self.occupancy)
        self.lead = Lane("acme", Scheduler(queue, 1), link, self.hand, blocks)
        self.catalog = Catalog()
        self._open(self.lead)

    def _open(self, lane: Lane) -> None:
        lane.open(asyncio.get_running_loop())
        self._stack.callback(lane.close, asyncio.get_running_loop())

    def help(self, number: int = 2) -> Helper:
        """Start a helper."""
        descriptors = links.renew(self._worker)
        self._stack.callback(descriptors.close)
        ours, theirs = relay.sockets()
        self._stack.callback(theirs.close)
        found = Relay(number, self.lead, self.catalog, links.attach(descriptors, self._memory), ours, self.occupancy)
        self._stack.callback(found.close)
        found.open(asyncio.get_running_loop())
        occupancy, control = Occupancy(self._page, number), relay.Cancellations(theirs)
        scheduler = HelperScheduler(SLOTS, self._queue, "queue", occupancy)
        blocks = SharedBlocks(MEMORY, "memory", occupancy)
        link = links.attach(descriptors, self._memory)
        lane = Lane("acme", scheduler, link, control, blocks, True)
        self._open(lane)
        return Helper(lane, found, control, link)

    def idle(self) -> None:
        """Nothing is in use."""
        assert self.occupancy.used() == 0
        assert self.lead.statistics()[:3] == (0, 0, 0)


@pytest.fixture
async def tenant() -> AsyncIterator[Tenant]:
    async with AsyncExitStack() as stack:
        yield Tenant(stack)


def ask(lane: Lane, model: str = "m", **how: Any) -> tuple[Slot, "asyncio.Future[Done]"]:
    slot = lane.take_slot()
    slot.reserve(1)
    return slot, submit(lane, slot, model, SHAPES, **how)


def models(tenant: Tenant) -> list[str]:
    return [ticket.model for ticket in tenant.hand.tickets]


async def test_requests_of_all_processes_run_in_order_of_priority_and_arrival(tenant: Tenant) -> None:
    one, other = tenant.help(2).lane, tenant.help(3).lane
    for lane, model, priority in ((tenant.lead, "a", 0), (one, "b", 0), (other, "c", 2), (tenant.lead, "d", 2), (one, "e", 1)):
        ask(lane, model, priority=priority)
        await settle()
    ran = []
    for _ in range(5):
        ran += models(tenant)
        await tenant.hand.end()
    assert ran == ["a", "e", "c", "d", "b"]


async def test_the_queue_is_the_tenants_and_a_refusal_is_counted_once(tenant: Tenant) -> None:
    lanes = [tenant.lead, tenant.help(2).lane, tenant.help(3).lane]
    asked = []
    for at in range(QUEUE + 1):
        asked.append((lanes[at % 2], *ask(lanes[at % 2])))
        await settle()
    assert tenant.lead.statistics()[:2] == (QUEUE, 1)
    slot, answer = ask(lanes[2])  # It cannot know yet, as the last one was the lead's own.
    with pytest.raises(QueueFull, match=f"{QUEUE} requests may wait"):
        await answer
    lanes[2].release(slot)
    await settle()
    for lane in lanes:
        with pytest.raises(QueueFull, match=f"{QUEUE} requests may wait"):
            lane.admission.check_room()  # Before a body is read.
    assert [lane.statistics().rejected for lane in lanes] == [2, 1, 1]
    tenant.lead.release(asked[2][1])  # A request of the lead's own; no helper does anything.
    await settle()
    for lane in lanes:
        lane.admission.check_room()


async def test_a_helpers_request_that_has_begun_is_run_while_the_tenant_refuses_new_ones(tenant: Tenant) -> None:
    """As one of several texts, whose runs follow each other, when the server drains."""
    helper = tenant.help().lane
    helper.begin_several()
    _, first = ask(helper)
    await settle()
    for lane in (tenant.lead, helper):
        lane.admission.refusing = "the server is draining"
    await tenant.hand.end(outputs=OUT)
    await first
    slot = helper.take_slot(begun=True)
    slot.reserve(1)
    second = submit(helper, slot, "m", SHAPES)
    await settle()
    await tenant.hand.end(outputs=OUT)
    assert (await second).outputs == OUT
    with pytest.raises(Unavailable, match="draining"):
        helper.take_slot()


async def test_a_full_queue_of_the_models_own_refuses_no_run_of_a_helpers_request_that_has_begun(tenant: Tenant) -> None:
    queues = QueuePolicy(QueueLimits(1, 0, "dynamic_batching.default_queue_policy"))
    tenant.catalog.put("m", [ServedModel("m", "1", "m/1#1", ROWS, "", {}, queues=queues)], [])
    helper = tenant.help().lane
    asked = [ask(helper, "m/1#1") for _ in range(2)]  # One runs and one waits.
    await settle()
    _, refused = ask(helper, "m/1#1")
    _, later = ask(helper, "m/1#1", begun=True)
    with pytest.raises(Unavailable, match="Exceeds maximum queue size: 1 may wait for this model"):
        await refused
    for _ in range(3):
        await tenant.hand.end(outputs=OUT)
    assert [(await answer).outputs for answer in (*[answer for _, answer in asked], later)] == [OUT] * 3


async def test_a_full_queue_refuses_no_rerun_of_a_helpers_request_whose_outputs_need_more_memory(tenant: Tenant) -> None:
    helper = tenant.help().lane
    slot, first = ask(helper)
    await settle()
    asked = [ask(tenant.lead)[1] for _ in range(QUEUE)]
    _, refused = ask(helper)
    await settle()
    await tenant.hand.end(Failure("outgrown", "7"))
    for end, error in ((refused, QueueFull), (first, Outgrown)):
        with pytest.raises(error):
            await end
    asked += [ask(tenant.lead)[1], submit(helper, slot, "m", SHAPES, begun=True)]
    await settle()
    for _ in asked:
        await tenant.hand.end(outputs=OUT)
    assert [(await answer).outputs for answer in asked] == [OUT] * (QUEUE + 2)


async def test_a_helper_that_waits_for_room_has_it_though_no_request_of_its_own_ends(tenant: Tenant) -> None:
    helper = tenant.help().lane
    asked = [ask(tenant.lead)[0] for _ in range(QUEUE + 1)]
    slot, refused = ask(helper)  # The lead notices by it that helpers have to be refused.
    with pytest.raises(QueueFull):
        await refused
    helper.release(slot)
    assert helper.full
    waiting = asyncio.ensure_future(helper.has_room())
    await settle()
    assert not waiting.done()
    tenant.lead.release(asked[-1])
    assert not helper.full, "at once, as what the lead reports from now on says that there is room"
    await asyncio.wait_for(waiting, 10)


async def test_a_deadline_withdraws_what_waits_and_keeps_memory_of_what_runs(tenant: Tenant) -> None:
    helper = tenant.help().lane
    running, waiting = ask(helper, timeout=0.001), ask(helper, timeout=0.001)
    for slot, answer in (running, waiting):
        with pytest.raises(DeadlineExceeded):
            await answer
        helper.release(slot)
    await settle()
    assert tenant.lead.statistics()[:3] == (0, 1, 1)
    assert tenant.occupancy.used() == running[0].capacity
    (ticket,) = tenant.hand.tickets
    assert tenant.hand.cancelled == [(ticket.slot, ticket.serial)]
    await tenant.hand.end(Failure("cancelled", ""))
    tenant.idle()
    assert [helper.statistics().expired, tenant.lead.statistics().expired] == [2, 0]


async def test_requests_of_several_processes_run_as_one_batch_that_is_counted_once(tenant: Tenant) -> None:
    one, other = tenant.help(2).lane, tenant.help(3).lane
    served = ServedModel("m", "1", "m/1#1", ROWS, "", {}, BATCHING)
    tenant.catalog.put("m", [served], [])
    ask(tenant.lead, "before")
    asked = []
    for lane, value in ((one, 1.0), (other, 2.0), (one, 3.0)):
        slot = lane.take_slot()
        slot.lay_out(ROWS, [8], 256)
        slot.view[:8] = np.full(2, value, np.float32).tobytes()
        asked.append((lane, slot, submit(lane, slot, "m/1#1", ((1, 2),)), value))
        await settle()
    await tenant.hand.end()
    (ticket,) = tenant.hand.tickets
    assert ticket.shapes == ((3, 2),)
    batch = tenant.lead.slots.at(ticket.slot)
    assert np.frombuffer(batch.view[:24], np.float32).tolist() == [1, 1, 2, 2, 3, 3]
    batch.view[256:268] = np.array([1, 2, 3], np.float32).tobytes()
    await tenant.hand.end(outputs=rows_out(3))
    for lane, slot, answer, value in asked:
        done = await answer
        (extent,) = done.outputs
        assert (done.slot, done.rows, extent.shape) == (slot.index, 3, (1,))
        assert np.frombuffer(slot.view[extent.offset : extent.offset + extent.nbytes], np.float32) == [value]
        lane.release(slot)
    assert {rows: size.count for rows, size in served.statistics.runs.items()} == {3: 1}
    assert tenant.lead.slots.statistics().used == 1, "the first request's; the batch's slot is free"


async def test_outputs_of_a_batch_that_do_not_fit_into_a_requests_own_memory_ask_for_more(tenant: Tenant) -> None:
    helper = tenant.help().lane
    tenant.catalog.put("m", [ServedModel("m", "1", "m/1#1", ROWS, "", {}, BATCHING)], [])
    ask(tenant.lead, "before")
    asked = []
    for _ in range(2):
        slot = helper.take_slot()
        slot.lay_out(ROWS, [8])
        slot.use_block(slot.start, 64)  # No room behind the input.
        asked.append(submit(helper, slot, "m/1#1", ((1, 2),)))
    await settle()
    await tenant.hand.end()
    await tenant.hand.end(outputs=rows_out(2))
    for answer in asked:
        with pytest.raises(Outgrown):
            await answer


async def test_what_a_dead_helper_asked_is_given_up_and_its_memory_freed_when_its_work_has_ended(tenant: Tenant) -> None:
    dying, other = tenant.help(2), tenant.help(3).lane
    ask(dying.lane, "runs")
    ask(dying.lane, "waits")
    dying.lane.take_slot().reserve(1)
    slot, answer = ask(other, "other")
    await settle()
    ask(dying.lane, "not read yet")
    dying.die()
    await settle()
    assert tenant.lead.statistics()[:3] == (1, 1, 1)
    assert not dying.relay.ended.is_set(), "the device may still write there"
    await tenant.hand.end(Failure("cancelled", ""))
    assert dying.relay.ended.is_set()
    assert tenant.occupancy.used() == slot.capacity
    assert models(tenant) == ["other"]
    await tenant.hand.end(outputs=OUT)
    assert (await answer).outputs == OUT


@pytest.mark.parametrize(
    "error", [Outgrown(7), DeadlineExceeded("late"), QueueFull("full"), Failed("the model raised: x"), Unavailable("away")]
)
def test_every_error_is_the_same_at_the_helper(error: RequestError) -> None:
    again = error_of(failure_of(error))
    assert (type(again), str(again)) == (type(error), str(error))


@pytest.mark.parametrize("seed", range(25))
async def test_whatever_happens_every_request_ends_once_and_all_memory_is_free_in_the_end(tenant: Tenant, seed: int) -> None:
    """Random requests, also for answers in parts, that end, fail, are given up, and lose their process."""
    chance = random.Random(seed)
    helpers = {2: tenant.help(2), 3: tenant.help(3)}
    open_: list[tuple[Lane, Slot, bool, list[Done | RequestError]]] = []

    def submit_one() -> None:
        lane = chance.choice([tenant.lead, *(each.lane for each in helpers.values())])
        try:
            slot = lane.take_slot()
        except RequestError:
            return
        slot.reserve(chance.choice([1, 100_000]))
        in_parts, ends = chance.random() < 0.4, []
        on_done = partial(list.append, ends)
        lane.submit(slot, "m", SHAPES, on_done, chance.randrange(3), in_parts=in_parts)
        open_.append((lane, slot, in_parts, ends))

    def answer_one() -> None:
        if tenant.hand.tickets:
            failure = chance.choice([None, None, Failure("raised", "x"), Failure("cancelled", "")])
            passed = tenant.hand.tickets[0].deadline <= 0
            tenant.hand.put(failure, chance.choice([OUT, ()]) if not (failure or passed) else ())

    def go_on_or_release(all_of_them: bool = False) -> None:
        for each in list(open_):
            lane, slot, in_parts, ends = each
            assert len(ends) <= 1
            over = bool(ends) and not (in_parts and isinstance(ends[0], Done) and ends[0].outputs)
            if all_of_them or over or chance.random() < 0.1:
                lane.release(slot)
                open_.remove(each)
            elif ends:
                ends.clear()
                lane.proceed(slot)

    async def replace_a_helper() -> None:
        number = chance.choice([2, 3])
        dead = helpers.pop(number)
        dead.die()
        open_[:] = [each for each in open_ if each[0] is not dead.lane]
        await settle()
        while not dead.relay.ended.is_set():
            answer_one()
            await settle()
        helpers[number] = tenant.help(number)

    for _ in range(150):
        what = chance.random()
        if what < 0.45:
            submit_one()
        elif what < 0.75:
            answer_one()
        elif what < 0.97:
            go_on_or_release()
        else:
            await replace_a_helper()
        if chance.random() < 0.7:
            await settle()
    go_on_or_release(all_of_them=True)
    for _ in range(200):
        await settle()
        if tenant.hand.tickets:
            tenant.hand.put(Failure("cancelled", ""))
    tenant.idle()
    assert {repr(each.relay) for each in helpers.values()} == {"<Relay of acme, 0 requests>"}
    assert all(each.lane.statistics()[:3] == (0, 0, 0) for each in helpers.values())


async def test_a_helper_that_sends_a_malformed_ticket_is_cut_off_and_others_are_served(tenant: Tenant) -> None:
    wrong, right = tenant.help(2), tenant.help(3)
    os.eventfd_write(wrong.link.tickets.event, 1 << 20)
    await asyncio.wait_for(wrong.relay.ended.wait(), 30)
    assert wrong.to_lead.socket.recv(1) == b"", "which ends the helper"
    slot, answer = ask(right.lane)
    await settle()
    await tenant.hand.end(outputs=OUT)
    assert await answer == Done(slot.index, OUT, None, 1, 2)
