"""A lane over a link of which the test plays the device side."""

from collections.abc import AsyncIterator, Iterator

import pytest

from server.link.ring import Link
from server.scheduling.lane import Lane
from server.scheduling.scheduler import Scheduler
from tests.memory import linked

from .hand import SLOTS, Hand, opened


@pytest.fixture
def link() -> Iterator[Link]:
    with linked(SLOTS) as link:
        yield link


@pytest.fixture
def hand(link: Link) -> Hand:
    return Hand(link)


@pytest.fixture
def scheduler() -> Scheduler:
    """One in flight, eight may wait."""
    return Scheduler(8, 1)


@pytest.fixture
async def lane(link: Link, hand: Hand, scheduler: Scheduler) -> AsyncIterator[Lane]:
    with opened(link, hand, scheduler) as lane:
        yield lane
