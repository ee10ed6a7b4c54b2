"""HttpInference, mostly with large JSON; the test drives the time slices, and plays the worker."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
import pytest

from engines import Signature, TensorSpec
from server.config.tenant import TenantConfig
from server.errors import (
    BadRequest,
    ClientGone,
    DeadlineExceeded,
    Failed,
    NotFound,
    QueueFull,
    TooLarge,
    TooSlow,
    Unavailable,
    UnsupportedEncoding,
)
from server.http.inference import HttpInference, Outcome, Target
from server.link import ring as links
from server.link.messages import Done, Extent, Ticket
from server.protocol.request import Limits
from server.scheduling.admission import ENDED
from server.tenants.catalog import ServedModel
from tests.lanes import FP32, SIGNATURE, PlayedTenant, opened_tenant

COUNT = 40_000
VALUES = np.random.default_rng(1).normal(size=COUNT).astype(np.float32)


class Bench(PlayedTenant):
    """Its worker answers when `work` is called."""

    def __init__(self, config: TenantConfig, descriptors: links.Descriptors) -> None:
        super().__init__(config, descriptors)
        self.target = Target(self.tenant, "m", None, Limits(1 << 20, 1 << 20), 1 << 20)
        self.outcomes: list[Outcome] = []

    def begin(self, data: bytes) -> HttpInference:
        inference = HttpInference(self.target)
        inference.begin(data, {}, self.outcomes.append)
        return inference

    def asked(self, document: dict[str, Any]) -> int:
        """What the ticket of a request leaves out of a model with outputs y, z and w."""
        signature = Signature(SIGNATURE.inputs, tuple(TensorSpec(name, FP32, ("n",)) for name in "yzw"))
        self.tenant.catalog.put("m", [ServedModel("m", "1", "m/1#2", signature, "onnx", {})], [])
        self.begin(orjson.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}], **document}))
        return self.ticket().unasked

    def work(self) -> None:
        """Answer every ticket with its own input."""
        while ticket := self.far.tickets.poll():
            self.echo(ticket)

    async def outgrown(self, nbytes: int) -> Ticket:
        """Report that the only ticket needs `nbytes` of memory; returns the ticket that replaces it."""
        self.outgrow(ticket := self.ticket(), nbytes)
        while not self.outcomes:
            if again := self.far.tickets.poll():
                return again
            await asyncio.sleep(0)
        return ticket

    async def drain_time_slices(self) -> None:
        """Run all time slices."""
        while len(self.served.request_cache.time_slices):
            await asyncio.sleep(0)

    async def outcome(self) -> Outcome:
        while not self.outcomes:
            self.work()
            await asyncio.sleep(0)
        (outcome,) = self.outcomes
        return outcome


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    with opened_tenant(Bench) as bench:
        yield bench
        assert not bench.cancelled


def body(data: Any = VALUES, **parameters: Any) -> bytes:
    entry = {"name": "x", "datatype": "FP32", "shape": [COUNT], "data": data}
    return orjson.dumps({"parameters": parameters, "inputs": [entry]}, option=orjson.OPT_SERIALIZE_NUMPY)


@pytest.mark.parametrize("parameters", [{}, {"timeout": 600_000_000}])
async def test_large_json_is_parsed_in_time_slices(bench: Bench, parameters: dict[str, int]) -> None:
    bench.begin(body(**parameters))
    assert len(bench.served.request_cache.time_slices) == 1
    outcome = await bench.outcome()
    assert isinstance(outcome, tuple)
    assert orjson.loads(outcome[0].body)["outputs"][0]["data"] == orjson.loads(body())["inputs"][0]["data"]
    assert bench.slots_used == 0


@pytest.mark.parametrize("outgrows", [False, True])
@pytest.mark.parametrize("large", [False, True])
async def test_a_request_is_admitted_once(bench: Bench, monkeypatch: pytest.MonkeyPatch, large: bool, outgrows: bool) -> None:
    """Also if it is parsed in time slices, or runs a second time: a quota would be charged twice."""
    admitted, admit = [], bench.tenant.lane.admission.admit
    monkeypatch.setattr(bench.tenant.lane.admission, "admit", lambda *given: admitted.append(admit(*given)) or ENDED)
    bench.begin(body() if large else small())
    await bench.drain_time_slices()
    if outgrows:
        again = await bench.outgrown(3 << 20)
        output = Extent(again.shapes[0], 0, 4 * again.shapes[0][0])
        bench.end(again, output)
    assert not isinstance(await bench.outcome(), Exception)
    assert admitted == [ENDED]


async def test_a_request_that_the_queue_has_no_room_for_is_refused_before_its_body(bench: Bench) -> None:
    for _ in range(2):
        bench.begin(small())
    with pytest.raises(QueueFull):
        HttpInference(bench.target)
    assert bench.tenant.lane.statistics().rejected == 1


async def test_a_queue_that_fills_up_while_the_body_arrives_refuses_it_then(bench: Bench) -> None:
    admitted = HttpInference(bench.target)
    for _ in range(2):
        bench.begin(small())
    admitted.begin(small(), {}, bench.outcomes.append)
    assert [type(outcome) for outcome in bench.outcomes] == [QueueFull]
    assert bench.tenant.lane.statistics().rejected == 1


async def test_disconnect_while_waiting_to_be_parsed_frees_everything(bench: Bench) -> None:
    bench.begin(body()).cancel(ClientGone("gone"))
    later = bench.begin(body().replace(b"]}]}", b",]}]}"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    later.cancel(ClientGone("gone"))
    await bench.drain_time_slices()
    assert bench.outcomes == []
    assert bench.far.tickets.poll() is None
    assert bench.slots_used == 0


async def test_disconnect_while_the_answer_is_written_frees_the_slot(bench: Bench) -> None:
    inference = bench.begin(body())
    await bench.drain_time_slices()
    bench.work()
    while not len(bench.served.request_cache.time_slices):
        await asyncio.sleep(0)
    inference.cancel(ClientGone("gone"))
    await bench.drain_time_slices()
    assert bench.outcomes == []
    assert bench.slots_used == 0


async def test_deadline_expires_while_waiting_to_be_parsed(bench: Bench) -> None:
    gate = asyncio.Event()

    def hold() -> Any:
        while not gate.is_set():
            yield

    bench.served.request_cache.time_slices.add(hold())
    bench.begin(body(timeout=1000))
    outcome = await bench.outcome()
    assert isinstance(outcome, DeadlineExceeded)
    assert str(outcome) == "Request timeout expired: 1000 microseconds (parameters.timeout) passed"
    assert bench.tenant.lane.statistics().expired == 1
    gate.set()
    await bench.drain_time_slices()
    assert len(bench.outcomes) == 1
    assert bench.far.tickets.poll() is None


async def test_disconnect_and_later_deadline_count_once(bench: Bench) -> None:
    gate = asyncio.Event()

    def hold() -> Any:
        while not gate.is_set():
            yield

    bench.served.request_cache.time_slices.add(hold())
    bench.begin(body(timeout=1000)).cancel(ClientGone("gone"))
    other = body(timeout=2000)
    bench.begin(other)
    await bench.outcome()  # The later of the two deadlines has passed.
    gate.set()
    await bench.drain_time_slices()
    assert bench.served.statistics.failures == {"CANCELED": 1, "REJECTED": 1}


async def test_bodies_waiting_to_be_parsed_count_as_uploads(bench: Bench) -> None:
    content, memory = body(), bench.tenant.config.memory
    bench.begin(content)
    with bench.tenant.uploads.expect(memory - 2 * len(content) + 1):
        bench.begin(content)
        (refused,) = bench.outcomes
        assert isinstance(refused, QueueFull)
        assert f"together they may have {memory} (tenants.t.memory)" in str(refused)
    await bench.drain_time_slices()
    assert repr(bench.tenant.uploads) == f"<Uploads 0 on their way, 0 of {memory} bytes>"


async def test_too_many_large_requests_are_refused(bench: Bench) -> None:
    for _ in range(3):
        bench.begin(body())
    (refused,) = bench.outcomes
    assert isinstance(refused, QueueFull)
    assert "2 large requests wait to be parsed; the limit is 2 (tenants.t.queue + in_flight)" in str(refused)
    assert bench.tenant.lane.statistics().rejected == 1
    await bench.drain_time_slices()


@pytest.mark.parametrize("kind", [Unavailable, NotFound])
async def test_model_and_tenant_are_checked_again_after_parsing(bench: Bench, kind: type[Exception]) -> None:
    bench.begin(body())
    if kind is Unavailable:
        bench.tenant.lane.admission.refusing = "the server stops"
    else:
        bench.tenant.catalog.expected = None  # All that there are have been listed.
        bench.tenant.catalog.put("m", [], [])
    await bench.drain_time_slices()
    assert [type(outcome) for outcome in bench.outcomes] == [kind]


async def test_failed_classification_frees_the_slot(bench: Bench) -> None:
    bench.begin(small(classes=1))
    ticket = bench.far.tickets.poll()
    assert ticket
    bench.far.completions.put(Done(ticket.slot, (Extent((1_000_001,), 0, 12),), None, 1, 2))
    bench.far.completions.ring()
    assert isinstance(await bench.outcome(), BadRequest)
    assert bench.slots_used == 0


async def test_classification_runs_in_time_slices_and_frees_the_slot(bench: Bench) -> None:
    bench.begin(small(classes=1))
    bench.work()
    while not len(bench.served.request_cache.time_slices):
        await asyncio.sleep(0)
    assert not bench.outcomes
    outcome = await bench.outcome()
    assert isinstance(outcome, tuple)
    assert orjson.loads(outcome[0].body)["outputs"][0]["data"] == ["2.000000:1"]
    assert bench.slots_used == 0


def small(classes: int = 0, **parameters: Any) -> bytes:
    entry = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}
    outputs = [{"name": "y", "parameters": {"classification": classes}}]
    return orjson.dumps({"parameters": parameters, "inputs": [entry], "outputs": outputs})


@pytest.mark.parametrize("parameters", [{}, {"timeout": 600_000_000}])
async def test_outgrown_request_runs_again_with_more_memory(bench: Bench, parameters: dict[str, int]) -> None:
    bench.begin(small(**parameters))
    ticket = await bench.outgrown(3 << 20)
    assert ticket.capacity == 3 << 20
    assert bytes(bench.tenant.lane.slots.at(ticket.slot).view[:8]) == np.array([1, 2], np.float32).tobytes()
    bench.far.completions.put(Done(ticket.slot, (Extent((2,), 0, 8),), None, 1, 2))
    bench.far.completions.ring()
    outcome = await bench.outcome()
    assert isinstance(outcome, tuple)
    assert orjson.loads(outcome[0].body)["outputs"][0]["data"] == [1, 2]
    assert bench.tenant.lane.slots.statistics() == (0, 1, 0)


async def test_request_outgrowing_free_memory_is_refused_and_counted(bench: Bench) -> None:
    other = bench.tenant.lane.take_slot()
    other.reserve(416 << 20)
    bench.begin(small())
    await bench.outgrown(100 << 20)
    (outcome,) = bench.outcomes
    assert isinstance(outcome, QueueFull)
    assert f"requests hold {other.capacity + (64 << 10)} and the largest piece left for one is {32 << 20} (" in str(outcome)
    assert bench.tenant.lane.statistics().rejected == 1


async def test_disconnect_cancels_an_outgrown_request_in_its_second_run(bench: Bench) -> None:
    inference = bench.begin(small())
    ticket = await bench.outgrown(3 << 20)
    inference.cancel(ClientGone("gone"))
    assert bench.cancelled.pop() == ticket.slot
    assert bench.tenant.lane.slots.at(ticket.slot).capacity == 3 << 20, "the device may still write there"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BadRequest("no JSON"), None),
        (TooSlow("its body never came"), None),
        (TooLarge("its body"), None),
        (UnsupportedEncoding("br"), None),
        (QueueFull("64 wait"), "REJECTED"),
        (DeadlineExceeded("1000 microseconds passed"), "REJECTED"),
        (ClientGone("while it waited"), "CANCELED"),
        (Failed("the model raised"), "BACKEND"),
        (NotFound("it was unloaded meanwhile"), "OTHER"),
    ],
)
def test_failures_count_by_tritons_reason_and_invalid_requests_separately(
    bench: Bench, error: Exception, reason: str | None
) -> None:
    HttpInference(bench.target).count(error)
    assert bench.served.statistics.failures == ({reason: 1} if reason else {})
    assert bench.served.statistics.fail.count == (reason is not None)
    assert bench.tenant.lane.statistics().invalid == (reason is None)


@pytest.mark.parametrize(
    ("outputs", "unasked"),
    [
        (None, 0),
        ([], 0),
        ([{"name": "z"}], 0b101),
        ([{"name": "w"}, {"name": "y", "parameters": {"binary_data": True}}], 0b010),
        ([{"name": "w", "parameters": {"classification": 1}}], 0b011),
    ],
)
async def test_outputs_that_a_request_does_not_name_are_not_asked_of_the_device(
    bench: Bench, outputs: list[dict[str, Any]] | None, unasked: int
) -> None:
    assert bench.asked({} if outputs is None else {"outputs": outputs}) == unasked
