"""Shapes that the library answers wrongly on this GPU are answered rightly by the server, or with an error."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.nets import encoder
from engines.verification.rule import row_error, tolerance
from server.config.schema import Config, DeviceConfig, ModelOptions, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from tests.end_to_end.harness import Served, serving
from tests.engines import small
from tests.models import INDEXED

from .networks import bottlenecks

pytestmark = pytest.mark.gpu

SUSPECTS = ((2, 53), (1, 106), (2, 115), (8, 73))
"""Rows and positions that TensorRT-RTX 1.6.1 answered wrongly on two H100s (2026-11-26)."""
OTHERS = ((1, 53), (3, 53), (2, 52), (2, 54), (7, 73))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, device: Any) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("answers")
    sources = {"encs": encoder(layers=3, tokens="s"), "branches": bottlenecks().onnx, "indexed": small.model(INDEXED)}
    for name, data in sources.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.onnx").write_bytes(data)
    profile = (("x", ((1, 16, 512), (8, 128, 512), (8, 256, 512))),)
    options = {
        "encs": ModelOptions(max_batch=8, profiles=(profile,)),
        "branches": ModelOptions(max_batch=4),
        "indexed": ModelOptions(max_batch=4),
    }
    config = Config(
        server=ServerConfig(default_tenant="acme", drain_grace=0.0),
        device=DeviceConfig(backend="cuda"),
        models=ModelsConfig(repository=root, options=options),
        tenants={"acme": TenantConfig(name="acme", granules=4, models=("*",))},
        source="test",
    )
    with serving(config) as served:
        yield served


@pytest.fixture(scope="module")
def reference(served: Served) -> Any:
    ort = pytest.importorskip("onnxruntime")
    return ort.InferenceSession(encoder(layers=3, tokens="s"), providers=["CPUExecutionProvider"])


def ask(served: Served, data: np.ndarray, model: str = "encs") -> httpx.Response:
    """An inference with binary tensors."""
    tensor = {"name": "x", "datatype": "FP32", "shape": list(data.shape), "parameters": {"binary_data_size": data.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    return httpx.post(f"{served.url}/v2/models/{model}/infer", content=head + data.tobytes(), headers=length, timeout=90)


def test_every_shape_is_answered_rightly_or_with_an_error(served: Served, reference: Any, figures: dict[str, Any]) -> None:
    chance, refused = np.random.default_rng(5), []
    for rows, positions in (*SUSPECTS, *OTHERS, *SUSPECTS, *OTHERS):
        data = chance.standard_normal((rows, positions, 512), np.float32)
        answer = ask(served, data)
        if answer.status_code == 500:
            assert f"does not answer shape {rows}x{positions}x512: output 'y' is off by" in answer.json()["error"]
            refused.append((rows, positions))
            continue
        assert answer.status_code == 200, answer.text
        body = answer.content[int(answer.headers["inference-header-content-length"]) :]
        (expected,) = reference.run(None, {"x": data})
        error = row_error(expected, np.frombuffer(body, np.float32).reshape(data.shape))
        assert error < tolerance("TF32"), f"{rows}x{positions} is off by {error}"
    assert not set(refused) & set(OTHERS)
    (model,) = [each for each in httpx.get(f"{served.url}/admin/status").json()["models"] if each["name"] == "encs"]
    figures["answers"] = {"refused": sorted(set(refused)), "verified": model["execution"]["verified"]}
    assert (
        'greenlane_model_shapes{model="encs",tenant="acme",verdict="right",version="1"}'
        in httpx.get(f"{served.url}/metrics").text
    )


def test_a_network_with_branches_is_answered_rightly_each_time(served: Served, figures: dict[str, Any]) -> None:
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(bottlenecks().onnx, providers=["CPUExecutionProvider"])
    chance, errors = np.random.default_rng(7), []
    for number in range(50):
        data = chance.standard_normal((1 + number % 3, 3, 224, 224), np.float32)
        answer = ask(served, data, "branches")
        assert answer.status_code == 200, answer.text
        body = answer.content[int(answer.headers["inference-header-content-length"]) :]
        (expected,) = session.run(None, {"x": data})
        errors.append(row_error(expected, np.frombuffer(body, np.float32).reshape(expected.shape)))
    figures["branches"] = {"answers": len(errors), "worst error": max(errors)}
    assert max(errors) < tolerance("TF32"), errors


def test_a_model_that_makes_indices_of_floats_is_joined_and_answered_rightly(served: Served, figures: dict[str, Any]) -> None:
    """Its rows were tried within its table: what the GPU does with an index beyond it might end the process."""
    config = httpx.get(f"{served.url}/v2/models/indexed/config").json()
    figures["indexed"] = json.loads(config["parameters"]["greenlane.execution"]["string_value"])
    assert figures["indexed"]["rows"] == "separate"
    data = np.float32([[0, 1, 2], [50.5, 98, 99]])
    answer = ask(served, data, "indexed")
    assert answer.status_code == 200, answer.text
    body = answer.content[int(answer.headers["inference-header-content-length"]) :]
    table = np.arange(200, dtype=np.float32).reshape(100, 2)
    assert np.array_equal(np.frombuffer(body, np.float32).reshape(2, 3, 2), table[data.astype(int)])
