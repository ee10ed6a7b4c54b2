"""What Triton's L0_http asks of a server and no other test does: its clients behind a login, chunks, and raw bodies."""

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.http.aio.auth import BasicAuth as AsyncBasicAuth
from tritonclient.http.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from .harness import Served
from .test_clients import given
from .wire import Connection, chunked

X = np.array([[1, 2.5]], np.float32)
RAW = "Inference-Header-Content-Length: 0"


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


def test_a_raw_body_of_many_chunks_is_limited_by_its_bytes_alone(served: Served) -> None:
    """Triton refuses more than 65,536 chunks."""
    raw = b"A" * 65_540
    with Connection(served) as connection:
        connection.send(chunked(*(raw[at : at + 1] for at in range(len(raw))), path="/v2/models/half/infer", headers=[RAW]))
        answer = connection.answer()
        assert (answer.status, answer.body[-len(raw) :]) == (200, raw)
