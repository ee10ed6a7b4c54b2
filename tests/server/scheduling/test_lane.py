"""Lane over a link of which the test plays the device side: queueing, answers, errors, batches, and when slots are freed."""

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from server.errors import BadRequest, DeadlineExceeded, Failed, Outgrown, QueueFull, Unavailable
from server.link.messages import Done, Extent, Failure
from server.link.ring import Link
from server.link.slots import SMALLEST, Slot
from server.scheduling.lane import Lane
from server.scheduling.queue_policy import Batching
from server.scheduling.scheduler import Scheduler
from tests.lanes import submit
from tests.passing_time import pass_time

from .hand import BATCHING, ROWS, SHAPES, Hand, ask, give, given, opened, rows_out, settle

"""Seconds of a batch's delay, long enough for a slow machine to do within it what a test needs."""


@pytest.fixture
def scheduler() -> Scheduler:
    """One in flight, two may wait."""
    return Scheduler(2, 1)


@pytest.fixture
async def batchable(link: Link, hand: Hand) -> AsyncIterator[Lane]:
    """With an in-flight limit of one and room for eight to wait."""
    with opened(link, hand, Scheduler(8, 1)) as lane:
        yield lane


@pytest.fixture
async def ahead(link: Link, hand: Hand) -> AsyncIterator[Lane]:
    """With an in-flight limit of two and room for eight to wait."""
    with opened(link, hand, Scheduler(8, 2)) as lane:
        yield lane


async def test_a_ticket_too_long_for_the_link_is_refused_and_leaves_the_queue_as_it_was(lane: Lane, hand: Hand) -> None:
    slot = lane.take_slot()
    with pytest.raises(BadRequest, match="shapes too long to send"):
        submit(lane, slot, "m/1#1", ((1 << 40,),) * 2000)
    lane.release(slot)
    _, answer = ask(lane)
    await hand.end()
    assert (await answer).failure is None
    assert lane.statistics().in_flight == 0


async def test_a_request_for_which_there_is_no_room_in_flight_does_not_keep_the_event_loop_awake(
    lane: Lane, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that finds nothing to launch costs 2 us of a request's 16, as the event loop looks once more for events."""
    ask(lane)
    loop, later = asyncio.get_running_loop(), []
    monkeypatch.setattr(loop, "call_soon", lambda *given, **_: later.append(given))
    second, _ = ask(lane)
    ask(lane)
    monkeypatch.undo()
    assert later == []
    await hand.end()
    assert [ticket.slot for ticket in hand.tickets] == [second.index]


async def test_a_full_queue_rejects_a_request_and_counts_it(lane: Lane) -> None:
    for _ in range(3):
        ask(lane)
    with pytest.raises(QueueFull, match="Exceeds maximum queue size: 2 requests may wait, and as many do"):
        lane.take_slot()
    assert lane.statistics().rejected == 1
    assert lane.slots.statistics().used == 3


async def test_works_count_whether_or_not_they_answered_a_request(lane: Lane, hand: Hand) -> None:
    ask(lane)
    await hand.end(ran=5)
    ask(lane)
    await hand.end(Failure("raised", "boom"), ran=7)
    slot, _ = ask(lane)
    lane.release(slot)  # Its client has gone.
    await hand.end(Failure("cancelled", ""), ran=11)
    assert lane.statistics().ran == 23


async def test_a_batch_counts_as_one_work(batchable: Lane, hand: Hand) -> None:
    ask(batchable)
    for _ in range(3):
        give(batchable)
    await hand.end(ran=2)
    await hand.end(outputs=rows_out(3), ran=5)
    assert (batchable.statistics().in_flight, batchable.statistics().ran) == (0, 7)


async def test_a_deadline_in_flight_is_answered_at_once_and_the_slot_freed_when_the_work_ends(lane: Lane, hand: Hand) -> None:
    slot, answer = ask(lane, timeout=0.001)
    text = r"^Request timeout expired: 1000 microseconds \(parameters\.timeout\) passed$"
    with pytest.raises(DeadlineExceeded, match=text):
        await answer
    lane.release(slot)
    assert lane.statistics().expired == 1
    assert hand.cancelled == [(slot.index, 1)]
    assert lane.statistics().abandoned == 1
    assert lane.slots.statistics().used == 1
    await hand.end(Failure("cancelled", ""))
    assert lane.slots.statistics().used == 0


@pytest.mark.parametrize("first", ["the worker", "the clock"])
async def test_an_expired_deadline_is_reported_and_counted_once(lane: Lane, hand: Hand, first: str) -> None:
    slot, answer = ask(lane, timeout=60 if first == "the worker" else 0.001)
    if first == "the clock":
        await asyncio.wait([answer])
    await hand.end(Failure("expired", ""))
    with pytest.raises(DeadlineExceeded, match=r"^Request timeout expired: "):
        await answer
    lane.release(slot)
    assert lane.statistics().expired == 1


@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        (Failure("raised", "boom"), Failed, "the model raised: boom"),
        (Failure("lost", "CUDA error 700"), Unavailable, "the device is lost: CUDA error 700"),
    ],
)
async def test_each_kind_of_failure_raises_its_error(
    lane: Lane, hand: Hand, failure: Failure, error: type[Exception], text: str
) -> None:
    _, answer = ask(lane)
    await hand.end(failure)
    with pytest.raises(error, match=text):
        await answer


