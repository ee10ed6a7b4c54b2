"""Answers in parts over ModelStreamInfer, as Triton's decoupled models give them."""

import queue
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from greenlane.load.server_process import free_port

from . import repository
from .processes import configure, running, running_plain, tenant
from .test_generate import LONG
from .wire import until


@pytest.fixture(scope="module", params=[running, running_plain], ids=["processes", "plain"])
def address(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    root, port = tmp_path_factory.mktemp("models"), free_port()
    repository.in_parts(root)
    config = configure(tmp_path_factory.mktemp("parts") / "c.toml", root, tenant(grpc_port=port), default_tenant='"acme"')
    with request.param(config):
        with closing(triton.InferenceServerClient(f"127.0.0.1:{port}")) as client:
            until(lambda: _ready(client))
        yield f"127.0.0.1:{port}"


def _ready(client: triton.InferenceServerClient) -> bool:
    try:
        return bool(client.is_model_ready("countdown"))
    except InferenceServerException:
        return False


@contextmanager
def stream(address: str) -> Iterator[tuple[triton.InferenceServerClient, Any]]:
    """A client with an open stream, and the answers that come on it."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with closing(triton.InferenceServerClient(address)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        yield client, answers


def inputs(x: float, bad: float = -1, turns: int = 0) -> list[triton.InferInput]:
    values = {"x": np.array([x], np.float32), "bad": np.array([bad], np.float32), "turns": np.array(turns, np.int64)}
    kinds = {"x": "FP32", "bad": "FP32", "turns": "INT64"}
    return [triton.InferInput(n, list(v.shape), kinds[n]).set_data_from_numpy(v) for n, v in values.items()]


def part(answers: Any) -> tuple[float | None, bool, str]:
    """The next answer: its output if it has one, whether it is the final one, and its id."""
    result, error = answers.get(timeout=30)
    assert error is None, error
    response, y = result.get_response(), result.as_numpy("y")
    return (None if y is None else float(y.flat[0])), response.parameters["triton_final_response"].bool_param, response.id


def test_parts_come_in_their_order_and_the_next_request_after_them(address: str) -> None:
    with stream(address) as (client, answers):
        for name in ("first", "second"):
            client.async_stream_infer("countdown", inputs(3), request_id=name)
        assert [part(answers) for _ in range(6)] == [(y, False, name) for name in ("first", "second") for y in (3, 2, 1)]
        client.stop_stream()


def test_an_empty_answer_follows_the_last_part_where_it_is_asked_for(address: str) -> None:
    with stream(address) as (client, answers):
        client.async_stream_infer("countdown", inputs(2), request_id="7", enable_empty_final_response=True)
        assert [part(answers) for _ in range(3)] == [(2, False, "7"), (1, False, "7"), (None, True, "7")]
        x = triton.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.array([[5]], np.float32))
        client.async_stream_infer("identity", [x], enable_empty_final_response=True)
        assert part(answers) == (5, True, ""), "the only answer of another model is the final one"
        client.stop_stream()


def test_an_error_between_parts_ends_that_answer_alone(address: str) -> None:
    with stream(address) as (client, answers):
        client.async_stream_infer("countdown", inputs(3, bad=2))
        assert part(answers)[0] == 3
        result, error = answers.get(timeout=30)
        assert result is None
        assert "the model raised" in error.message()
        client.async_stream_infer("countdown", inputs(1))
        assert part(answers)[0] == 1
        client.stop_stream()


def test_parts_are_counted_by_their_numbers(address: str) -> None:
    with stream(address) as (client, answers):
        before = client.get_inference_statistics("countdown").model_stats[0].response_stats["0"].success.count
        client.async_stream_infer("countdown", inputs(2))
        assert [part(answers)[0] for _ in range(2)] == [2, 1]
        until(lambda: client.get_inference_statistics("countdown").model_stats[0].response_stats["0"].success.count > before)
        client.stop_stream()


def test_a_client_that_goes_away_stops_the_answer(address: str) -> None:
    with stream(address) as (client, answers):
        client.async_stream_infer("countdown", inputs(9, turns=LONG))
        client.stop_stream(cancel_requests=True)
    with stream(address) as (client, answers):
        client.async_stream_infer("countdown", inputs(1))
        assert part(answers)[0] == 1
        client.stop_stream()


def test_a_timeout_ends_the_answer(address: str) -> None:
    with stream(address) as (client, answers):
        client.async_stream_infer("countdown", inputs(9, turns=LONG), timeout=300_000)
        assert "300000 microseconds (parameters.timeout) passed" in answers.get(timeout=30)[1].message()
        client.stop_stream()


def test_model_infer_refuses_a_model_that_answers_in_parts(address: str) -> None:
    with closing(triton.InferenceServerClient(address)) as client:
        with pytest.raises(InferenceServerException, match="or ModelStreamInfer over gRPC") as refusal:
            client.infer("countdown", inputs(1))
        assert refusal.value.status() == "StatusCode.INVALID_ARGUMENT"
