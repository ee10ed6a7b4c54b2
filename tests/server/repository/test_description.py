"""The whole configuration of a model, as `GET /v2/models/NAME/config` shows it."""

import json
from typing import Any

import pytest

from engines.datatypes import DATATYPES
from engines.signature import Signature, TensorSpec
from server.repository.description import describe
from server.repository.model_config import ModelConfig, apply, batching, from_json, parse
from server.scheduling.batching import Batching

MODEL = Signature(
    (TensorSpec("x", DATATYPES["FP32"], ("batch", 3, "height", "")),),
    (TensorSpec("y", DATATYPES["FP32"], ("batch", "height")), TensorSpec("z", DATATYPES["BYTES"], ("batch",))),
)
BATCHED = MODEL.with_max_batch(8)
OPTIMIZATION = {
    "priority": "PRIORITY_DEFAULT",
    "gather_kernel_buffer_threshold": 0,
    "eager_batching": False,
    "input_pinned_memory": {"enable": True},
    "output_pinned_memory": {"enable": True},
}
GROUP = {
    **{"name": "m", "kind": "KIND_CPU", "count": 1, "gpus": [], "secondary_devices": [], "profile": []},
    **{"passive": False, "host_policy": ""},
}


def shown(text: str, signature: Signature = BATCHED, **other: Any) -> dict[str, Any]:
    return describe("m", parse(text, "c"), signature, "onnxruntime_onnx", **other)


def put_in(name: str, kind: str, dims: list[int]) -> dict[str, Any]:
    """An input without any field set."""
    flags = {"is_shape_tensor": False, "allow_ragged_batch": False, "optional": False, "is_non_linear_format_io": False}
    return {"name": name, "data_type": kind, "format": "FORMAT_NONE", "dims": dims, **flags}


def put_out(name: str, kind: str, dims: list[int]) -> dict[str, Any]:
    flags = {"label_filename": "", "is_shape_tensor": False, "is_non_linear_format_io": False}
    return {"name": name, "data_type": kind, "dims": dims, **flags}


def test_a_model_without_configuration_is_described_from_itself() -> None:
    """As in Triton's QA (L0_model_config, autofill), except for the batch, which no model states."""
    assert describe("m", ModelConfig(), MODEL, "onnxruntime_onnx") == {
        "name": "m",
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [put_in("x", "TYPE_FP32", [-1, 3, -1, -1])],
        "output": [put_out("y", "TYPE_FP32", [-1, -1]), put_out("z", "TYPE_STRING", [-1])],
        "batch_input": [],
        "batch_output": [],
        "optimization": OPTIMIZATION,
        "instance_group": [GROUP],
        "default_model_filename": "model.onnx",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
    }


def test_configured_tensors_come_first_in_description() -> None:
    text = """
      input { name: "x" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] format: FORMAT_NCHW }
      output { name: "z" data_type: TYPE_STRING label_filename: "labels.txt" }
    """
    described = shown(text)
    assert described["input"] == [{**put_in("x", "TYPE_FP32", [3, -1, -1]), "format": "FORMAT_NCHW"}]
    assert [each["name"] for each in described["output"]] == ["z", "y"]
    assert described["output"][0]["label_filename"] == "labels.txt"


def test_ignored_fields_are_described_as_configured() -> None:
    text = """
      metric_tags { key: "a" value: "b" } parameters { key: "k" value { string_value: "v" } }
      optimization { graph { level: -1 } priority: PRIORITY_MAX input_pinned_memory { enable: false } cuda { graphs: true } }
      model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 3, 1, 1 ] } } }
      response_cache { enable: true }
    """
    described = shown(text)
    assert (described["metric_tags"], described["parameters"]) == ({"a": "b"}, {"k": {"string_value": "v"}})
    assert described["optimization"] == {
        **OPTIMIZATION,
        "graph": {"level": -1},
        "priority": "PRIORITY_MAX",
        "input_pinned_memory": {"enable": False},
        "cuda": {"graphs": True, "busy_wait_events": False, "graph_spec": [], "output_copy_stream": False},
    }
    inputs = {"x": {"data_type": "TYPE_FP32", "dims": [3, 1, 1]}}
    assert described["model_warmup"] == [{"name": "w", "batch_size": 1, "inputs": inputs, "count": 0}]
    assert described["response_cache"] == {"enable": True}


def test_dynamic_batching_is_described_in_full() -> None:
    text = """
      dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1
        default_queue_policy { max_queue_size: 4 default_timeout_microseconds: 9000000000 }
        priority_queue_policy { key: 2 value { timeout_action: DELAY } } }
    """
    described = shown(text, batching=Batching(BATCHED, 8, 0.0001))
    policy = {
        "timeout_action": "REJECT",
        "default_timeout_microseconds": 0,
        "allow_timeout_override": False,
        "max_queue_size": 0,
    }
    assert described["dynamic_batching"] == {
        "preferred_batch_size": [8],
        "max_queue_delay_microseconds": 100,
        "preserve_ordering": True,
        "priority_levels": 2,
        "default_priority_level": 1,
        "default_queue_policy": {**policy, "max_queue_size": 4, "default_timeout_microseconds": 9_000_000_000},
        "priority_queue_policy": {"2": {**policy, "timeout_action": "DELAY"}},
    }


@pytest.mark.parametrize("delay", [1.8446744073709552e13, 6e16])
def test_a_delay_of_millennia_is_described_by_a_number_that_a_message_takes(delay: float) -> None:
    described = shown("", batching=Batching(BATCHED, 8, delay, (4,)))
    assert described["dynamic_batching"]["max_queue_delay_microseconds"] == 2**64 - 1


def test_default_batching_is_described() -> None:
    described = shown("", batching=Batching(BATCHED, 8, 0.0, (4,)))
    assert described["dynamic_batching"]["preferred_batch_size"] == [4]
    assert "dynamic_batching" not in shown("dynamic_batching {}", MODEL)


def test_instance_groups_get_the_names_and_kinds_that_triton_gives_them() -> None:
    for text, name in (("instance_group { kind: KIND_AUTO }", "m_0"), ('instance_group { name: "b" kind: KIND_CPU }', "b")):
        (group,) = shown(text)["instance_group"]
        assert (group["name"], group["kind"], group["count"]) == (name, "KIND_CPU", 1)
    plan = describe("m", ModelConfig(), MODEL, "tensorrt_plan", "model.plan", on_gpu=True)
    assert (plan["instance_group"][0]["kind"], plan["default_model_filename"]) == ("KIND_GPU", "model.plan")


@pytest.mark.parametrize("text", ["instance_group { count: 2 }", "instance_group [ { name: 'a' }, { name: 'b' } ]"])
def test_one_instance_is_shown_whatever_was_asked_for(text: str) -> None:
    assert shown(text)["instance_group"] == [GROUP]


def test_execution_is_a_parameter_without_counts() -> None:
    described = shown("", execution={"graphs": "none", "counts": {"a": 1}})
    assert json.loads(described["parameters"]["greenlane.execution"]["string_value"]) == {"graphs": "none"}


def test_description_can_be_read_back_as_configuration() -> None:
    how, _ = batching(ModelConfig(), BATCHED)
    described = describe("m", ModelConfig(), BATCHED, "onnxruntime_onnx", "model.onnx", how, {"graphs": "none"})
    again = from_json(json.dumps(described))
    assert (apply(again, MODEL), again.unread) == (BATCHED, ("instance_group.kind",))
    assert describe("m", again, BATCHED, "onnxruntime_onnx", "model.onnx", how, {"graphs": "none"}) == described
