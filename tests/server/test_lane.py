"""A lane over a link whose other end the test plays itself: who waits, who is told what, and when a slot is free again."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from server.errors import BadRequest, DeadlineExceeded, Failed, QueueFull, Unavailable
from server.lane import Lane
from server.link import Link
from server.scheduler import Scheduler
from server.slots import SMALLEST, Slot
from server.ticket import Done, Extent, Failure, Ticket
from tests.memory import linked

SHAPES = ((1,),)


class Hand:
    """In the device side's place: takes tickets and answers them when the test says so, and remembers what it was asked."""

    def __init__(self, link: Link) -> None:
        self.cancelled: list[tuple[int, int]] = []
        self.retiring: list[int] = []
        self._link = link
        self._tickets: list[Ticket] = []
        link.tickets.open()

    @property
    def tickets(self) -> list[Ticket]:
        """Those that came and were not answered."""
        while ticket := self._link.tickets.poll():
            self._tickets.append(ticket)
        return self._tickets

    def cancel(self, slot: int, serial: int) -> None:
        self.cancelled.append((slot, serial))

    def retire(self, slot: int) -> None:
        self.retiring.append(slot)

    async def end(self, failure: Failure | None = None, outputs: tuple[Extent, ...] = ()) -> None:
        """The oldest ticket ended, and the lane heard of it."""
        self._link.completions.put(Done(self.tickets.pop(0).slot, outputs, failure, 1, 2))
        self._link.completions.ring()
        await settle()


