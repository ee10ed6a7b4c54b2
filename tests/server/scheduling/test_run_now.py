"""A lane whose device side can run tickets at once, on the thread that submits them. The test says which it takes."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from server.errors import DeadlineExceeded
from server.link.messages import Done, Ticket
from server.link.ring import Link
from server.scheduling.lane import Lane
from server.scheduling.scheduler import Scheduler
from tests.lanes import submit

from .hand import BATCHING, ROWS, SHAPES, Hand, rows_out, settle


class Runner:
    """The device side as `run_now`: takes the next `willing` tickets, and records what it ran and was asked."""

    def __init__(self, link: Link, willing: float = math.inf) -> None:
        self.willing = willing
        self.ran: list[Ticket] = []
        self.asked: list[int] = []
        link.tickets.run_now = self.run

    def run(self, ticket: Ticket) -> Done | None:
        self.asked.append(ticket.slot)
        if not self.willing:
            return None
        self.willing -= 1
        self.ran.append(ticket)
        outputs = rows_out(ticket.shapes[0][0]) if ticket.model == "rows" else ()
        return Done(ticket.slot, outputs, None, 1, 2)


@pytest.fixture
def runner(link: Link) -> Runner:
    return Runner(link)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(8, 2)


def begin(
    lane: Lane, on_done: Callable[[Any], object], priority: int = 0, timeout: float | None = None, batched: bool = False
) -> int:
    """Submit a request; returns its slot."""
    slot = lane.take_slot()
    if batched:
        slot.lay_out(ROWS, [8])
    lane.submit(
        slot,
        "rows" if batched else "m/1#1",
        ((1, 2),) if batched else SHAPES,
        on_done,
        priority,
        timeout,
        BATCHING if batched else None,
    )
    return slot.index


async def test_an_idle_lane_answers_in_the_same_iteration_of_the_event_loop(lane: Lane, hand: Hand, runner: Runner) -> None:
    ends: list[object] = []
    for _ in range(3):
        slot = begin(lane, ends.append, timeout=5.0)
        await settle()
        assert ends == [Done(slot, (), None, 1, 2)]
        assert lane.statistics()[:2] == (0, 0)
        assert not lane.backlog()
        waiting = asyncio.ensure_future(lane.drained())
        await settle()
        assert not waiting.done()  # Its slot is in use until it is released.
        lane.release(lane.slots.at(slot))
        await waiting
        assert lane.slots.statistics()[::2] == (0, 0)
        assert not len(lane.deadlines)
        ends.clear()
    assert hand.tickets == []


async def test_what_the_device_side_does_not_take_goes_to_the_worker_and_all_others_wait_behind_it(
    lane: Lane, hand: Hand, runner: Runner
) -> None:
    runner.willing = 0
    ends: list[object] = []
    slots = [begin(lane, ends.append) for _ in range(4)]
    await settle()
    runner.willing = math.inf
    slots.append(begin(lane, ends.append))
    assert [ticket.slot for ticket in hand.tickets] == slots[:2]
    assert runner.asked == slots[:1]
    assert not ends
    await hand.end()
    await hand.end()
    assert [ticket.slot for ticket in runner.ran] == []
    while hand.tickets:
        await hand.end()
    assert [end.slot for end in ends if isinstance(end, Done)] == slots
    begin(lane, ends.append)
    await settle()
    assert len(runner.ran) == 1


async def test_requests_that_waited_run_at_once_in_the_order_of_the_queue_when_the_worker_has_ended(
    lane: Lane, hand: Hand, runner: Runner
) -> None:
    runner.willing = 0
    ends: list[Done] = []
    first = [begin(lane, ends.append) for _ in range(2)]
    await settle()
    late, urgent, later = (begin(lane, ends.append, priority) for priority in (5, 1, 5))
    runner.willing = math.inf
    hand.put()
    hand.put()
    await settle()
    assert [end.slot for end in ends] == [*first, urgent, late, later]
    assert [ticket.slot for ticket in runner.ran] == [urgent, late, later]
    assert hand.tickets == []
    assert lane.statistics()[:2] == (0, 0)


async def test_a_request_that_is_submitted_by_an_answer_runs_behind_those_that_were_launched(
    lane: Lane, hand: Hand, runner: Runner
) -> None:
    order: list[str] = []

    def again(_: object) -> None:
        order.append("first")
        begin(lane, lambda _: order.append("nested"))

    begin(lane, again)
    await settle()
    assert order == ["first", "nested"]
    assert len(runner.ran) == 2
    assert lane.statistics()[:2] == (0, 0)


async def test_a_release_in_an_answer_of_a_request_that_was_launched_with_it_cancels_that(
    lane: Lane, hand: Hand, runner: Runner
) -> None:
    runner.willing = 0
    begin(lane, lambda _: None)
    begin(lane, lambda _: None)
    await settle()
    slots: list[int] = []
    begin(lane, lambda _: lane.release(lane.slots.at(slots[0])))
    slots.append(begin(lane, lambda _: None))
    runner.willing = 1
    hand.put()
    hand.put()
    await settle()
    assert [ticket.slot for ticket in hand.tickets] == slots
    assert [slot for slot, _ in hand.cancelled] == slots
    assert lane.statistics().abandoned == 1
    await hand.end()
    assert lane.statistics()[:3] == (0, 0, 0)


async def test_batches_form_while_the_worker_runs_and_run_at_once_afterwards(link: Link, hand: Hand, runner: Runner) -> None:
    lane = Lane("acme", Scheduler(8, 1), link, hand)
    lane.open(asyncio.get_running_loop())
    runner.willing = 0
    ends: list[Done] = []
    for _ in range(4):
        begin(lane, ends.append, batched=True)
    await settle()
    assert len(hand.tickets) == 1
    runner.willing = math.inf
    await hand.end(outputs=rows_out(1))
    assert [ticket.shapes[0][0] for ticket in runner.ran] == [3]
    assert [end.rows for end in ends] == [0, 3, 3, 3]
    assert lane.statistics().ran == 2, "works on either thread, a nanosecond each"


async def test_a_deadline_that_passes_in_the_queue_is_not_run(lane: Lane, hand: Hand, runner: Runner) -> None:
    runner.willing = 0
    begin(lane, lambda _: None)
    begin(lane, lambda _: None)
    await settle()
    slot = lane.take_slot()
    late = submit(lane, slot, "m/1#1", SHAPES, timeout=0.0)
    runner.willing = math.inf
    hand.put()
    hand.put()
    with pytest.raises(DeadlineExceeded):
        await late
    lane.release(slot)
    await settle()
    assert lane.statistics().expired == 1
