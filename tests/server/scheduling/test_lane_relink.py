"""A lane whose device side ends, or is replaced by another one while it serves; the test plays both device sides."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from server.errors import Unavailable
from server.link import ring as links
from server.link.blocks import UNIT
from server.link.messages import Extent, Failure
from server.link.ring import Descriptors, Link
from server.scheduling.lane import Lane
from server.scheduling.scheduler import Scheduler
from tests.lanes import submit
from tests.memory import MEMORY

from .hand import SHAPES, SLOTS, Hand, ask, give, given, opened, rows_out, settle

LOST = "the device's process has ended"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Links:
    """Makes links to the same tensor memory. Each is attached twice, as by two processes: by the lane, and by a hand."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        first = self._create(MEMORY)
        self.memory = links.attach(first).arena.memory
        self.link, self.hand = self._attach(first)

    def close(self) -> None:
        self._stack.close()

    def another(self) -> tuple[Link, Hand]:
        return self._attach(self._create(UNIT))

    def _create(self, nbytes: int) -> Descriptors:
        descriptors = links.create(SLOTS, nbytes)
        self._stack.callback(descriptors.close)
        return descriptors

    def _attach(self, descriptors: Descriptors) -> tuple[Link, Hand]:
        link, there = (links.attach(descriptors, self.memory) for _ in range(2))
        return link, Hand(there)


@pytest.fixture
def made() -> Iterator[Links]:
    made = Links()
    yield made
    made.close()


@pytest.fixture
def link(made: Links) -> Link:
    return made.link


@pytest.fixture
def hand(made: Links) -> Hand:
    return made.hand


@pytest.fixture
def another(made: Links) -> Callable[[], tuple[Link, Hand]]:
    return made.another


def reason(answer: "asyncio.Future[object]") -> str:
    error = answer.exception()
    assert isinstance(error, Unavailable)
    return str(error)


@pytest.mark.parametrize("released", [0, 1, 2])
async def test_the_slot_of_a_batch_is_free_when_its_members_are(lane: Lane, hand: Hand, released: int) -> None:
    first, _ = ask(lane)
    made = [give(lane) for _ in range(2)]
    await hand.end()
    lane.release(first)
    assert [ticket.shapes for ticket in hand.tickets] == [((2, 2),)]
    for slot, _ in made[:released]:
        lane.release(slot)
    lane.fail_in_flight(LOST)
    for slot, answer in made[released:]:
        assert reason(answer) == LOST
        lane.release(slot)
    assert lane.slots.statistics().used == 0
    assert lane.slots.statistics().nbytes == 0
    assert lane.statistics()[:3] == (0, 0, 0)
    await lane.drained()


async def test_queued_requests_fail_and_new_ones_are_refused(lane: Lane, another: Callable[[], tuple[Link, Hand]]) -> None:
    asked = [ask(lane) for _ in range(3)]
    lane.fail_in_flight(LOST)
    assert [reason(answer) for _, answer in asked] == [LOST] * 3
    for slot, _ in asked:
        lane.release(slot)
    with pytest.raises(Unavailable, match=LOST):
        lane.take_slot()
    new, second = another()
    assert await lane.relink(new)
    with pytest.raises(Unavailable, match=LOST):
        lane.take_slot()  # Its models may still have to be loaded.
    lane.suspend("")
    _, answer = ask(lane)
    await second.end()
    assert answer.done()


async def test_queued_requests_can_wait_for_the_next_device_side(
    lane: Lane, hand: Hand, another: Callable[[], tuple[Link, Hand]]
) -> None:
    (first, failed), (second, waiting) = ask(lane), ask(lane)
    assert [ticket.slot for ticket in hand.tickets] == [first.index]
    lane.fail_in_flight(LOST, queued=False)
    assert reason(failed) == LOST
    lane.release(first)
    third, later = ask(lane)
    await settle()
    assert [ticket.slot for ticket in hand.tickets] == [first.index], "nothing more is launched"
    new, next_hand = another()
    assert await lane.relink(new)
    assert [ticket.slot for ticket in next_hand.tickets] == [second.index]
    await next_hand.end()
    assert [ticket.slot for ticket in next_hand.tickets] == [third.index]
    await next_hand.end()
    assert (waiting.done(), later.done()) == (True, True)


async def test_requests_that_were_not_sent_yet_when_the_device_side_ends_go_over_the_next_link(
    link: Link, hand: Hand, another: Callable[[], tuple[Link, Hand]]
) -> None:
    with opened(link, hand, Scheduler(8, 3)) as lane:
        asked = [ask(lane) for _ in range(3)]  # The second and third are sent in the next iteration of the event loop.
        lane.fail_in_flight(LOST, queued=False)
        new, second = another()
        assert await lane.relink(new)
        await settle()
        assert [ticket.slot for ticket in hand.tickets] == [asked[0][0].index]
        assert [ticket.slot for ticket in second.tickets] == [asked[1][0].index, asked[2][0].index]