async def test_memory_of_an_abandoned_request_is_freed_only_when_its_work_has_ended(lane: Lane, hand: Hand) -> None:
    slot = lane.take_slot()
    slot.reserve(1 << 20)
    submit(lane, slot, "m/1#1", SHAPES)
    lane.release(slot)
    assert lane.slots.statistics().nbytes == 1 << 20
    await hand.end(Failure("cancelled", ""))
    assert lane.slots.statistics().nbytes == 0


async def test_a_request_whose_outputs_did_not_fit_is_submitted_again_with_more_memory(lane: Lane, hand: Hand) -> None:
    slot, answer = ask(lane)
    await hand.end(Failure("outgrown", str(3 * SMALLEST)))
    with pytest.raises(Outgrown) as raised:
        await answer
    slot.reserve(raised.value.nbytes)
    again = submit(lane, slot, "m/1#1", SHAPES)
    assert [ticket.capacity for ticket in hand.tickets] == [3 * SMALLEST]
    await hand.end()
    assert (await again).failure is None
    lane.release(slot)
    assert lane.slots.statistics() == (0, 1, 0)


async def test_the_backlog_counts_waiting_requests_by_model(lane: Lane, hand: Hand) -> None:
    for model in ("a", "a", "b"):
        submit(lane, lane.take_slot(), model, SHAPES)
    assert lane.backlog() == {"a": 1, "b": 1}
    await hand.end()
    assert lane.backlog() == {"b": 1}
    await hand.end()
    assert lane.backlog() == {}


async def test_a_closed_lane_reads_completions_only_once_it_is_opened_again(lane: Lane, hand: Hand) -> None:
    loop = asyncio.get_running_loop()
    _, answer = ask(lane)
    lane.close(loop)
    await hand.end()
    assert not answer.done()
    lane.open(loop)
    await answer


async def test_drained_waits_for_every_request_and_model_drained_for_those_of_one_model(lane: Lane, hand: Hand) -> None:
    slot, answer = ask(lane)
    other = asyncio.ensure_future(lane.model_drained("other/1#1"))
    mine = asyncio.ensure_future(lane.model_drained("m/1#1"))
    empty = asyncio.ensure_future(lane.drained())
    await asyncio.sleep(0)
    assert (other.done(), mine.done(), empty.done()) == (True, False, False)
    await hand.end()
    await answer
    await asyncio.sleep(0)
    assert not mine.done()  # It is answered, but its outputs are still being read.
    lane.release(slot)
    await asyncio.gather(mine, empty)


async def test_a_request_of_several_inferences_is_drained_when_it_is_answered(lane: Lane, hand: Hand) -> None:
    lane.admission.admit()
    lane.begin_several()
    lane.admission.refusing = "the server is draining"
    drained = asyncio.ensure_future(lane.drained())
    with pytest.raises(Unavailable):
        lane.admission.admit()
    for _ in range(2):
        lane.admission.admit(charged=True)
        submit(lane, slot := lane.take_slot(begun=True), "m/1#1", SHAPES)
        await hand.end()
        lane.release(slot)
        await asyncio.sleep(0)
        assert not drained.done(), "there is a next one"
    lane.suspend("the device process has ended")
    with pytest.raises(Unavailable):
        lane.admission.admit(charged=True)
    lane.end_several()
    await drained


