"""Settings of model repositories made for Triton, beyond names and tensors, through Triton's own client."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
import tritonclient.http as triton

from server.config.tenant import TenantConfig

from . import repository
from .fixtures import served_with
from .harness import Served
from .wire import Connection, busy, infer, lane, posted, request, statistics, tensor, until

SCORES = "scores (float[n, 4] x) => (float[n, 4] y) { y = Identity(x) }"
FLAT = "flat (float[4] x) => (float[4] y) { y = Identity(x) }"
SCORES_CONFIG = """
  platform: "onnxruntime_onnx" max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 1000 }
  input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
  output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" } ]
"""
X = np.array([[0.1, 0.4, 0.2, 0.3], [5, 2, 3, 4]], np.float32)


def fill(root: Path) -> None:
    repository.write(root, "scores", SCORES, config=SCORES_CONFIG)
    (root / "scores/labels.txt").write_text("TENCH\nGOLDFISH\nWHITE SHARK\n")
    repository.write(root, "flat", FLAT)
    outside(root)
    repository.write(root, "spin", repository.SPIN)
    repository.write(root, "queued", FLAT, config=queue("max_queue_size: 1"))
    repository.write(root, "hasty", FLAT, config=queue("default_timeout_microseconds: 1000"))


served = served_with(TenantConfig(name="acme", granules=1, models=("*",), in_flight=1), fill=fill)


def queue(policy: str) -> str:
    return f"dynamic_batching {{ default_queue_policy {{ {policy} }} }}"


def outside(root: Path) -> None:
    """A model as a directory, in Triton's layout for those of several files: the weights lie beside the graph."""
    weights = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [2], [10, 20])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Mul", ["x", "w"], ["y"])],
        "outside",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])],
        [weights],
    )
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])
    path = root / "outside/1/model.onnx/model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)


@pytest.fixture
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.address) as client:
        yield client


def test_requests_of_one_batch_are_each_classified(client: triton.InferenceServerClient) -> None:
    with triton.InferenceServerClient(client._parsed_url.netloc, concurrency=8) as many:
        given = triton.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(X[:1])
        wanted = triton.InferRequestedOutput("y", class_count=1)
        pending = [many.async_infer("scores", [given], outputs=[wanted]) for _ in range(16)]
        assert {each.get_result().as_numpy("y")[0, 0] for each in pending} == {b"0.400000:1:GOLDFISH"}


def test_a_model_of_several_files_is_a_directory(client: triton.InferenceServerClient) -> None:
    assert client.get_model_config("outside")["default_model_filename"] == "model.onnx"
    given = triton.InferInput("x", [2], "FP32")
    given.set_data_from_numpy(np.array([1, 2], np.float32))
    assert client.infer("outside", [given]).as_numpy("y").tolist() == [10, 40]


def test_a_full_queue_of_the_models_own_is_503_in_tritons_words(served: Served, http: httpx.Client) -> None:
    """As Triton's L0_http, test_descriptive_status_code."""
    body = request(tensor("x", "FP32", [4], [1, 2, 3, 4]))
    with Connection(served) as waiting, busy(served, http):
        waiting.send(posted("queued", body))
        until(lambda: lane(http)["waiting"] == 1)
        refused = infer(http, "queued", body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"].startswith("Exceeds maximum queue size: 1 may wait for this model")
        assert statistics(http, "queued")["inference_stats"]["fail"]["count"] == 1
    assert infer(http, "queued", body).status_code == 200


def test_a_request_that_waited_too_long_is_503_in_tritons_words(served: Served, http: httpx.Client) -> None:
    body = request(tensor("x", "FP32", [4], [1, 2, 3, 4]))
    with busy(served, http):
        refused = infer(http, "hasty", body)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"].startswith("Request timeout expired: 1000 microseconds in the queue")
    until(lambda: infer(http, "hasty", body).status_code == 200)  # Not at once: it may wait for 1 ms only.


def test_the_configuration_has_every_field(client: triton.InferenceServerClient) -> None:
    """As Triton 2.51 answers for a model like this, but for what the model runs on and how it ran."""
    config = client.get_model_config("scores")
    flags = {"is_shape_tensor": False, "is_non_linear_format_io": False}
    of_input = {"format": "FORMAT_NONE", "allow_ragged_batch": False, "optional": False}
    assert config.pop("parameters").keys() == {"greenlane.execution"}
    assert config == {
        **{"name": "scores", "platform": "onnxruntime_onnx", "backend": "onnxruntime", "runtime": ""},
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4], **flags, **of_input}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4], "label_filename": "labels.txt", **flags}],
        **{"batch_input": [], "batch_output": []},
        "optimization": {
            **{"priority": "PRIORITY_DEFAULT", "gather_kernel_buffer_threshold": 0, "eager_batching": False},
            **{"input_pinned_memory": {"enable": True}, "output_pinned_memory": {"enable": True}},
        },
        "dynamic_batching": {
            **{"preferred_batch_size": [8], "max_queue_delay_microseconds": 1000, "preserve_ordering": False},
            **{"priority_levels": 0, "default_priority_level": 0, "priority_queue_policy": {}},
        },
        "instance_group": [
            {
                **{"name": "scores", "kind": "KIND_CPU", "count": 1, "gpus": [], "secondary_devices": []},
                **{"profile": [], "passive": False, "host_policy": ""},
            }
        ],
        **{"default_model_filename": "model.onnx", "cc_model_filenames": {}, "metric_tags": {}, "model_warmup": []},
    }
