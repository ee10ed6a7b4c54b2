"""What Triton's L0_http asks of a server and no other test does: its clients behind a login, chunks, and raw bodies."""

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.http.aio.auth import BasicAuth as AsyncBasicAuth
from tritonclient.http.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from .harness import Served, configuration, serving
from .repository import write
from .test_clients import given
from .wire import Connection, parts

X = np.array([[1, 2.5]], np.float32)
VECTOR = "vector (float[n] x) => (float[n] y) { y = Identity(x) }"
WORDS = "words (string[batch, n] x) => (string[batch, n] y) { y = Identity(x) }"
RAW = {"Inference-Header-Content-Length": "0"}


@pytest.fixture(scope="module", params=[False, True], ids=["asgi", "direct"])
def raw(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("raw")
    write(root, "vector", VECTOR)
    for name, size in (("one", 1), ("any", -1)):
        tensors = [f'{kind} {{ name: "{each}" data_type: TYPE_STRING dims: [ {size} ] }}' for kind, each in KINDS]
        write(root, name, WORDS, config="\n".join(["max_batch_size: 8", *tensors]))
    with serving(configuration(root), direct=request.param) as served:
        yield served


KINDS = (("input", "x"), ("output", "y"))


def test_a_client_that_logs_in_at_a_proxy_is_served(served: Served) -> None:
    """The proxy passes `Authorization: Basic` on; see also TENANT in golden.py."""
    with triton.InferenceServerClient(served.address) as client:
        client.register_plugin(BasicAuth("user", "password"))
        assert client.is_server_live()
        assert client.is_model_ready("identity")
        assert client.infer("identity", [given("x", "FP32", X)]).as_numpy("y").tolist() == X.tolist()


async def test_an_asynchronous_client_that_logs_in_at_a_proxy_is_served(served: Served) -> None:
    async with triton_aio.InferenceServerClient(served.address) as client:
        client.register_plugin(AsyncBasicAuth("user", "password"))
        assert await client.is_server_live()
        answer = await client.infer("identity", [given("x", "FP32", X)])
        assert answer.as_numpy("y").tolist() == X.tolist()


def test_a_path_in_front_of_the_protocols_is_404(served: Served) -> None:
    with triton.InferenceServerClient(f"{served.address}/base_path") as client:
        assert not client.is_server_live()
        with pytest.raises(InferenceServerException, match="there is nothing at /base_path/v2/models/identity/infer"):
            client.infer("identity", [given("x", "FP32", X)])


async def test_administration_of_the_asynchronous_client(served: Served) -> None:
    """As python_http_aio_test.py; shared memory is not served."""
    async with triton_aio.InferenceServerClient(served.address) as client:
        settings = await client.get_trace_settings()
        assert await client.update_trace_settings() == settings
        for refused in (
            client.get_system_shared_memory_status,
            client.unregister_system_shared_memory,
            client.get_cuda_shared_memory_status,
            client.unregister_cuda_shared_memory,
        ):
            with pytest.raises(InferenceServerException, match="there is nothing at /v2/"):
                await refused()


@pytest.mark.parametrize("count", [8, 32])
def test_a_raw_body_is_the_tensor(raw: Served, count: int) -> None:
    numbers = np.arange(count, dtype=np.float32).tobytes()
    answer = httpx.post(f"{raw.url}/v2/models/vector/infer", content=numbers, headers=RAW)
    document, tensors = parts(answer)
    assert (document["outputs"][0]["shape"], tensors) == ([count], [numbers])


def test_a_raw_body_of_text_is_one_element(raw: Served) -> None:
    for model in ("one", "any"):  # Triton asks for dims of [ 1 ]; a size that varies is 1 here.
        document, tensors = parts(httpx.post(f"{raw.url}/v2/models/{model}/infer", content="427", headers=RAW))
        assert (document["outputs"][0]["shape"], tensors) == ([1, 1], [b"\3\0\0\0" + b"427"])


def test_a_body_of_many_chunks_is_limited_by_its_bytes_alone(raw: Served) -> None:
    """Triton refuses more than 65,536 chunks."""
    chunks = b"1\r\nA\r\n" * 65_540
    lines = ["POST /v2/models/vector/infer HTTP/1.1", "Host: a", "Transfer-Encoding: chunked", *map(": ".join, RAW.items())]
    with Connection(raw) as connection:
        connection.send("\r\n".join([*lines, "", ""]).encode() + chunks + b"0\r\n\r\n")
        answer = connection.answer()
        assert answer.status == 200
        assert answer.body.endswith(b"A" * 65_540)
