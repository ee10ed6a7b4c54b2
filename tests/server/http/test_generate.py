"""A generation, of which the test plays the worker and the client: what comes at an odd moment between two parts."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from engines import Signature, TensorSpec
from server.config.tenant import TenantConfig
from server.errors import BadRequest, ClientGone, DeadlineExceeded, Failed, QueueFull, TooLarge, Unavailable
from server.http.exchange import Call
from server.http.generate import Generation, respond
from server.http.inference import Target
from server.link import ring as links
from server.link.messages import Done, Extent, Failure
from server.protocol.request import Limits
from tests.lanes import FP32, PlayedTenant, opened_tenant

IN_PARTS = Signature((TensorSpec("x", FP32, (1,)),), (TensorSpec("y", FP32, (1,)),), in_parts=True)
BODY = b'{"x": 3}'


class Bench(PlayedTenant):
    """Its model answers in parts, and it has a client."""

    def __init__(self, config: TenantConfig, descriptors: links.Descriptors) -> None:
        super().__init__(config, descriptors, IN_PARTS)
        self.target = Target(self.tenant, "m", None, Limits(1 << 20, 1 << 20), 1 << 20)
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def begin(self, body: bytes = BODY) -> Generation:
        generation = Generation(self.target, self.receive)
        generation.begin(body)
        return generation

    async def part(self, *numbers: float, failure: Failure | None = None) -> None:
        """End the oldest ticket with a part of this number, with the end of the answer, or with this failure."""
        ticket, outputs = await self.next_ticket(), ()
        if numbers:
            slot = self.far.arena.slot(ticket.slot)
            slot.use_block(ticket.start, ticket.capacity)
            slot.view[64:68] = np.float32(numbers[0]).tobytes()
            outputs = (Extent((1,), 64, 4),)
        self.end(ticket, *outputs, failure=failure)
        await settle()

    async def respond(self, path: bytes = b"/v2/models/m/generate_stream", body: bytes = BODY) -> Any:
        async def read(call: Call, target: Target, most: tuple[int, str]) -> bytes:
            return body

        call = Call("POST", path, b"", {}, read, self.receive, None)  # type: ignore[arg-type]
        return await respond(call, lambda: self.target, read, self.receive, self.send)

    @property
    def data(self) -> bytes:
        return b"".join([message.get("body", b"") for message in self.sent])

    @property
    def failures(self) -> dict[str, int]:
        return self.served.statistics.failures

    def is_free(self) -> bool:
        lane = self.tenant.lane
        return self.slots_used == 0 and lane.statistics()[:3] == (0, 0, 0)


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    with opened_tenant(Bench) as bench:
        yield bench


def document(y: float) -> bytes:
    return json.dumps({"model_name": "m", "model_version": "1", "y": y}, separators=(",", ":")).encode()


async def test_parts_are_given_one_by_one_until_the_end(bench: Bench) -> None:
    generation = bench.begin()
    given = []
    for number in (3, 2):
        taking = asyncio.ensure_future(generation.next_part())
        await bench.part(number)
        given.append(await taking)
        await settle()
        assert bench.far.tickets.poll() is None, "the next part was asked for before this one was taken"
    taking = asyncio.ensure_future(generation.next_part())
    await bench.part()
    assert await taking is None
    assert await generation.next_part() is None
    assert given == [document(3.0), document(2.0)]
    assert bench.is_free()
    assert bench.served.statistics.inferences == 1


async def test_a_deadline_that_passes_when_a_part_has_come_but_was_not_taken_ends_the_answer(bench: Bench) -> None:
    generation = bench.begin()
    taking = asyncio.ensure_future(generation.next_part())
    await asyncio.sleep(0)
    generation._on_end(Done(0, (Extent((1,), 64, 4),), None, 1, 2))
    generation._inference._fail(DeadlineExceeded("too late"))
    with pytest.raises(DeadlineExceeded):
        await taking


async def test_an_error_between_two_parts_ends_the_answer_at_the_next(bench: Bench) -> None:
    generation = bench.begin()
    await bench.part(3)
    assert await generation.next_part() == document(3.0)
    bench.tenant.lane.suspend("its worker failed")
    with pytest.raises(Unavailable, match="its worker failed"):
        await generation.next_part()
    generation.close(ClientGone(""))
    await bench.part(failure=Failure("expired", ""))
    assert bench.is_free()
    assert bench.failures == {"REJECTED": 1}


async def test_a_client_that_goes_while_a_part_runs_cancels_it(bench: Bench) -> None:
    answering = asyncio.ensure_future(bench.respond())
    await settle()
    ticket = bench.ticket()
    bench.gone.set()
    assert await answering is None
    assert bench.cancelled == [ticket.slot]
    assert bench.sent == []


async def test_a_request_that_is_cancelled_stops_its_answer(bench: Bench) -> None:
    answering = asyncio.ensure_future(bench.respond())
    await settle()
    ticket = bench.ticket()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert bench.cancelled == [ticket.slot]


async def test_events_are_sent_as_they_come_and_an_error_is_the_last(bench: Bench) -> None:
    answering = asyncio.ensure_future(bench.respond())
    await bench.part(3)
    assert bench.sent[0]["status"] == 200
    assert bench.data == b"data: " + document(3.0) + b"\n\n"
    await bench.part(failure=Failure("raised", "bad luck"))
    assert await answering is None
    assert b'\n\ndata: {"error":"the model raised: bad luck (request ' in bench.data
    assert bench.sent[-1]["more_body"] is False
    assert bench.failures == {"BACKEND": 1}


async def test_an_answer_without_parts_is_a_stream_without_events(bench: Bench) -> None:
    answering = asyncio.ensure_future(bench.respond())
    await bench.part()
    assert await answering is None
    assert [message.get("status") for message in bench.sent] == [200, None]
    assert bench.data == b""


@pytest.mark.parametrize("numbers", [(), (3, 2)])
async def test_generate_refuses_other_than_one_part(bench: Bench, numbers: tuple[int, ...]) -> None:
    answering = asyncio.ensure_future(bench.respond(b"/v2/models/m/generate"))
    for number in numbers:
        await bench.part(number)
    if not numbers:
        await bench.part()
    reply = await answering
    assert reply.status == 400
    assert b"exactly one part" in reply.body


async def test_a_client_that_reads_nothing_is_given_up(bench: Bench) -> None:
    bench.tenant.unread.seconds = 0.01
    started: list[Any] = []

    async def stuck(message: Any) -> None:
        started.append(message)
        if message["type"] == "http.response.body":
            await asyncio.get_running_loop().create_future()

    bench.send = stuck  # type: ignore[method-assign]
    answering = asyncio.ensure_future(bench.respond())
    await bench.part(3)
    assert await answering is None
    assert bench.ticket().deadline == 0
    assert bench.failures == {"CANCELED": 1}


async def test_a_part_that_is_larger_than_the_memory_ends_the_answer(bench: Bench) -> None:
    generation = bench.begin()
    taking = asyncio.ensure_future(generation.next_part())
    await bench.part(failure=Failure("outgrown", str(1 << 40)))
    with pytest.raises(TooLarge):
        await taking


async def test_refusals_come_before_the_body_is_submitted(bench: Bench) -> None:
    with pytest.raises(BadRequest, match="inputs: 'x' missing"):
        bench.begin(b"{}")
    first, second = bench.begin(), bench.begin()
    with pytest.raises(QueueFull):
        bench.begin()
    for each in (first, second):
        each.close(Failed(""))
    with pytest.raises(TooLarge, match="the limit for generate"):
        Generation(bench.target, bench.receive).expect(1 << 30, {})