async def test_completions_that_come_too_late_are_not_read(
    lane: Lane, hand: Hand, another: Callable[[], tuple[Link, Hand]]
) -> None:
    slot, _ = ask(lane)
    lane.fail_in_flight(LOST, queued=False)
    lane.release(slot)
    await hand.end()
    new, second = another()
    assert await lane.relink(new)
    _, answer = ask(lane)
    await settle()
    assert not answer.done()
    await second.end()
    assert answer.done()


async def test_relink_waits_for_what_is_in_flight_and_queued_requests_go_on(
    lane: Lane, hand: Hand, another: Callable[[], tuple[Link, Hand]]
) -> None:
    asked = [ask(lane) for _ in range(3)]
    new, second = another()
    relinked = asyncio.ensure_future(lane.relink(new))
    await settle()
    asked.append(ask(lane, priority=1))
    assert second.tickets == []
    await hand.end()
    assert await relinked
    assert asked[0][1].done()
    for slot in (asked[3][0], asked[1][0], asked[2][0]):
        assert [ticket.slot for ticket in second.tickets] == [slot.index]
        await second.end()
    assert all(answer.exception() is None for _, answer in asked)
    assert hand.tickets == []


async def test_as_many_requests_can_wait_while_the_link_changes_as_could_be_queued_and_launched(
    lane: Lane, another: Callable[[], tuple[Link, Hand]]
) -> None:
    lane.fail_in_flight(LOST, queued=False)
    asked = [ask(lane) for _ in range(9)]
    new, second = another()
    assert await lane.relink(new)
    for _, answer in asked:
        await second.end()
        assert answer.done()


async def test_the_old_link_stays_when_the_work_does_not_end(
    lane: Lane, hand: Hand, another: Callable[[], tuple[Link, Hand]]
) -> None:
    _, answer = ask(lane)
    waiting, other = ask(lane)
    new, second = another()
    assert not await lane.relink(new, 0.001)
    await hand.end()
    assert answer.done()
    assert [ticket.slot for ticket in hand.tickets] == [waiting.index]
    await hand.end()
    assert other.done()
    assert second.tickets == []


async def test_what_could_be_launched_meanwhile_is_launched_when_the_work_does_not_end(
    link: Link, hand: Hand, another: Callable[[], tuple[Link, Hand]]
) -> None:
    with opened(link, hand, Scheduler(8, 2)) as lane:
        ask(lane)
        relinked = asyncio.ensure_future(lane.relink(another()[0], 0.001))
        await settle()
        slot, _ = ask(lane)
        assert len(hand.tickets) == 1
        assert not await relinked
        await settle()
        assert [ticket.slot for ticket in hand.tickets][1:] == [slot.index]


async def test_a_relink_that_is_cancelled_leaves_the_old_link(
    lane: Lane, hand: Hand, another: Callable[[], tuple[Link, Hand]]
) -> None:
    ask(lane)
    slot, _ = ask(lane)
    relinked = asyncio.ensure_future(lane.relink(another()[0]))
    await settle()
    relinked.cancel()
    await settle()
    await hand.end()
    assert [ticket.slot for ticket in hand.tickets] == [slot.index]


async def test_a_device_side_that_ends_while_the_link_changes_is_waited_for_no_longer(
    lane: Lane, another: Callable[[], tuple[Link, Hand]]
) -> None:
    _, answer = ask(lane)
    slot, waiting = ask(lane)
    new, second = another()
    relinked = asyncio.ensure_future(lane.relink(new))
    await settle()
    lane.fail_in_flight(LOST, queued=False)
    assert reason(answer) == LOST
    assert await relinked
    assert [ticket.slot for ticket in second.tickets] == [slot.index]
    await second.end()
    assert waiting.done()


async def test_a_relink_that_is_cancelled_as_the_device_side_ends_launches_nothing(
    lane: Lane, hand: Hand, another: Callable[[], tuple[Link, Hand]]
) -> None:
    first, _ = ask(lane)
    relinked = asyncio.ensure_future(lane.relink(another()[0]))
    await settle()
    lane.fail_in_flight(LOST, queued=False)
    relinked.cancel()
    lane.release(first)
    slot, answer = ask(lane)
    await settle()
    assert relinked.cancelled()
    assert len(hand.tickets) == 1, "only the first"
    new, second = another()
    assert await lane.relink(new)
    assert [ticket.slot for ticket in second.tickets] == [slot.index]
    await second.end()
    assert answer.done()


async def test_two_relinks_at_once_take_turns(lane: Lane, hand: Hand, another: Callable[[], tuple[Link, Hand]]) -> None:
    ask(lane)
    slot, answer = ask(lane)
    made = [another(), another()]
    hands = [hand for _, hand in made]
    relinked = [asyncio.ensure_future(lane.relink(link)) for link, _ in made]
    await settle()
    await hand.end()
    while not relinked[0].done():
        await asyncio.sleep(0)
    await settle()
    for each in hands:
        if each.tickets:
            await each.end()
    assert await asyncio.gather(*relinked) == [True, True]
    assert answer.done()
    last, _ = ask(lane)
    assert [[ticket.slot for ticket in each.tickets] for each in hands] == [[], [last.index]]
    assert slot.index != last.index


