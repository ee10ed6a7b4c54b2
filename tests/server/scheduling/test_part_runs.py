"""Answers in parts in a lane of which the test plays the device side: order, limits, deadlines, and what is freed when."""

import asyncio
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import DeadlineExceeded, Outgrown, QueueFull, RequestError
from server.link.messages import Done, Extent, Failure, Ticket
from server.link.ring import Link
from server.link.slots import SMALLEST
from server.scheduling.lane import Lane
from server.scheduling.queue_policy import QueuePolicy
from server.scheduling.scheduler import Scheduler
from tests.lanes import submit
from tests.memory import linked

from .hand import SHAPES, SLOTS, Hand, settle
from .test_lane_queues import SHORT, SOON

PART = (Extent((1,), 0, 4),)
END = ()


@pytest.fixture
def scheduler() -> Scheduler:
    """One in flight, two may wait."""
    return Scheduler(2, 1)


class Asked:
    """A request for an answer in parts, and what came of it so far."""

    def __init__(self, lane: Lane, priority: int = 0, timeout: float | None = None, queues: QueuePolicy | None = None) -> None:
        self.lane, self.slot = lane, lane.take_slot()
        self.came: list[Done | RequestError] = []
        lane.submit(self.slot, "m/1#1", SHAPES, self.came.append, priority, timeout, None, queues, True)

    def proceed(self) -> None:
        self.lane.proceed(self.slot)

    def release(self) -> None:
        self.lane.release(self.slot)

    @property
    def last(self) -> Done | RequestError:
        return self.came[-1]


def slots(hand: Hand) -> list[int]:
    return [ticket.slot for ticket in hand.tickets]


def is_free(lane: Lane) -> bool:
    return lane.slots.statistics().used == 0 and lane.statistics()[:3] == (0, 0, 0)


async def test_each_part_is_passed_on_and_the_next_ticket_names_the_last(lane: Lane, hand: Hand) -> None:
    asked = Asked(lane)
    assert hand.tickets == [Ticket(0, 1, "m/1#1", SHAPES, math.inf, 0, 0, 1)]
    for after in (1, 2):
        await hand.end(outputs=PART)
        assert len(asked.came) == after
        assert slots(hand) == []
        asked.proceed()
        assert hand.tickets == [Ticket(0, after + 1, "m/1#1", SHAPES, math.inf, 0, 0, after)]
    await hand.end(outputs=END)
    assert [done.outputs for done in asked.came if isinstance(done, Done)] == [PART, PART, END]
    asked.release()
    assert is_free(lane)
    assert hand.tickets == hand.cancelled == []


async def test_an_answer_that_waits_for_its_client_counts_as_queued(lane: Lane, hand: Hand) -> None:
    first, second = Asked(lane), Asked(lane)
    await hand.end(outputs=PART)
    await hand.end(outputs=PART)
    assert lane.statistics().waiting == 2
    assert lane.backlog() == {}
    third = Asked(lane)  # Nothing is in flight, so it is launched at once.
    with pytest.raises(QueueFull):
        lane.take_slot()
    first.release()
    second.release()
    await hand.end(outputs=END)
    third.release()
    while hand.tickets:
        await hand.end(Failure("expired", ""))
    assert is_free(lane)


async def test_a_part_that_is_too_large_comes_again_in_a_larger_block(lane: Lane, hand: Hand) -> None:
    asked = Asked(lane)
    await hand.end(Failure("outgrown", str(2 * SMALLEST)))
    assert isinstance(asked.last, Outgrown)
    asked.slot.reserve(2 * SMALLEST)
    asked.proceed()
    assert [(ticket.after, ticket.capacity) for ticket in hand.tickets] == [(1, 2 * SMALLEST)]
    await hand.end(outputs=PART)
    assert isinstance(asked.last, Done)


async def test_the_deadline_is_that_of_the_whole_answer(lane: Lane, hand: Hand) -> None:
    asked = Asked(lane, timeout=SHORT)
    await hand.end(outputs=PART)
    asked.proceed()
    await hand.end(outputs=PART)
    while len(asked.came) < 3:
        await asyncio.sleep(SHORT)
    assert isinstance(asked.last, DeadlineExceeded)
    asked.release()
    await hand.end(Failure("expired", ""))
    assert is_free(lane)
    assert len(lane.deadlines) == 0


