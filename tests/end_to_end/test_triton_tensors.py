"""What Triton's own tests of tensors ask of a server: L0_nan_inf. Over sockets, in both forms, with Triton's client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from . import repository
from .harness import Served, configuration, serving
from .test_clients import given

NAN_INF = """nan_inf_output (float[one] INPUT0) => (float[six] OUTPUT0)
<float[6] over = {0, 1, -1, 1, 2, 3}, float[6] by = {0, 0, 0, 1, 1, 1}> { OUTPUT0 = Div(over, by) }
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    repository.write(root, "nan_inf_output", NAN_INF)
    return root


@pytest.fixture(scope="module", params=["asgi", "front"])
def triton_served(root: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(configuration(root), front=request.param == "front") as served:
        yield served


@pytest.fixture
def client(triton_served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(triton_served.address) as client:
        yield client


def post(served: Served, model: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v2/models/{model}/infer", json=fields)


ONE = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}


class TestNanInf:
    def test_http_raw(self, triton_served: Served) -> None:
        response = post(triton_served, "nan_inf_output", inputs=[ONE])
        assert response.status_code == 200
        assert b'"data":[NaN,Infinity,-Infinity,1.0,2.0,3.0]' in response.content
        np.testing.assert_array_equal(json.loads(response.content)["outputs"][0]["data"], [np.nan, np.inf, -np.inf, 1, 2, 3])

    def test_http(self, client: triton.InferenceServerClient) -> None:
        result = client.infer("nan_inf_output", [given("INPUT0", "FP32", np.zeros(1, np.float32))]).as_numpy("OUTPUT0")
        np.testing.assert_array_equal(result, np.array([np.nan, np.inf, -np.inf, 1, 2, 3], np.float32))

    def test_null_in_their_places_where_it_is_configured(self, root: Path) -> None:
        with serving(configuration(root, nonfinite_json="null")) as served:
            response = post(served, "nan_inf_output", inputs=[ONE])
            assert response.json()["outputs"][0]["data"] == [None, None, None, 1, 2, 3]