async def test_tensors_survive_a_relink(lane: Lane, hand: Hand, another: Callable[[], tuple[Link, Hand]]) -> None:
    """A request that is being decoded, one that is queued, and one that is being encoded."""
    encoding, answer = ask(lane)
    encoding.reserve(64)
    encoding.view[:3] = b"out"
    await hand.end()
    await answer
    running, _ = give(lane)
    queued, _ = give(lane)
    decoding = lane.take_slot()
    decoding.reserve(64)
    decoding.view[:2] = b"in"
    new, second = another()
    relinked = asyncio.ensure_future(lane.relink(new))
    await settle()
    await hand.end(outputs=rows_out(1))
    assert await relinked
    assert bytes(encoding.view[:3]) == b"out"
    assert given(new, second.tickets[0]) == [queued.index]
    submit(lane, decoding, "m", SHAPES)
    await second.end(outputs=rows_out(1))
    (ticket,) = second.tickets
    assert bytes(new.arena.slot(ticket.slot).view[:2]) == b"in"
    assert (ticket.capacity, ticket.start) == (decoding.capacity, decoding.start)
    lane.release(encoding)
    lane.release(running)
    assert lane.take_slot() is running
    assert lane.take_slot() is encoding


async def test_a_batch_of_the_old_link_that_is_retried_alone_goes_over_the_new_one(
    lane: Lane, hand: Hand, another: Callable[[], tuple[Link, Hand]]
) -> None:
    ask(lane)
    made = [give(lane) for _ in range(2)]
    await hand.end()
    new, second = another()
    relinked = asyncio.ensure_future(lane.relink(new))
    await settle()
    await hand.end(Failure("raised", "a bad row"))
    assert await relinked
    for slot, answer in made:
        assert [ticket.slot for ticket in second.tickets] == [slot.index]
        await second.end(outputs=rows_out(1))
        assert answer.done()


async def test_batches_go_over_the_new_link(lane: Lane, another: Callable[[], tuple[Link, Hand]]) -> None:
    new, second = another()
    assert await lane.relink(new)
    ask(lane)
    made = [give(lane) for _ in range(2)]
    await second.end()
    (ticket,) = second.tickets
    assert given(new, ticket) == [slot.index for slot, _ in made]


async def test_what_the_new_device_side_has_said_counts(
    lane: Lane, scheduler: Scheduler, link: Link, another: Callable[[], tuple[Link, Hand]]
) -> None:
    slot, _ = ask(lane)
    link.completions.report_deferred(1)
    await settle()
    lane.fail_in_flight(LOST, queued=False)
    lane.release(slot)
    new, _ = another()
    new.completions.set_on_host_cores(True)
    assert await lane.relink(new)
    assert (scheduler.deferred, scheduler.on_host_cores) == (0, True)


async def test_a_link_with_other_memory_or_fewer_slots_is_refused(lane: Lane, hand: Hand, link: Link) -> None:
    for count, memory in ((SLOTS, None), (SLOTS - 1, link.arena.memory)):
        descriptors = links.create(count, UNIT)
        wrong = links.attach(descriptors, memory)
        with pytest.raises(ValueError, match="not as many slots, or not the same tensor memory"):
            await lane.relink(wrong)
        descriptors.close()
    _, answer = ask(lane)
    await hand.end()
    assert answer.done()


async def test_both_ends_in_one_process() -> None:
    before = links.create(SLOTS, UNIT)
    after = links.renew(before)
    link = links.join(before)
    hand = Hand(link)
    with opened(link, hand, Scheduler(8, 1)) as lane:
        _, first = ask(lane)
        queued, second = ask(lane)
        new = links.join(after, memory=link.arena.memory)
        next_hand = Hand(new)
        relinked = asyncio.ensure_future(lane.relink(new))
        await settle()
        await hand.end()
        assert await relinked
        assert [ticket.slot for ticket in next_hand.tickets] == [queued.index]
        await next_hand.end()
        assert (first.done(), second.done()) == (True, True)
    before.close()
    after.close()


async def test_old_links_are_unmapped(lane: Lane, hand: Hand, made: Links) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:greenlane ")

    slot, _ = ask(lane)
    await hand.end()
    lane.release(slot)
    counts = []
    for _ in range(3):
        descriptors = links.create(SLOTS, UNIT)
        assert await lane.relink(links.attach(descriptors, made.memory))
        descriptors.close()
        counts.append(mapped())
    assert counts[1] == counts[2]


async def test_an_answer_between_two_parts_goes_on_over_another_link_and_its_ticket_names_the_last(
    lane: Lane, hand: Hand, another: Callable[[], tuple[Link, Hand]]
) -> None:
    slot = lane.take_slot()
    lane.submit(slot, "m", SHAPES, lambda end: None, in_parts=True)
    await hand.end(outputs=(Extent((1,), 0, 4),))
    link, other = another()
    assert await lane.relink(link)
    lane.proceed(slot)
    assert [(ticket.serial, ticket.after) for ticket in other.tickets] == [(2, 1)]
