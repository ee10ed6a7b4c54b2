"""A model whose own configuration limits how many of its requests wait, and for how long, in a lane that has room for more."""

import asyncio

from server.errors import DeadlineExceeded, RequestError, Unavailable
from server.link.messages import Done
from server.scheduling.lane import Lane
from server.scheduling.queue_policy import Batching, QueueLimits, QueuePolicy

from .hand import BATCHING, ROWS, SHAPES, Hand

KEY = "dynamic_batching.default_queue_policy"
FULL = f"Exceeds maximum queue size: 1 may wait for this model, and as many do ({KEY}.max_queue_size)"
SHORT = 0.01
TIRED = f"Request timeout expired: 10000 microseconds in the queue ({KEY}.default_timeout_microseconds)"
ONE = QueuePolicy(QueueLimits(1, 0, KEY))
SOON = QueuePolicy(QueueLimits(0, SHORT, KEY))


class Asked:
    """A submitted request and how it ended."""

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
        self.ends: list[Done | RequestError] = []
        shapes = ((1, 2),) if batching else SHAPES
        if batching:
            self.slot.lay_out(ROWS, [8])
        try:
            lane.submit(self.slot, model, shapes, self.on_end, priority, timeout, batching, queues)
        except RequestError as error:
            self.on_end(error)

    def on_end(self, end: Done | RequestError) -> None:
        """Record the end and release the slot, as a handler of requests does."""
        self.ends.append(end)
        self.lane.release(self.slot)

    async def end(self) -> Done | RequestError:
        while not self.ends:
            await asyncio.sleep(0)
        (end,) = self.ends
        return end


async def test_a_full_model_queue_refuses_as_triton_does(lane: Lane, hand: Hand) -> None:
    first, second, third = [Asked(lane, ONE) for _ in range(3)]
    (refused,) = third.ends
    assert (type(refused), str(refused)) == (Unavailable, FULL)
    assert (first.ends, second.ends, lane.statistics().rejected) == ([], [], 1)
    await hand.end()
    await hand.end()
    assert [type(await each.end()) for each in (first, second)] == [Done, Done]


async def test_with_priority_levels_each_has_a_queue_of_its_own(lane: Lane, hand: Hand) -> None:
    queues = QueuePolicy(QueueLimits(1, 0, KEY), 3, 2, {3: QueueLimits(2, 0, "of 3")})
    ends = [len(Asked(lane, queues, priority=priority).ends) for priority in (1, 1, 1, 2, 0, 9, 3, 3, 3)]
    assert ends == [0, 0, 1, 0, 1, 1, 0, 0, 1]


async def test_a_request_without_a_priority_gets_the_default_level(lane: Lane, hand: Hand) -> None:
    queues = QueuePolicy(QueueLimits(0, 0, KEY), 3, 1)
    asked = [Asked(lane, queues, priority=priority) for priority in (2, 3, 2, 0, 4)]
    launched = []
    for _ in asked:
        launched += [ticket.slot for ticket in hand.tickets]
        await hand.end()
    assert launched == [asked[place].slot.index for place in (0, 3, 4, 2, 1)]


async def test_a_request_that_waits_too_long_is_refused_and_one_that_runs_is_not(lane: Lane, hand: Hand) -> None:
    first, second = Asked(lane, SOON), Asked(lane, SOON)
    refused = await second.end()
    assert (type(refused), str(refused)) == (Unavailable, TIRED)
    assert (first.ends, lane.statistics().expired) == ([], 1)
    await hand.end()
    assert isinstance(await first.end(), Done)
    assert hand.tickets == []


async def test_a_batched_request_does_not_expire_while_it_runs(lane: Lane, hand: Hand) -> None:
    asked = [Asked(lane, SOON, batching=BATCHING) for _ in range(3)]
    await hand.end()
    (ticket,) = hand.tickets
    assert ticket.shapes == ((2, 2),)
    late = Asked(lane, SOON, model="n/1#1")
    assert str(await late.end()) == TIRED
    assert [each.ends for each in asked[1:]] == [[], []]


async def test_the_earlier_of_a_requests_timeout_and_the_queues_counts(lane: Lane) -> None:
    Asked(lane, None)
    soon = QueuePolicy(QueueLimits(0, 60, KEY))
    assert isinstance(await Asked(lane, soon, timeout=SHORT).end(), DeadlineExceeded)
    assert str(await Asked(lane, SOON, timeout=60).end()) == TIRED
    assert len(lane.deadlines) == 0
