"""Inference as any protocol handler uses it: no HTTP, no JSON. The test is the handler, and plays the worker."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from server.config.tenant import TenantConfig
from server.errors import BadRequest, ClientGone, DeadlineExceeded, Failed, NotFound, QueueFull, TooLarge, Unavailable
from server.inference.inference import Inference
from server.link import activity
from server.link import ring as links
from server.link.activity import LENDS, OPEN, LenderPage
from server.link.messages import Done, Failure, Ticket
from server.scheduling.admission import ENDED
from server.scheduling.lender import ALONE, ENOUGH, MET, Guard, Lender, Neighbour
from server.tenants.catalog import ServedModel
from server.tenants.service import report
from tests.lanes import SIGNATURE, PlayedTenant, opened_tenant
from tests.passing_time import pass_time

VALUES = np.array([1, 2], np.float32)


class Bench(PlayedTenant):
    """`ends` is what inferences ended with."""

    def __init__(self, config: TenantConfig, descriptors: links.Descriptors) -> None:
        super().__init__(config, descriptors)
        self.ends: list[Done | Exception] = []

    def submit(self, timeout: float | None = None, unasked: int = 0) -> Inference:
        inference = Inference(self.tenant, "m", None)
        slot = inference.take_slot()
        (offset,) = slot.lay_out(SIGNATURE, [VALUES.nbytes], VALUES.nbytes)
        slot.view[offset : offset + VALUES.nbytes] = VALUES.tobytes()
        inference.submit((VALUES.shape,), 0, timeout, self.ends.append, unasked)
        return inference

    async def answer(self, ticket: Ticket, failure: Failure | None = None) -> Done | Exception:
        """Complete this ticket with its input as output, or fail it; returns what the inference ended with."""
        if failure:
            self.end(ticket, failure=failure)
        else:
            self.echo(ticket)
        while not self.ends:
            await asyncio.sleep(0)
        return self.ends.pop()

    async def outgrown(self, ticket: Ticket, nbytes: int) -> Ticket:
        """Report that this ticket needs `nbytes` of memory; returns the ticket that replaces it."""
        self.outgrow(ticket, nbytes)
        while not (again := self.far.tickets.poll()):
            assert not self.ends
            await asyncio.sleep(0)
        return again


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    with opened_tenant(Bench) as bench:
        yield bench


async def test_completion_is_reported_and_counted_when_the_front_has_encoded_it(bench: Bench) -> None:
    inference = bench.submit()
    done = await bench.answer(bench.ticket())
    assert isinstance(done, Done)
    assert bytes(inference.slot_of(done).view[:8]) == VALUES.tobytes()
    assert (bench.served.statistics.success.count, bench.slots_used) == (0, 1)
    _, executed = inference.succeed(done)
    assert executed == pytest.approx(1e-6)
    assert (bench.served.statistics.success.count, bench.slots_used) == (1, 0)


async def test_outputs_that_are_not_asked_for_are_left_out_of_its_ticket_and_of_the_one_that_replaces_it(bench: Bench) -> None:
    bench.submit(unasked=0b101)
    ticket = bench.ticket()
    again = await bench.outgrown(ticket, 1 << 20)
    assert (ticket.unasked, again.unasked) == (0b101, 0b101)


async def test_failure_is_reported_counted_and_its_slot_released(bench: Bench) -> None:
    bench.submit()
    error = await bench.answer(bench.ticket(), Failure("raised", "no"))
    assert isinstance(error, Failed)
    assert (bench.served.statistics.failures, bench.slots_used) == ({"BACKEND": 1}, 0)


async def test_refused_at_once_and_again_when_the_slot_is_taken(bench: Bench) -> None:
    admitted = Inference(bench.tenant, "m", None)
    for _ in range(2):
        bench.submit()
    with pytest.raises(QueueFull):
        Inference(bench.tenant, "m", None)
    with pytest.raises(QueueFull):
        admitted.take_slot()
    assert bench.tenant.lane.statistics().rejected == 2


async def test_model_that_is_gone_when_the_slot_is_taken_is_not_found(bench: Bench) -> None:
    admitted = Inference(bench.tenant, "m", None)
    bench.tenant.catalog.expected = None  # All that there are have been listed.
    bench.tenant.catalog.put("m", [], [])
    with pytest.raises(NotFound):
        admitted.take_slot()
    assert bench.slots_used == 0


async def test_model_that_was_replaced_since_admission_is_used_as_it_is_now(bench: Bench) -> None:
    admitted = Inference(bench.tenant, "m", None)
    replaced = ServedModel("m", "1", "m/1#2", SIGNATURE, "onnx", {})
    bench.tenant.catalog.put("m", [replaced], [])
    admitted.take_slot()
    assert admitted.served.key == "m/1#2"
    admitted.cancel(ClientGone("gone"))


async def test_with_weights_each_request_has_one_version_from_its_admission_on(bench: Bench) -> None:
    bench.tenant.catalog.put("m", [ServedModel("m", version, f"m/{version}#2", SIGNATURE, "onnx", {}) for version in "12"], [])
    bench.tenant.catalog.weigh({"m": {"1": 1, "2": 1}})
    found = []
    for _ in range(4):
        inference = Inference(bench.tenant, "m", None)
        admitted = inference.served.version
        assert inference.early_slot(inference.return_slot)
        assert inference.keep_slot(), "the inputs are for this version"
        inference.return_slot()
        inference.take_slot()
        assert inference.served.version == admitted
        inference.cancel(ClientGone("gone"))
        found.append(admitted)
    assert found == ["1", "2", "1", "2"]


@pytest.mark.parametrize("seconds", [None, 600.0])
async def test_outgrown_inference_is_admitted_once_and_ends_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    admitted, admit = [], bench.tenant.lane.admission.admit
    monkeypatch.setattr(bench.tenant.lane.admission, "admit", lambda *given: admitted.append(admit(*given)) or ENDED)
    inference = bench.submit(seconds)
    again = await bench.outgrown(bench.ticket(), 3 << 20)
    assert again.capacity == 3 << 20
    done = await bench.answer(again)
    assert isinstance(done, Done)
    assert bytes(inference.slot_of(done).view[:8]) == VALUES.tobytes(), "its inputs moved with it"
    inference.succeed(done)
    assert (admitted, bench.ends, bench.slots_used) == ([ENDED], [], 0)


async def test_outgrown_inference_runs_again_only_before_its_deadline(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.submit(600.0)
    ticket = bench.ticket()
    later = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + 601 * 10**9)
    monkeypatch.setattr("server.inference.inference.time", later)
    error = await bench.answer(ticket, Failure("outgrown", str(3 << 20)))
    assert isinstance(error, DeadlineExceeded)
    assert "600000000 microseconds" in str(error)
    assert (bench.far.tickets.poll(), bench.slots_used) == (None, 0)


async def test_deadline_that_passes_ends_it_and_stops_it_on_the_device(bench: Bench) -> None:
    bench.submit(0.001)
    ticket = bench.ticket()
    while not bench.ends:
        await asyncio.sleep(0)
    assert isinstance(bench.ends.pop(), DeadlineExceeded)
    assert bench.cancelled == [ticket.slot]


async def test_outputs_larger_than_all_memory_are_too_large(bench: Bench) -> None:
    bench.submit()
    error = await bench.answer(bench.ticket(), Failure("outgrown", str(1 << 30)))
    assert isinstance(error, TooLarge)
    assert bench.slots_used == 0


async def test_cancelled_inference_stops_on_the_device_and_reports_nothing(bench: Bench) -> None:
    inference = bench.submit()
    ticket = bench.ticket()
    inference.cancel(ClientGone("gone"))
    assert bench.cancelled == [ticket.slot]
    bench.end(ticket, failure=Failure("cancelled", ""))
    while bench.slots_used:
        await asyncio.sleep(0)
    assert (bench.ends, bench.served.statistics.failures) == ([], {"CANCELED": 1})


async def test_full_memory_is_answered_and_counted_as_a_full_queue(bench: Bench) -> None:
    other = bench.tenant.lane.take_slot()
    other.reserve(416 << 20)
    inference = Inference(bench.tenant, "m", None)
    slot = inference.take_slot()
    with pytest.raises(QueueFull) as refused:
        slot.reserve(100 << 20)
    error = inference.fail(refused.value)
    assert (type(error), str(error)) == (QueueFull, str(refused.value))
    assert (bench.tenant.lane.statistics().rejected, bench.served.statistics.failures) == (1, {"REJECTED": 1})
    assert bench.slots_used == 1


async def test_draining_tenant_refuses_and_fails_what_runs(bench: Bench) -> None:
    bench.submit()
    bench.tenant.lane.suspend("the device is lost")
    (error,) = bench.ends
    assert isinstance(error, Unavailable)
    with pytest.raises(Unavailable):
        Inference(bench.tenant, "m", None)


async def test_time_left_counts_from_the_arrival(bench: Bench) -> None:
    inference = Inference(bench.tenant, "m", None)
    assert 59 < inference.time_left(60.0) <= 60
    inference.arrived -= 61 * 10**9
    with pytest.raises(DeadlineExceeded, match=r"60000000 microseconds \(parameters.timeout\) passed"):
        inference.time_left(60.0)


async def test_invalid_request_is_no_failure_of_the_model(bench: Bench) -> None:
    inference = Inference(bench.tenant, "m", None)
    inference.take_slot()
    assert isinstance(inference.fail(BadRequest("inputs: missing")), BadRequest)
    assert (bench.served.statistics.failures, bench.tenant.lane.statistics().invalid, bench.slots_used) == ({}, 1, 0)


@pytest.fixture
def pages() -> Iterator[int]:
    """What a lender shares with a borrower."""
    descriptor = activity.create(1)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def lender(bench: Bench, pages: int) -> Lender:
    """What makes the bench's tenant one that lends."""
    bench.tenant.lane.admission.neighbour = made = Lender("acme", activity.attach(pages), 0.001)
    return made