async def test_the_limit_on_queueing_is_for_the_first_part(lane: Lane, hand: Hand) -> None:
    asked = Asked(lane, queues=SOON)
    await hand.end(outputs=PART)
    other = lane.take_slot()
    submit(lane, other, "m/1#1", SHAPES)
    asked.proceed()  # Waits behind the other one.
    await asyncio.sleep(3 * SHORT)
    assert len(asked.came) == 1
    assert len(lane.deadlines) == 0


class DeviceSide:
    """Ends tickets at random, and checks that they are what a worker needs to know whose answer it goes on with."""

    def __init__(self, link: Link, choices: random.Random) -> None:
        self.kept: dict[int, int] = {}
        self._link = link
        self._choices = choices
        self._tickets: list[Ticket] = []
        link.tickets.open()

    def cancel(self, slot: int, serial: int) -> None:
        """Often too late, so the test does as if it always was."""

    def end_one(self) -> bool:
        """End a ticket; whether there was one."""
        while ticket := self._link.tickets.poll():
            self._tickets.append(ticket)
        if not self._tickets:
            return False
        slot, serial, _, _, deadline, _, _, after, *_ = self._tickets.pop(0)
        assert slot not in [each.slot for each in self._tickets], "a slot is twice in the ring"
        kept = self.kept.pop(slot, None)
        failure, outputs = None, END
        if after == serial:
            assert kept is None, "an answer was begun while another was kept in its slot"
        elif after:
            assert kept == after
        how = self._choices.choice(["part", "part", "outgrown", "end", "raised"])
        if deadline <= 0:
            failure = Failure("expired", "")
        elif not after:
            outputs = PART
        elif how in ("part", "outgrown"):
            self.kept[slot] = serial
            outputs, failure = (PART, None) if how == "part" else (END, Failure("outgrown", "64"))
        elif how == "raised":
            failure = Failure("raised", "")
        self._link.completions.put(Done(slot, outputs, failure, 1, 2))
        self._link.completions.ring()
        return True


@given(st.integers(0, 1 << 32), st.lists(st.sampled_from(["ask", "plain", "end", "end", "proceed", "release"]), max_size=60))
@settings(deadline=None)
def test_whatever_happens_no_slot_is_twice_in_a_ring_and_all_is_freed_in_the_end(seed: int, steps: list[str]) -> None:
    async def run() -> None:
        choices = random.Random(seed)
        with linked(SLOTS) as link:
            device = DeviceSide(link, choices)
            scheduler = Scheduler(4, 2)
            lane = Lane("acme", scheduler, link, device)
            lane.open(asyncio.get_running_loop())
            asked: list[Asked] = []

            def parts_taken() -> list[Asked]:
                return [each for each in asked if each.came and goes_on(each.last)]

            for step in steps:
                if step in ("ask", "plain"):
                    try:
                        if step == "ask":
                            asked.append(Asked(lane, choices.choice([0, 1, 2])))
                        else:
                            slot = lane.take_slot()
                            lane.submit(slot, "m/1#1", SHAPES, lambda _, slot=slot: lane.release(slot))
                    except QueueFull:
                        continue
                elif step == "end":
                    device.end_one()
                elif step == "proceed" and (taken := parts_taken()):
                    chosen = choices.choice(taken)
                    chosen.came.clear()
                    chosen.proceed()
                elif step == "release" and asked:
                    asked.pop(choices.randrange(len(asked))).release()
                await settle()
                assert scheduler.paused == len(parts_taken())
            for each in asked:
                each.release()
            await settle()
            while device.end_one():
                await settle()
            assert is_free(lane)
            assert scheduler.paused == 0
            assert device.kept == {}
            lane.close(asyncio.get_running_loop())

    asyncio.run(run())


def goes_on(last: Done | RequestError) -> bool:
    return bool(last.outputs) if isinstance(last, Done) else isinstance(last, Outgrown)
