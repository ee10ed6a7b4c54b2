"""A model whose own configuration limits how many of its requests wait, and for how long, in a lane that has room for more."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from server.errors import DeadlineExceeded, RequestError, Unavailable
from server.link.messages import Done
from server.link.ring import Link
from server.scheduling.batching import Batching
from server.scheduling.lane import Lane
from server.scheduling.queue_policy import QueueLimits, QueuePolicy
from server.scheduling.scheduler import Scheduler
from tests.memory import linked

from .test_lane import BATCHING, ROWS, SHAPES, Hand

KEY = "dynamic_batching.default_queue_policy"
FULL = f"Exceeds maximum queue size: 1 may wait for this model, and as many do ({KEY}.max_queue_size)"
SHORT = 0.01
TIRED = f"Request timeout expired: 10000 microseconds in the queue ({KEY}.default_timeout_microseconds)"
ONE = QueuePolicy(QueueLimits(1, 0, KEY))
SOON = QueuePolicy(QueueLimits(0, SHORT, KEY))


@pytest.fixture
def link() -> Iterator[Link]:
    with linked(12) as link:
        yield link


@pytest.fixture
def hand(link: Link) -> Hand:
    return Hand(link)


@pytest.fixture
async def lane(link: Link, hand: Hand) -> AsyncIterator[Lane]:
    """One in flight, many may wait."""
    lane = Lane("acme", Scheduler(8, 1), link, hand)
    lane.open(asyncio.get_running_loop())
    yield lane
    lane.close(asyncio.get_running_loop())


class Asked:
    """A request, and what it was told."""

    def __init__(
        self,
        lane: Lane,
        queues: QueuePolicy | None,
        model: str = "m/1#1",
        priority: int = 0,
        timeout: float | None = None,
        batching: Batching | None = None,
    ) -> None:
        self.lane, self.slot = lane, lane.take_slot()
        self.told: list[Done | RequestError] = []
        shapes = ((1, 2),) if batching else SHAPES
        if batching:
            self.slot.lay_out(ROWS, [8])
        try:
            lane.submit(self.slot, model, shapes, self.hear, priority, timeout, batching, queues)
        except RequestError as error:
            self.hear(error)

    def hear(self, end: Done | RequestError) -> None:
        """As whoever asks does: the slot is given back with whatever came."""
        self.told.append(end)
        self.lane.release(self.slot)

    async def hears(self) -> Done | RequestError:
        while not self.told:
            await asyncio.sleep(0)
        (end,) = self.told
        return end


async def test_one_more_than_may_wait_is_refused_as_triton_does(lane: Lane, hand: Hand) -> None:
    first, second, third = [Asked(lane, ONE) for _ in range(3)]
    (refused,) = third.told
    assert (type(refused), str(refused)) == (Unavailable, FULL)
    assert (first.told, second.told, lane.statistics().rejected) == ([], [], 1)
    await hand.end()
    await hand.end()
    assert [type(await each.hears()) for each in (first, second)] == [Done, Done]


async def test_another_model_has_a_queue_of_its_own(lane: Lane) -> None:
    for model in ("m/1#1", "m/1#1", "n/1#1", "o/1#1"):
        assert Asked(lane, ONE, model).told == []
    assert Asked(lane, None).told == []


async def test_a_queue_is_not_full_again_once_one_of_it_runs(lane: Lane, hand: Hand) -> None:
    for _ in range(2):
        Asked(lane, ONE)
    await hand.end()
    assert Asked(lane, ONE).told == []


async def test_each_priority_has_a_queue_of_its_own_where_there_are_levels(lane: Lane, hand: Hand) -> None:
    queues = QueuePolicy(QueueLimits(1, 0, KEY), 3, 2, {3: QueueLimits(2, 0, "of 3")})
    told = [len(Asked(lane, queues, priority=priority).told) for priority in (1, 1, 1, 2, 0, 9, 3, 3, 3)]
    assert told == [0, 0, 1, 0, 1, 1, 0, 0, 1]


async def test_a_request_without_a_priority_has_the_usual_one(lane: Lane, hand: Hand) -> None:
    queues = QueuePolicy(QueueLimits(0, 0, KEY), 3, 1)
    asked = [Asked(lane, queues, priority=priority) for priority in (2, 3, 2, 0, 4)]
    launched = []
    for _ in asked:
        launched += [ticket.slot for ticket in hand.tickets]
        await hand.end()
    assert launched == [asked[place].slot.index for place in (0, 3, 4, 2, 1)]


async def test_what_waits_too_long_is_refused_and_what_runs_is_not(lane: Lane, hand: Hand) -> None:
    first, second = Asked(lane, SOON), Asked(lane, SOON)
    refused = await second.hears()
    assert (type(refused), str(refused)) == (Unavailable, TIRED)
    assert (first.told, lane.statistics().expired) == ([], 1)
    await hand.end()
    assert isinstance(await first.hears(), Done)
    assert hand.tickets == []


async def test_what_gets_its_turn_in_time_is_left_alone(lane: Lane, hand: Hand) -> None:
    asked = [Asked(lane, SOON), Asked(lane, SOON)]
    await hand.end()
    await asyncio.gather(Asked(lane, SOON).hears())
    assert asked[1].told == []
    await hand.end()
    assert isinstance(await asked[1].hears(), Done)


async def test_what_runs_with_others_is_left_alone(lane: Lane, hand: Hand) -> None:
    asked = [Asked(lane, SOON, batching=BATCHING) for _ in range(3)]
    await hand.end()
    (ticket,) = hand.tickets
    assert ticket.shapes == ((2, 2),)
    late = Asked(lane, SOON, model="n/1#1")
    assert str(await late.hears()) == TIRED
    assert [each.told for each in asked[1:]] == [[], []]


async def test_a_requests_own_deadline_holds_as_well(lane: Lane) -> None:
    Asked(lane, None)
    soon = QueuePolicy(QueueLimits(0, 60, KEY))
    assert isinstance(await Asked(lane, soon, timeout=SHORT).hears(), DeadlineExceeded)
    assert str(await Asked(lane, SOON, timeout=60).hears()) == TIRED
    assert len(lane.deadlines) == 0