@pytest.fixture
def borrower(lender: Lender, pages: int) -> LenderPage:
    """Sees whether that lender rests."""
    return LenderPage(pages, 0)


async def test_a_request_is_open_from_its_head_to_its_answer(bench: Bench, lender: Lender) -> None:
    inference, other = bench.submit(), Inference(bench.tenant, "m", None)
    assert lender.activity.open == 2
    done = await bench.answer(bench.ticket())
    assert isinstance(done, Done)
    assert lender.activity.open == 2
    inference.count_success(done)
    assert lender.activity.open == 1
    inference.return_slot()
    inference.cancel(ClientGone("while it read the answer"))
    other.cancel(ClientGone("before its body came"))
    other.cancel(ClientGone("twice"))
    assert lender.activity.open == 0


async def test_a_request_that_is_refused_or_fails_is_open_no_more(bench: Bench, lender: Lender) -> None:
    bench.tenant.lane.admission.refusing = "why"
    with pytest.raises(Unavailable):
        Inference(bench.tenant, "m", None)
    bench.tenant.lane.admission.refusing = ""
    bench.submit()
    assert lender.activity.open == 1
    await bench.answer(bench.ticket(), Failure("raised", "no"))
    assert lender.activity.open == 0


async def test_a_tenant_that_does_not_lend_only_says_when_it_has_requests(bench: Bench, pages: int) -> None:
    activity.reset(pages)
    page = LenderPage(pages, 0)
    bench.tenant.lane.admission.neighbour = neighbour = Neighbour(activity.attach(pages))
    (words,) = page.processes
    assert (words[OPEN], words[LENDS]) == (0, 0), "though the process before it ended"
    bench.submit()
    assert (words[OPEN], words[LENDS]) == (1, 0)
    began = time.monotonic_ns()
    await bench.answer(bench.ticket(), Failure("raised", "no"))
    assert words[OPEN] == neighbour.activity.open == 0
    assert began < words[activity.ENDED] < time.monotonic_ns()
    bench.tenant.lane.admission.close()
    assert report(bench.tenant).lending is None


