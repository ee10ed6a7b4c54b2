"""Deadlines that passed while the event loop was too busy for its timers are reported by the lane's next call."""

import asyncio
import math
import time

import pytest

from server.errors import DeadlineExceeded, QueueFull, RequestError
from server.link.messages import Done
from server.link.ring import Link
from server.scheduling.lane import Lane
from server.scheduling.scheduler import Scheduler

from .hand import SHAPES, Hand, settle

SHORT = 0.001
"""Seconds of a request's timeout."""


@pytest.fixture
def lane(link: Link, hand: Hand) -> Lane:
    """Not open, so no timer of the event loop reports anything."""
    return Lane("a", Scheduler(2, 1), link, hand)


def hold_up(until: float) -> None:
    """Block the event loop, and so its timers, until this time of `time.monotonic` has passed."""
    while time.monotonic() <= until:
        pass


def begin(lane: Lane, ends: list[Done | RequestError], timeout: float | None = None) -> float:
    """Submit a request, and return its deadline or a time shortly after it."""
    lane.submit(lane.take_slot(), "m/1#1", SHAPES, ends.append, timeout=timeout)
    return time.monotonic() + (timeout or 0)


async def test_check_room_reports_a_passed_deadline_before_it_raises_queue_full(lane: Lane) -> None:
    ends: list[Done | RequestError] = []
    begin(lane, [])
    begin(lane, [])
    hold_up(begin(lane, ends, SHORT))
    with pytest.raises(QueueFull):
        lane.admission.check_room()
    assert [type(end) for end in ends] == [DeadlineExceeded]


async def test_a_passed_deadline_is_reported_before_a_later_completion(lane: Lane, link: Link) -> None:
    order: list[Done | RequestError] = []
    slot = lane.take_slot()
    lane.submit(slot, "m/1#1", SHAPES, order.append)
    hold_up(begin(lane, order, SHORT))
    link.completions.put(Done(slot.index, (), None, 1, 2))
    link.completions.ring()
    lane.open(asyncio.get_running_loop())
    await settle()
    assert [type(end) for end in order] == [DeadlineExceeded, Done]


async def test_a_released_request_gets_no_deadline_error(lane: Lane) -> None:
    ends: list[Done | RequestError] = []
    slot = lane.take_slot()
    lane.submit(slot, "m/1#1", SHAPES, ends.append, timeout=SHORT)
    due = time.monotonic() + SHORT
    lane.release(slot)
    hold_up(due)
    lane.admission.check_room()
    assert ends == []


async def test_a_closed_lane_reports_no_deadlines(lane: Lane) -> None:
    ends: list[Done | RequestError] = []
    loop = asyncio.get_running_loop()
    lane.open(loop)
    due = begin(lane, ends, SHORT)
    lane.close(loop)
    hold_up(due)
    lane.admission.check_room()
    assert ends == []
    assert math.isfinite(due)