async def held(
    lane: Lane, hand: Hand, *rows: int, batching: Batching = BATCHING, behind: int = 1
) -> list[tuple[Slot, "asyncio.Future[Done]"]]:
    """Submit requests that are held back `behind` so many other requests, which are as many as may be in flight."""
    others = ["other"] * behind
    for other in others:
        submit(lane, lane.take_slot(), other, SHAPES)
    made = [give(lane, count, batching) for count in rows]
    await settle()
    assert [ticket.model for ticket in hand.tickets] == others
    return made


async def test_requests_that_waited_behind_work_are_batched_and_each_gets_its_rows(
    batchable: Lane, hand: Hand, link: Link
) -> None:
    (one, first), (two, second) = await held(batchable, hand, 1, 2)
    await hand.end()
    (ticket,) = hand.tickets
    assert ticket.slot not in (one.index, two.index)
    assert (ticket.model, ticket.shapes) == ("m", ((3, 2),))
    assert given(link, ticket) == [one.index, two.index, two.index]
    assert batchable.statistics().in_flight == 1
    assert batchable.backlog() == {}
    await hand.end(outputs=rows_out(3))
    assert await first == Done(ticket.slot, (Extent((1,), 256, 4),), None, 1, 2, 3)
    assert await second == Done(ticket.slot, (Extent((2,), 260, 8),), None, 1, 2, 3)


async def test_a_batch_leaves_out_what_none_of_its_requests_has_asked_for(batchable: Lane, hand: Hand) -> None:
    submit(batchable, batchable.take_slot(), "other", SHAPES)
    for unasked in (0b011, 0b110):
        slot = batchable.take_slot()
        slot.lay_out(ROWS, [8])
        batchable.submit(slot, "m", ((1, 2),), lambda _: None, batching=BATCHING, unasked=unasked)
    await settle()
    await hand.end()
    assert [(ticket.shapes, ticket.unasked) for ticket in hand.tickets] == [(((2, 2),), 0b010)]


async def test_the_slot_of_a_batch_is_free_when_its_last_request_is_released(batchable: Lane, hand: Hand) -> None:
    (one, _), (two, _) = await held(batchable, hand, 1, 1)
    await hand.end()
    shared = hand.tickets[0].slot
    await hand.end(outputs=rows_out(2))
    used = batchable.slots.statistics().used
    batchable.release(one)
    assert batchable.slots.statistics().used == used - 1
    batchable.release(two)
    assert batchable.slots.statistics().used == used - 3
    assert batchable.slots.at(shared).index == shared
    assert hand.cancelled == []


async def test_on_host_cores_a_batch_that_could_grow_waits_behind_one_in_flight(ahead: Lane, hand: Hand, link: Link) -> None:
    link.completions.set_on_host_cores(True)
    submit(ahead, slot := ahead.take_slot(), "other", SHAPES)
    await hand.end()
    ahead.release(slot)
    submit(ahead, ahead.take_slot(), "other", SHAPES)
    give(ahead)
    await settle()
    assert [ticket.model for ticket in hand.tickets] == ["other"]


async def test_a_request_released_before_launch_is_not_batched_and_one_after_cancels_nothing(
    batchable: Lane, hand: Hand, link: Link
) -> None:
    (one, _), (two, second), (three, _) = await held(batchable, hand, 1, 1, 1)
    batchable.release(three)
    await hand.end()
    (ticket,) = hand.tickets
    assert given(link, ticket) == [one.index, two.index]
    batchable.release(one)
    assert batchable.statistics().abandoned == 1
    assert hand.cancelled == []
    give(batchable)  # In the memory of the one that was released.
    await hand.end(outputs=rows_out(2))
    assert (await second).outputs == (Extent((1,), 260, 4),)


