"""A lane whose event loop gets no turn for its timers: deadlines that passed are told by whatever the lane is asked next."""

import asyncio
import math
import time
from collections.abc import Iterator

import pytest

from server.errors import DeadlineExceeded, QueueFull, RequestError
from server.link.messages import Done
from server.link.ring import Link
from server.scheduling.lane import Lane
from server.scheduling.scheduler import Scheduler
from tests.memory import linked

SHAPES = ((1,),)
SHORT = 0.001
"""Seconds that a request has."""


class Nobody:
    """In the device side's place: takes its time for ever."""

    def cancel(self, slot: int, serial: int) -> None: ...


@pytest.fixture
def link() -> Iterator[Link]:
    with linked(8) as link:
        yield link


@pytest.fixture
def lane(link: Link) -> Lane:
    return Lane("a", Scheduler(2, 1), link, Nobody())


def hold_up(until: float) -> None:
    """Keep the event loop from its timers until this time has passed, as a turn of much work does."""
    while time.monotonic() <= until:
        pass


def begin(lane: Lane, told: list[Done | RequestError], timeout: float | None = None) -> float:
    """Begin a request, and return its deadline or a little after it."""
    lane.submit(lane.take_slot(), "m/1#1", SHAPES, told.append, timeout=timeout)
    return time.monotonic() + (timeout or 0)


async def test_a_request_that_comes_after_a_deadline_has_that_told_first(lane: Lane) -> None:
    told: list[Done | RequestError] = []
    hold_up(begin(lane, told, SHORT))
    lane.check_room()
    assert [type(end) for end in told] == [DeadlineExceeded]
    assert lane.statistics().expired == 1


async def test_a_request_that_is_refused_has_it_told_as_well(lane: Lane) -> None:
    told: list[Done | RequestError] = []
    begin(lane, [])
    begin(lane, [])
    hold_up(begin(lane, told, SHORT))
    with pytest.raises(QueueFull):
        lane.check_room()
    assert [type(end) for end in told] == [DeadlineExceeded]


async def test_a_completion_that_is_heard_after_a_deadline_has_that_told_first(lane: Lane, link: Link) -> None:
    order: list[Done | RequestError] = []
    slot = lane.take_slot()
    lane.submit(slot, "m/1#1", SHAPES, order.append)
    hold_up(begin(lane, order, SHORT))
    link.completions.put(Done(slot.index, (), None, 1, 2))
    link.completions.ring()
    lane._on_completions()
    assert [type(end) for end in order] == [DeadlineExceeded, Done]


async def test_a_request_that_was_released_is_told_nothing(lane: Lane) -> None:
    told: list[Done | RequestError] = []
    slot = lane.take_slot()
    lane.submit(slot, "m/1#1", SHAPES, told.append, timeout=SHORT)
    due = time.monotonic() + SHORT
    lane.release(slot)
    hold_up(due)
    lane.check_room()
    assert told == []


async def test_a_lane_that_was_closed_tells_of_no_deadline(lane: Lane) -> None:
    told: list[Done | RequestError] = []
    loop = asyncio.get_running_loop()
    lane.open(loop)
    due = begin(lane, told, SHORT)
    lane.close(loop)
    hold_up(due)
    lane.check_room()
    assert told == []
    assert math.isfinite(due)