async def settle() -> None:
    """Let everything happen that can."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def link() -> Iterator[Link]:
    with linked(4) as link:
        yield link


@pytest.fixture
def hand(link: Link) -> Hand:
    return Hand(link)


@pytest.fixture
async def lane(link: Link, hand: Hand) -> AsyncIterator[Lane]:
    """With one credit and room for two to wait."""
    lane = Lane("acme", Scheduler(2, 1), link, hand)
    lane.open(asyncio.get_running_loop())
    yield lane
    lane.close(asyncio.get_running_loop())


def ask(lane: Lane, priority: int = 0, timeout: float | None = None) -> tuple[Slot, "asyncio.Future[Done]"]:
    slot = lane.admit()
    return slot, lane.submit(slot, "m/1#1", SHAPES, priority, timeout)


async def test_a_request_is_launched_answered_and_its_slot_used_again(lane: Lane, hand: Hand) -> None:
    slot, answer = ask(lane)
    assert hand.tickets == [Ticket(slot.index, 1, "m/1#1", SHAPES, float("inf"), SMALLEST)]
    await hand.end()
    assert (await answer).slot == slot.index
    lane.release(slot)
    assert lane.admit() is slot


async def test_what_is_in_a_slot_is_told_from_what_was_there_before(lane: Lane, hand: Hand) -> None:
    for serial in (1, 2):
        slot, _ = ask(lane)
        assert [(ticket.slot, ticket.serial) for ticket in hand.tickets] == [(0, serial)]
        await hand.end()
        lane.release(slot)


async def test_a_ticket_says_how_much_of_its_slot_may_be_used(lane: Lane, hand: Hand) -> None:
    slot = lane.admit()
    slot.reserve(3 * SMALLEST)
    lane.submit(slot, "m/1#1", SHAPES)
    assert hand.tickets[0].capacity == 4 * SMALLEST


async def test_a_ticket_too_long_to_be_told_is_refused_and_takes_nobodys_turn(lane: Lane, hand: Hand) -> None:
    slot = lane.admit()
    with pytest.raises(BadRequest, match="shapes too long to be told"):
        lane.submit(slot, "m/1#1", ((1 << 40,),) * 2000)
    lane.release(slot)
    _, answer = ask(lane)
    await hand.end()
    assert (await answer).failure is None
    assert lane.statistics().in_flight == 0


async def test_a_full_queue_refuses_and_counts(lane: Lane) -> None:
    for _ in range(3):
        ask(lane)
    with pytest.raises(QueueFull, match="Exceeds maximum queue size: 2 requests are waiting, and 2 may"):
        lane.admit()
    assert lane.statistics().rejected == 1
    assert lane.slots.statistics().used == 3


async def test_the_next_is_launched_when_one_ends_the_highest_priority_first(lane: Lane, hand: Hand) -> None:
    first, _ = ask(lane)
    usual, _ = ask(lane)
    urgent, _ = ask(lane, priority=1)
    assert [ticket.slot for ticket in hand.tickets] == [first.index]
    await hand.end()
    assert [ticket.slot for ticket in hand.tickets] == [urgent.index]
    await hand.end()
    assert [ticket.slot for ticket in hand.tickets] == [usual.index]


async def test_a_deadline_is_answered_though_the_work_goes_on_and_the_slot_is_kept_until_it_ended(
    lane: Lane, hand: Hand
) -> None:
    slot, answer = ask(lane, timeout=0.001)
    with pytest.raises(DeadlineExceeded, match="Request timeout expired"):
        await answer
    lane.release(slot)
    assert hand.cancelled == [(slot.index, 1)]
    assert lane.statistics().abandoned == 1
    assert lane.slots.statistics().used == 1
    await hand.end(Failure("cancelled", ""))
    assert lane.slots.statistics().used == 0


async def test_what_waits_is_withdrawn_and_never_reaches_the_worker(lane: Lane, hand: Hand) -> None:
    ask(lane)
    waiting, _ = ask(lane)
    lane.release(waiting)
    assert lane.slots.statistics().used == 1
    await hand.end()
    assert hand.tickets == []


async def test_a_completion_after_the_deadline_is_nobodys(lane: Lane, hand: Hand) -> None:
    slot, answer = ask(lane, timeout=0.001)
    with pytest.raises(DeadlineExceeded):
        await answer
    await hand.end()  # Before the owner came to release it.
    lane.release(slot)
    assert lane.slots.statistics().used == 0
    assert hand.cancelled == []


async def test_a_timer_does_not_outlive_its_request(lane: Lane, hand: Hand) -> None:
    slot, answer = ask(lane, timeout=60)
    await hand.end()
    await answer
    lane.release(slot)
    assert answer.exception() is None


@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        (Failure("raised", "boom"), Failed, "the model raised: boom"),
        (Failure("expired", ""), DeadlineExceeded, "Request timeout expired"),
        (Failure("lost", "CUDA error 700"), Unavailable, "the device is lost: CUDA error 700"),
    ],
)
async def test_a_failure_is_told_as_what_it_is(
    lane: Lane, hand: Hand, failure: Failure, error: type[Exception], text: str
) -> None:
    _, answer = ask(lane)
    await hand.end(failure)
    with pytest.raises(error, match=text):
        await answer


async def test_a_slot_that_grew_over_the_limit_is_retired_and_used_again_once_that_is_done(lane: Lane, hand: Hand) -> None:
    slot, _ = ask(lane)
    await hand.end(outputs=(Extent((1 << 29,), 0, 1 << 29),))
    lane.release(slot)
    assert hand.retiring == [slot.index]
    other, _ = ask(lane)
    assert other is not slot
    lane.slots.retired(slot.index)
    again = lane.admit()
    assert again is slot
    assert again.capacity == SMALLEST


async def test_an_abandoned_slot_that_grew_is_retired_when_its_work_has_ended_and_no_sooner(lane: Lane, hand: Hand) -> None:
    slot = lane.admit()
    slot.reserve(1 << 29)
    lane.submit(slot, "m/1#1", SHAPES)
    lane.release(slot)
    assert hand.retiring == []
    await hand.end(Failure("cancelled", ""))
    assert hand.retiring == [slot.index]


async def test_the_backlog_counts_what_waits_by_model(lane: Lane, hand: Hand) -> None:
    for model in ("a", "a", "b"):
        lane.submit(lane.admit(), model, SHAPES)
    assert lane.backlog() == {"a": 1, "b": 1}
    await hand.end()
    assert lane.backlog() == {"b": 1}
    await hand.end()
    assert lane.backlog() == {}


async def test_a_lane_that_is_closed_hears_no_more_and_what_was_said_meanwhile_when_it_opens_again(
    lane: Lane, hand: Hand
) -> None:
    loop = asyncio.get_running_loop()
    _, answer = ask(lane)
    lane.close(loop)
    await hand.end()
    assert not answer.done()
    lane.open(loop)
    await answer


async def test_empty_waits_for_every_request_and_forgotten_for_those_of_one_model(lane: Lane, hand: Hand) -> None:
    slot, answer = ask(lane)
    other = asyncio.ensure_future(lane.forgotten("other/1#1"))
    mine = asyncio.ensure_future(lane.forgotten("m/1#1"))
    empty = asyncio.ensure_future(lane.empty())
    await asyncio.sleep(0)
    assert (other.done(), mine.done(), empty.done()) == (True, False, False)
    await hand.end()
    await answer
    await asyncio.sleep(0)
    assert not mine.done()  # It is answered, but its tensors are still being read.
    lane.release(slot)
    await asyncio.gather(mine, empty)


async def test_whoever_waits_for_a_lane_may_give_up(lane: Lane, hand: Hand) -> None:
    slot, _ = ask(lane)
    empty = asyncio.ensure_future(lane.empty())
    await asyncio.sleep(0)
    empty.cancel()
    await asyncio.sleep(0)
    await hand.end()
    lane.release(slot)
    assert empty.cancelled()


async def test_a_draining_lane_refuses_new_requests_with_the_reason(lane: Lane) -> None:
    lane.refusing = "the server is draining"
    with pytest.raises(Unavailable, match="draining"):
        lane.admit()


async def test_repr_says_how_it_is(lane: Lane) -> None:
    ask(lane)
    assert repr(lane).startswith("<Lane acme <Scheduler 0/2 waiting, 1/1 in flight>")
