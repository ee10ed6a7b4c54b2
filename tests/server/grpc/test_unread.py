"""Clients that do not read their answers over gRPC, which gives them room as they please."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from server.grpc import unread as kept
from server.tenants import unread
from server.tenants.service import SPARE_SLOTS

from .bench import MAX_BODY, Bench, X, refused
from .raw import HEADERS, INITIAL_WINDOW_SIZE, MAX_CONCURRENT_STREAMS, RST_STREAM, WINDOW, RawClient, connect

BIG = np.zeros(MAX_BODY // 4 - 64, np.float32)


def message(x: np.ndarray[Any, Any]) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[x.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    answer: bytes = request.SerializeToString()
    return answer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are looked at a hundred times a second."""
    monkeypatch.setattr(unread, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(kept, "LOOK_INTERVAL", 0.01)


def waiting(bench: Bench) -> int:
    return bench.tenant.unread.connections


def ended(bench: Bench) -> int:
    return bench.tenant.lane.statistics().unread


async def ask(bench: Bench, x: np.ndarray[Any, Any] = BIG, method: str = "ModelInfer", room: int = WINDOW) -> RawClient:
    """A client whose answer is being written, with so much room for it."""
    client = await connect(int(bench.address.rpartition(":")[2]), room)
    await client.call(method, message(x), end=method == "ModelInfer")
    bench.echo(await bench.next_ticket())
    while (await client.frame()).kind != HEADERS:
        pass
    return client


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize(("x", "room"), [(BIG, WINDOW), (X, 0)], ids=["large", "small"])
@pytest.mark.usefixtures("quick")
async def test_an_answer_that_a_client_does_not_read_ends_its_connection(
    bench: Bench, caplog: pytest.LogCaptureFixture, x: np.ndarray[Any, Any], room: int, method: str
) -> None:
    bench.tenant.unread.seconds = 0.05
    client = await ask(bench, x, method, room)
    await asyncio.wait_for(client.closed(), 30)
    assert (ended(bench), waiting(bench)) == (1, 0)
    await bench.released()
    assert (await bench.answered(bench.infer())).as_numpy("y").tolist() == [1, 2]
    assert bench.server._infer._streams == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        message for message in caplog.messages if "whose client does not read its answer" in message
    ]


@pytest.mark.usefixtures("quick")
async def test_without_a_write_timeout_an_answer_waits_for_its_client(bench: Bench) -> None:
    bench.tenant.unread.seconds = 0.0
    client = await ask(bench)
    (answer,) = bench.server.tenant_port.kept.answers
    while not answer.peer:
        await asyncio.sleep(0)
    client.give_room(1, 1 << 21)
    assert len(await client.data(BIG.nbytes)) > BIG.nbytes
    while waiting(bench):
        await asyncio.sleep(0)
    client.close()


@pytest.mark.usefixtures("quick")
async def test_what_a_client_reads_counts_as_read(bench: Bench) -> None:
    bench.tenant.unread.seconds = 0.0
    client = await ask(bench)
    (answer,) = bench.server.tenant_port.kept.answers
    assert answer.unread() > MAX_BODY - 1024
    await client.data(WINDOW)
    while not answer.peer:
        await asyncio.sleep(0)
    client.give_room(1, 300_000)
    await client.data(300_000)
    while answer.unread() > MAX_BODY - 250_000:
        await asyncio.sleep(0)
    assert answer.unread() > MAX_BODY - 400_000
    client.close()
    while waiting(bench):
        await asyncio.sleep(0)


async def test_unread_answers_count_against_the_tenants_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.tenant.unread, "limit", 2 * MAX_BODY)
    first, second = await ask(bench), await ask(bench)
    status, text = await refused(bench.answered(bench.infer(BIG)))
    assert status == "RESOURCE_EXHAUSTED"
    assert "does not fit beside those that clients have not read yet; together they may have" in text
    assert (await bench.answered(bench.infer())).as_numpy("y").tolist() == [1, 2], "a small one is answered"
    monkeypatch.setattr(kept, "PATIENCE", 0.0)
    assert (await bench.answered(bench.infer(BIG))).as_numpy("y").nbytes == BIG.nbytes, "one that has waited for long is ended"
    await asyncio.wait_for(first.closed(), 30)
    assert (ended(bench), waiting(bench)) == (1, 1)
    second.close()


async def test_an_answer_in_a_stream_that_does_not_fit_is_an_error_of_that_request_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.tenant.unread, "limit", MAX_BODY)
    silent = await ask(bench)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for x in (BIG, X):
            given = bench.input(x)
            yield {"model_name": "m", "inputs": [given]}

    answers = bench.client.stream_infer(requests())
    _, error = await bench.answered(anext(answers))
    assert "does not fit beside those that clients have not read yet" in str(error)
    result, error = await bench.answered(anext(answers))
    assert (error, result.as_numpy("y").tolist()) == (None, [1, 2])
    silent.close()


@pytest.mark.usefixtures("quick")
async def test_several_answers_of_one_connection_end_with_it_and_are_counted_once(bench: Bench) -> None:
    bench.tenant.unread.seconds = 0.05
    client = await ask(bench)
    await client.call("ModelInfer", message(BIG))
    bench.echo(await bench.next_ticket())
    await asyncio.wait_for(client.closed(), 30)
    while bench.server.tenant_port.kept.answers:
        await asyncio.sleep(0)
    assert (ended(bench), waiting(bench)) == (1, 0)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_a_client_that_goes_away_with_an_answer_unread_is_no_error(
    bench: Bench, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    client = await ask(bench, method=method)
    await client.data(WINDOW)
    client.close()
    while bench.server.tenant_port.kept.answers or waiting(bench):
        await asyncio.sleep(0)
    await bench.released()
    assert (caplog.records, ended(bench)) == ([], 0)


async def test_a_call_that_is_reset_with_its_answer_unread_leaves_nothing(bench: Bench) -> None:
    client = await ask(bench)
    await client.data(WINDOW)
    client.send(RST_STREAM, 0, 1, b"\0\0\0\x08")
    while bench.server.tenant_port.kept.answers or waiting(bench):
        await asyncio.sleep(0)
    client.close()


@pytest.mark.parametrize("method", ["ModelReady", "ModelInfer"])
async def test_calls_whose_client_reads_nothing_leave_places_for_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(kept, "LOOK_INTERVAL", 0.01)
    monkeypatch.setattr(bench.server.tenant_port.kept, "most", 3)
    client = await connect(int(bench.address.rpartition(":")[2]), 0)
    for _ in range(4):
        await client.call(method, message(X))
        if method == "ModelInfer":
            bench.echo(await bench.next_ticket())
    await asyncio.wait_for(client.closed(), 30)
    assert (ended(bench), waiting(bench)) == (1, 0)


async def test_a_client_may_send_little_of_a_message_before_it_is_asked_for(bench: Bench) -> None:
    client = await connect(int(bench.address.rpartition(":")[2]))
    calls = 2 * (bench.tenant.config.queue + SPARE_SLOTS)
    assert client.settings[INITIAL_WINDOW_SIZE] == bench.tenant.config.memory // calls, "all calls together have its memory"
    assert client.settings[MAX_CONCURRENT_STREAMS] == bench.tenant.config.queue + SPARE_SLOTS
    client.close()
