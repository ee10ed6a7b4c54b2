"""A lane over a worker that the test plays itself: who waits, who is told what, and when a slot is free again."""

import asyncio
from typing import cast

import pytest

from server.errors import DeadlineExceeded, Failed, QueueFull, Unavailable
from server.lane import Lane
from server.scheduler import Scheduler
from server.slots import Slot, SlotPool
from server.ticket import Done, Failure, Ticket
from server.worker import Worker

SHAPES = ((1,),)


class Hand:
    """Takes tickets in a worker's place, and answers them when the test says so."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.tickets: list[Ticket] = []
        self.cancelled: list[int] = []

    def submit(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)

    def cancel(self, slot: int) -> None:
        self.cancelled.append(slot)

    def end(self, failure: Failure | None = None) -> None:
        """The oldest ticket ended."""
        self.lane.hear(Done(self.tickets.pop(0).slot, (), failure, 1, 2))


def pair(queue: int = 2, credits: int = 1) -> tuple[Lane, Hand]:
    lane = Lane("acme", Scheduler(queue, credits), SlotPool())
    hand = Hand(lane)
    assert lane.swap(cast(Worker, hand)) is None
    return lane, hand


def ask(lane: Lane, priority: int = 0, timeout: float | None = None) -> tuple[Slot, "asyncio.Future[Done]"]:
    slot = lane.admit()
    return slot, lane.submit(slot, "m/1#1", SHAPES, priority, timeout)


async def test_a_request_is_launched_answered_and_its_slot_used_again() -> None:
    lane, hand = pair()
    slot, answer = ask(lane)
    assert hand.tickets == [Ticket(slot.index, "m/1#1", SHAPES, float("inf"))]
    hand.end()
    assert (await answer).slot == slot.index
    lane.release(slot)
    assert lane.admit() is slot


async def test_a_full_queue_refuses_and_counts() -> None:
    lane, _ = pair(queue=2, credits=1)
    for _ in range(3):
        ask(lane)
    with pytest.raises(QueueFull, match="Exceeds maximum queue size: 2 requests are waiting, and 2 may"):
        lane.admit()
    assert lane.statistics().rejected == 1
    assert lane.slots.statistics().used == 3


async def test_the_next_is_launched_when_one_ends_the_highest_priority_first() -> None:
    lane, hand = pair()
    first, _ = ask(lane)
    usual, _ = ask(lane)
    urgent, _ = ask(lane, priority=1)
    assert [ticket.slot for ticket in hand.tickets] == [first.index]
    hand.end()
    assert [ticket.slot for ticket in hand.tickets] == [urgent.index]
    hand.end()
    assert [ticket.slot for ticket in hand.tickets] == [usual.index]


async def test_a_deadline_is_answered_though_the_work_goes_on_and_the_slot_is_kept_until_it_ended() -> None:
    lane, hand = pair()
    slot, answer = ask(lane, timeout=0.001)
    with pytest.raises(DeadlineExceeded, match="Request timeout expired"):
        await answer
    lane.release(slot)
    assert hand.cancelled == [slot.index]
    assert lane.statistics().abandoned == 1
    assert lane.slots.statistics().used == 1
    hand.end(Failure("cancelled", ""))
    assert lane.slots.statistics().used == 0


async def test_what_waits_is_withdrawn_and_never_reaches_the_worker() -> None:
    lane, hand = pair()
    ask(lane)
    waiting, _ = ask(lane)
    lane.release(waiting)
    assert lane.slots.statistics().used == 1
    hand.end()
    assert hand.tickets == []


async def test_a_completion_after_the_deadline_is_nobodys() -> None:
    lane, hand = pair()
    slot, answer = ask(lane, timeout=0.001)
    with pytest.raises(DeadlineExceeded):
        await answer
    hand.end()  # Before the owner came to release it.
    lane.release(slot)
    assert lane.slots.statistics().used == 0
    assert hand.cancelled == []


async def test_a_timer_does_not_outlive_its_request() -> None:
    lane, hand = pair()
    slot, answer = ask(lane, timeout=60)
    hand.end()
    await answer
    lane.release(slot)
    assert answer.exception() is None


@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        (Failure("raised", "boom"), Failed, "the model raised: boom"),
        (Failure("expired", ""), DeadlineExceeded, "Request timeout expired"),
    ],
)
async def test_a_failure_is_told_as_what_it_is(failure: Failure, error: type[Exception], text: str) -> None:
    lane, hand = pair()
    _, answer = ask(lane)
    hand.end(failure)
    with pytest.raises(error, match=text):
        await answer


async def test_a_paused_lane_takes_requests_and_launches_them_when_it_resumes() -> None:
    lane, hand = pair()
    lane.pause()
    slot, _ = ask(lane)
    assert hand.tickets == []
    lane.resume()
    assert [ticket.slot for ticket in hand.tickets] == [slot.index]


async def test_the_worker_is_not_swapped_while_work_is_in_flight() -> None:
    lane, hand = pair()
    ask(lane)
    with pytest.raises(RuntimeError, match="in flight"):
        lane.swap(cast(Worker, Hand(lane)))
    lane.pause()
    quiet = asyncio.ensure_future(lane.quiet())
    await asyncio.sleep(0)
    assert not quiet.done()
    hand.end()
    await quiet
    assert lane.swap(cast(Worker, Hand(lane))) is cast(Worker, hand)


async def test_empty_waits_for_every_request_and_forgotten_for_those_of_one_model() -> None:
    lane, hand = pair()
    slot, answer = ask(lane)
    other = asyncio.ensure_future(lane.forgotten("other/1#1"))
    mine = asyncio.ensure_future(lane.forgotten("m/1#1"))
    empty = asyncio.ensure_future(lane.empty())
    await asyncio.sleep(0)
    assert (other.done(), mine.done(), empty.done()) == (True, False, False)
    hand.end()
    await answer
    await asyncio.sleep(0)
    assert not mine.done()  # It is answered, but its tensors are still being read.
    lane.release(slot)
    await asyncio.gather(mine, empty)


async def test_whoever_waits_for_a_lane_may_give_up() -> None:
    lane, hand = pair()
    slot, _ = ask(lane)
    empty = asyncio.ensure_future(lane.empty())
    await asyncio.sleep(0)
    empty.cancel()
    await asyncio.sleep(0)
    hand.end()
    lane.release(slot)
    assert empty.cancelled()


async def test_a_draining_lane_refuses_new_requests_with_the_reason() -> None:
    lane, _ = pair()
    lane.refusing = "the server is draining"
    with pytest.raises(Unavailable, match="draining"):
        lane.admit()


async def test_a_lane_without_a_partition_says_so() -> None:
    lane = Lane("acme", Scheduler(1, 1), SlotPool())
    slot = lane.admit()
    with pytest.raises(Unavailable, match="'acme' has no partition yet"):
        lane.submit(slot, "m/1#1", SHAPES)


async def test_repr_says_how_it_is() -> None:
    lane, _ = pair()
    ask(lane)
    assert repr(lane).startswith("<Lane acme <Scheduler 0/2 waiting, 1/1 in flight>")
