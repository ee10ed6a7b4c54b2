"""The clients that people have: Triton's for Python, both of them, and KServe's calls as it makes them."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from .harness import Served
from .repository import ODD_NAME
from .wire import FOREVER, lane, until

UNKNOWN = "Request for unknown model: 'nope' is not found"


@pytest.fixture
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.address, concurrency=2) as client:
        yield client


@pytest.fixture
async def aio(served: Served) -> AsyncIterator[triton_aio.InferenceServerClient]:
    async with triton_aio.InferenceServerClient(served.address) as client:
        yield client


def given(name: str, datatype: str, array: Any, binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def spin(turns: int) -> list[triton.InferInput]:
    return [given("turns", "INT64", np.array(turns)), given("x", "FP32", np.full((64, 64), 0.1, np.float32))]


X = np.array([[1.5, -2], [3, 4]], np.float32)
A, B = np.array([1, 2], np.int32), np.array([30, 40], np.int32)
WORDS = np.array(["grün".encode(), b"", b"lane"], object)


def test_health(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("identity")
    assert client.is_model_ready("scaled", "2")
    assert client.is_model_ready(ODD_NAME)
    assert not client.is_model_ready("nope")
    assert not client.is_model_ready("scaled", "3")


def test_metadata_configuration_and_statistics(client: triton.InferenceServerClient) -> None:
    assert client.get_server_metadata()["name"] == "greenlane"
    assert client.get_model_metadata("scaled", "2")["versions"] == ["1", "2", "10"]
    config = client.get_model_config("rows")
    assert config["max_batch_size"] == 4
    assert json.loads(config["parameters"]["greenlane.execution"]["string_value"])["graphs"] == "none"
    assert {entry["name"] for entry in client.get_inference_statistics()["model_stats"]} > {"identity", "rows"}
    (entry,) = client.get_inference_statistics("scaled", "2")["model_stats"]
    assert (entry["name"], entry["version"]) == ("scaled", "2")
    assert {"success", "fail", "queue", "compute_infer"} <= set(entry["inference_stats"])


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("outputs", [None, False, True])
def test_every_mix_of_json_and_binary(client: triton.InferenceServerClient, binary_in: bool, outputs: bool | None) -> None:
    inputs = [given("a", "INT32", A, binary_in), given("b", "INT32", B)]
    names = ("difference", "sum")
    wanted = None if outputs is None else [triton.InferRequestedOutput(name, binary_data=outputs) for name in names]
    result = client.infer("add", inputs, outputs=wanted, request_id="r-7")
    assert result.get_response()["id"] == "r-7"
    assert result.as_numpy("sum").tolist() == [31, 42]
    assert result.as_numpy("difference").tolist() == [-29, -38]


@pytest.mark.parametrize(
    ("model", "name", "datatype", "array", "output"),
    [
        ("identity", "x", "FP32", X, "y"),
        ("identity", "x", "FP32", np.zeros((0, 2), np.float32), "y"),
        ("half", "x", "FP16", np.array([1.5, -2], np.float16), "y"),
        ("brain", "x", "BF16", np.array([1.5, -2], ml_dtypes.bfloat16), "y"),
        ("text", "words", "BYTES", WORDS, "same"),
        (ODD_NAME, "x", "FP32", X, "y"),
    ],
)
def test_every_kind_of_tensor_comes_back(
    client: triton.InferenceServerClient, model: str, name: str, datatype: str, array: Any, output: str
) -> None:
    returned = client.infer(model, [given(name, datatype, array)]).as_numpy(output)
    assert (returned.shape, returned.dtype) == (array.shape, array.dtype)
    assert returned.tolist() == array.tolist()


def test_texts_in_json_both_ways(client: triton.InferenceServerClient) -> None:
    wanted = [triton.InferRequestedOutput("same", binary_data=False)]
    result = client.infer("text", [given("words", "BYTES", WORDS, binary=False)], outputs=wanted)
    assert result.as_numpy("same").tolist() == ["grün", "", "lane"]


def test_versions_query_and_headers(client: triton.InferenceServerClient) -> None:
    one = [given("x", "FP32", np.ones(1, np.float32))]
    options = {"query_params": {"test_1": 1}, "headers": {"X-Tenant": "acme"}}
    assert client.infer("scaled", one, model_version="2", **options).as_numpy("y").tolist() == [20]
    with pytest.raises(InferenceServerException, match="no tenant 'nobody'") as refused:
        client.infer("scaled", one, headers={"X-Tenant": "nobody"})
    assert refused.value.status() == "401"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_both_ways(client: triton.InferenceServerClient, algorithm: str) -> None:
    large = np.arange(40_000, dtype=np.float32).reshape(200, 200)
    result = client.infer(
        "identity",
        [given("x", "FP32", large)],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert (result.as_numpy("y") == large).all()


def test_pipelined_requests(client: triton.InferenceServerClient) -> None:
    requests = [client.async_infer("identity", [given("x", "FP32", X + n)]) for n in range(8)]
    assert all((request.get_result().as_numpy("y") == X + n).all() for n, request in enumerate(requests))


def test_the_timeout_parameter(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match=r"^\[504\] Request timeout expired: "):
        client.infer("spin", spin(FOREVER), timeout=20_000)


def test_a_client_timeout_cancels_its_work(served: Served, http: httpx.Client) -> None:
    with triton.InferenceServerClient(served.address, network_timeout=0.1) as hasty, pytest.raises(TimeoutError):
        hasty.infer("spin", spin(FOREVER))
    until(lambda: lane(http)["in_flight"] == 0)


def test_the_client_raises_the_servers_error_texts(client: triton.InferenceServerClient) -> None:
    mistakes: list[tuple[str, Any]] = [
        (f"[404] {UNKNOWN}", lambda: client.infer("nope", [])),
        (f"[404] {UNKNOWN}", lambda: client.get_model_metadata("nope")),
        (f"[404] {UNKNOWN}", lambda: client.get_model_config("nope")),
        (f"[404] {UNKNOWN}", lambda: client.get_inference_statistics("nope")),
        ("[404] Request for unknown model: 'add' version 99 is not found", lambda: client.get_model_metadata("add", "99")),
        ("[400] inputs: 'b' missing; the model takes 'a', 'b'", lambda: client.infer("add", [given("a", "INT32", A)])),
    ]
    for text, mistake in mistakes:
        with pytest.raises(InferenceServerException) as raised:
            mistake()
        assert str(raised.value) == text


def test_the_repository_through_the_client(client: triton.InferenceServerClient) -> None:
    def state() -> Any:
        return next(entry for entry in client.get_model_repository_index() if entry["name"] == "half")

    assert state() == {"name": "half", "version": "1", "state": "READY"}
    client.unload_model("half")
    assert state() == {"name": "half", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert not client.is_model_ready("half")
    with pytest.raises(InferenceServerException, match=r"\[503\] model 'half' is unavailable: unloaded"):
        client.infer("half", [given("x", "FP16", np.ones(1, np.float16))])
    client.load_model("half", config=json.dumps({"name": "half"}))
    assert client.is_model_ready("half")


def test_loading_a_missing_model_fails_with_tritons_text(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="failed to load 'nope'"):
        client.load_model("nope")
    with pytest.raises(InferenceServerException, match=r"parameters\.file:1/model\.onnx: failed to load"):
        client.load_model("identity", config="{}", files={"file:1/model.onnx": b"x"})
    client.unload_model("nope")


async def test_the_asynchronous_client(aio: triton_aio.InferenceServerClient) -> None:
    assert await aio.is_server_live()
    assert await aio.is_server_ready()
    assert await aio.is_model_ready("identity")
    assert not await aio.is_model_ready("nope")
    assert (await aio.get_server_metadata())["name"] == "greenlane"
    assert (await aio.get_model_metadata("add"))["inputs"][0]["datatype"] == "INT32"
    assert (await aio.get_model_config("rows"))["max_batch_size"] == 4
    assert len((await aio.get_inference_statistics("scaled"))["model_stats"]) == 3
    assert {"name": "add", "version": "1", "state": "READY"} in await aio.get_model_repository_index()
    await aio.load_model("text")
    await aio.unload_model("nope")


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
async def test_the_asynchronous_client_infers(aio: triton_aio.InferenceServerClient, algorithm: str | None) -> None:
    large = np.zeros((100, 100), np.float32)
    result = await aio.infer(
        "identity",
        [given("x", "FP32", large)],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert (result.as_numpy("y") == large).all()
    texts = await aio.infer("text", [given("words", "BYTES", WORDS, binary=False)])
    assert texts.as_numpy("same").tolist() == WORDS.tolist()


async def test_the_asynchronous_client_raises_the_servers_errors(aio: triton_aio.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match=UNKNOWN):
        await aio.infer("nope", [])
    with pytest.raises(InferenceServerException, match="Request timeout expired"):
        await aio.infer("spin", spin(FOREVER), timeout=20_000)


def test_the_calls_of_kserves_client(http: httpx.Client) -> None:
    """kserve 0.21 `InferenceRESTClient`: these paths, these keys of the bodies, this Content-Type and `model_name`."""
    assert http.get("/v2/health/live").json().get("live") is True
    assert http.get("/v2/health/ready").json().get("ready") is True
    assert http.get("/v2/models/add/ready").is_success
    assert not http.get("/v2/models/nope/ready").is_success
    a, b = ({"name": name, "shape": [1], "datatype": "INT32", "data": [1]} for name in "ab")
    body = {"id": "1", "model_name": "add", "inputs": [a, b]}
    answer = http.post("/v2/models/add/infer", content=json.dumps(body), headers={"content-type": "application/json"})
    result = answer.json()
    assert (result["model_name"], result.get("id"), result["outputs"][0]["data"]) == ("add", "1", [2])
    error = http.post("/v2/models/add/infer", json={"inputs": []})
    assert error.headers["content-type"] == "application/json"
    assert "error" in error.json()


def test_the_binary_calls_of_kserves_client(http: httpx.Client) -> None:
    x = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    body = {"id": "1", "model_name": "identity", "inputs": [x], "parameters": {"binary_data_output": True}}
    head, data = json.dumps(body).encode(), np.array([1, 2], np.float32).tobytes()
    headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
    answer = http.post("/v2/models/identity/infer", content=head + data, headers=headers)
    size = int(answer.headers.get("inference-header-content-length", len(answer.content)))
    (output,) = json.loads(answer.content[:size])["outputs"]
    assert {"name", "shape", "datatype", "parameters"} == set(output)
    assert answer.content[size : size + output["parameters"]["binary_data_size"]] == data