async def test_releasing_all_of_a_batch_cancels_its_work_and_its_slot_is_freed_at_the_end(batchable: Lane, hand: Hand) -> None:
    (one, _), (two, _) = await held(batchable, hand, 1, 1)
    await hand.end()
    (ticket,) = hand.tickets
    forgotten = asyncio.ensure_future(batchable.model_drained("m"))
    batchable.release(one)
    batchable.release(two)
    await settle()
    assert hand.cancelled == [(ticket.slot, ticket.serial)]
    assert not forgotten.done()
    used = batchable.slots.statistics().used
    await hand.end(Failure("cancelled", ""))
    assert batchable.slots.statistics().used == used - 1
    await forgotten


async def test_requests_of_a_batch_keep_their_deadlines_and_the_batch_has_the_latest(batchable: Lane, hand: Hand) -> None:
    await held(batchable, hand)
    early, missed = give(batchable, timeout=0.001)
    _, late = give(batchable, timeout=60.0)
    await hand.end()
    (ticket,) = hand.tickets
    assert ticket.deadline > time.monotonic() + 30
    with pytest.raises(DeadlineExceeded):
        await missed
    batchable.release(early)
    await hand.end(outputs=rows_out(2))
    assert (await late).rows == 2


async def test_requests_of_a_batch_that_raised_are_each_retried_alone_once(ahead: Lane, hand: Hand) -> None:
    (one, first), (_, second), (three, _) = await held(ahead, hand, 1, 1, 1, behind=2)
    for _ in range(2):
        await hand.end()
    ahead.release(three)
    await hand.end(Failure("raised", "a bad row"))
    assert [ticket.shapes for ticket in hand.tickets] == [((1, 2),)] * 2
    await hand.end(outputs=rows_out(1))
    assert await first == Done(one.index, rows_out(1), None, 1, 2)
    await hand.end(Failure("raised", "a bad row"))
    with pytest.raises(Failed, match="a bad row"):
        await second


async def test_outputs_that_cannot_be_split_disable_batching_and_requests_run_alone(
    ahead: Lane, hand: Hand, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [answer for _, answer in await held(ahead, hand, 1, 1, behind=2)]
    for _ in range(2):
        await hand.end()
    await hand.end(outputs=rows_out(7))
    assert "batching disabled, its outputs cannot be split: output 'y' has shape [7] after 2 rows" in caplog.text
    give(ahead)
    give(ahead)
    await settle()
    assert [ticket.shapes for ticket in hand.tickets] == [((1, 2),)] * 2
    for _ in range(4):
        await hand.end(outputs=rows_out(7))
    assert [answer.result().outputs for answer in answers] == [rows_out(7)] * 2


async def test_requests_that_exceed_the_signature_together_run_alone(batchable: Lane, hand: Hand) -> None:
    more = Batching(ROWS, 6)  # Than the signature lets through.
    made = await held(batchable, hand, 3, 2, batching=more)
    used = batchable.slots.statistics().used
    await hand.end()
    assert [ticket.slot for ticket in hand.tickets] == [made[0][0].index]
    assert batchable.slots.statistics().used == used


@pytest.mark.parametrize("closed", [False, True])
async def test_a_lane_that_is_closed_launches_no_more(
    batchable: Lane, hand: Hand, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await held(batchable, hand, 1, 1, batching=Batching(ROWS, 4, 60.0))
    await hand.end()
    if closed:
        batchable.close(asyncio.get_running_loop())
    late = time.monotonic() + 120
    monkeypatch.setattr("server.scheduling.launcher.time", SimpleNamespace(monotonic=lambda: late))
    await pass_time(120)
    assert bool(hand.tickets) != closed


async def test_deferred_tickets_do_not_count_as_in_flight(lane: Lane, hand: Hand, link: Link) -> None:
    """With an in-flight limit of one and room for two."""
    asked = [ask(lane) for _ in range(2)]
    assert len(hand.tickets) == 1
    link.completions.report_deferred(1)  # The first, whose shapes are being prepared.
    await settle()
    assert [ticket.slot for ticket in hand.tickets] == [slot.index for slot, _ in asked]
    assert lane.statistics()[:2] == (1, 1)
    asked.append(ask(lane))
    with pytest.raises(QueueFull):
        lane.take_slot()
    link.completions.report_deferred(0)  # It is begun.
    for _, answer in asked:
        await hand.end()
        assert answer.done()
    assert lane.statistics()[:2] == (0, 0)