async def test_answers_of_requests_that_found_no_other_one_are_compared(
    bench: Bench, lender: Lender, borrower: LenderPage
) -> None:
    """One that met a borrower, and one that did not; a third, beside the second, waits for it anyway."""
    lender.activity.expect([0])
    met: list[bool] = []
    lender.guard.learn = lambda model, latency, is_met, now: met.append(is_met)  # type: ignore[method-assign]
    for word, count in ((1, 1), (0, 2)):
        borrower.own[0] = word
        for inference in [bench.submit() for _ in range(count)]:
            done = await bench.answer(bench.ticket())
            assert isinstance(done, Done)
            inference.succeed(done)
    assert met == [True, False]


async def test_a_tenant_whose_guard_has_stopped_lends_again_by_itself(
    bench: Bench, lender: Lender, borrower: LenderPage
) -> None:
    lender.guard = Guard(1)
    for kind, latency in ((ALONE, 1), (MET, 1000)):
        for _ in range(ENOUGH):
            lender.activity.begin()
            lender.end(kind, "m/1#1", latency)
    assert not borrower.rests()
    assert lender.guard.stops == 1
    lender.guard.until = 1
    await pass_time(3600)
    assert borrower.rests()
    bench.tenant.lane.close(asyncio.get_running_loop())
    assert not borrower.rests()
