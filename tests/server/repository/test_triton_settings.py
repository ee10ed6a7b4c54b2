"""Triton's settings of how a model runs: those that are followed, ignored by name, or refused."""

import json

import pytest

from server.repository.model_config import ConfigRefused, ModelConfig, from_json, parse

BATCHED = "max_batch_size: 8\n"
SAMPLE = 'inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 3, 4 ] zero_data: true } }'


THREADS = {"intra_op_threads": 4, "inter_op_threads": 0}
MEMORY = {"memory_arena": False, "memory_pattern": True}


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


def read(text: str) -> ModelConfig:
    return parse(text, "m/config.pbtxt")


def said(text: str) -> dict[str, object]:
    return {field: said.value for field, said in read(text).settings.items()}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("instance_group [ { count: 2 }, { name: 'more' }, { count: 3 } ]", {"instances": 6}),
        ("instance_group []", {}),
        ("instance_group { count: 1 }", {}),
        ("instance_group { profile: '2' }", {"profile": 2}),
        ("instance_group { profile: [ '1', '2' ] }", {}),
        ("optimization { cuda { graphs: true } }", {"graphs": "on"}),
        ("optimization { cuda { graphs: false } }", {"graphs": "off"}),
        ("optimization { cuda {} }", {}),
        (BATCHED + "model_warmup { name: 'a' batch_size: 4 } model_warmup { name: 'b' batch_size: 8 }", {"warm_up": (4, 8)}),
        (BATCHED + "model_warmup { name: 'a' }", {"warm_up": (1,)}),
        (BATCHED + f"model_warmup {{ batch_size: 4 {SAMPLE} }}", {"warm_up": ((("x", (4, 3, 4)),),)}),
        (f"model_warmup {{ batch_size: 1 {SAMPLE} }}", {"warm_up": ((("x", (3, 4)),),)}),
        (
            BATCHED
            + 'input { name: "x" data_type: TYPE_FP32 dims: [3, -1] reshape { shape: [1, 3, -1] } }'
            + f"model_warmup {{ batch_size: 4 {SAMPLE} }}",
            {"warm_up": ((("x", (4, 1, 3, 4)),),)},
        ),
        ("model_warmup { batch_size: 1 }", {}),
        (
            BATCHED + "optimization { cuda { graph_spec { batch_size: 2 input { key: 'x' value { dim: 5 } } } "
            "graph_spec { batch_size: 8 } } }",
            {"warm_up": ((("x", (2, 5)),), 8)},
        ),
        ("parameters { key: 'greenlane.copies' value { string_value: 'sm' } }", {"copies": "sm"}),
        (parameter("intra_op_thread_count", "4") + parameter("inter_op_thread_count", "0"), THREADS),
        (parameter("execution_mode", "1"), {"execution_mode": "parallel"}),
        (parameter("enable_mem_arena", "False") + parameter("enable_mem_pattern", "1"), MEMORY),
        ("optimization { graph { level: -1 } }", {"graph_optimization": "basic"}),
        ("optimization { graph { level: 1 } }", {"graph_optimization": "extended"}),
        ("optimization { graph { level: 2 } }", {"graph_optimization": "none"}),
        ("optimization { graph { level: 0 } }", {}),
    ],
)
def test_triton_fields_become_settings(text: str, settings: dict[str, object]) -> None:
    assert said(text) == settings


def test_greenlane_parameters_overrule_triton_fields() -> None:
    text = "optimization { cuda { graphs: true } } parameters { key: 'greenlane.graphs' value { string_value: 'off' } }"
    graphs = read(text).settings["graphs"]
    assert (graphs.value, graphs.where, graphs.is_tritons) == ("off", "m/config.pbtxt: parameters greenlane.graphs", False)


def test_ignored_triton_fields_are_named() -> None:
    text = """
      instance_group { kind: KIND_GPU gpus: [ 0, 1 ] }
      optimization { priority: PRIORITY_MAX cuda { output_copy_stream: true graph_spec { graph_lower_bound {} } } }
      model_warmup { count: 3 inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 random_data: true } } }
      parameters { key: "session.use_device_allocator_for_initializers" value { string_value: "0" } }
    """
    assert read(text).unread == (
        *("optimization.priority", "optimization.cuda.graph_spec.graph_lower_bound", "optimization.cuda.output_copy_stream"),
        *("instance_group.kind", "instance_group.gpus"),
        *("model_warmup.inputs.value.random_data", "model_warmup.count"),
        "parameters.session.use_device_allocator_for_initial...",
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("instance_group { count: -1 }", "instance_group.count is -1; expected 1 or more"),
        (
            "instance_group { profile: 'max' }",
            "instance_group.profile: 'max'; expected the number of an optimization profile, ",
        ),
        (BATCHED + "model_warmup { batch_size: 9 }", "model_warmup[0].batch_size is 9; expected 1 to 8, the max_batch_size"),
        ("model_warmup { batch_size: 2 }", "model_warmup[0].batch_size is 2; expected 1, as the model has no max_batch_size"),
        (
            "model_warmup { inputs { key: 'x' value { data_type: TYPE_FP32 dims: [ 3, -1 ] } } }",
            "model_warmup[0]: -1 in dims [3, -1] of input 'x'; expected sizes of 1 or more",
        ),
        (
            BATCHED + "optimization { cuda { graph_spec { batch_size: -1 } } }",
            "optimization.cuda.graph_spec[0].batch_size is -1; expected 1 to 8, the max_batch_size",
        ),
        (BATCHED + "model_warmup { batch_size: 1 }" * 65, "65 samples to warm up; expected at most 64"),
        (
            "parameters { key: 'greenlane.graphs' value { string_value: 'no' } }",
            "parameters 'greenlane.graphs': 'no' is not 'on' or 'off' or 'required'",
        ),
        (parameter("execution_mode", "2"), "parameters execution_mode: '2'; expected 0 or 1"),
        (parameter("enable_mem_arena", "yes"), "parameters enable_mem_arena: 'yes'; expected 0 or 1 or false or true"),
        (
            parameter("intra_op_thread_count", "-1"),
            "parameters intra_op_thread_count: '-1'; expected a number of threads, or 0 for one a core",
        ),
    ],
)
def test_invalid_triton_fields_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigRefused) as refusal:
        read(text)
    assert str(refusal.value).startswith(f"m/config.pbtxt: {why}")


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"parameters": [1]}, "parameters: [1]; expected an object"),
        ({"parameters": {"a": "b"}}, 'parameters.a: "b"; expected an object'),
        ({"parameters": {"a": {"string_value": 1}}}, "parameters.a.string_value: 1; expected a string"),
        ({"optimization": {"cuda": {"graphs": 1}}}, "optimization.cuda.graphs: 1; expected true or false"),
    ],
)
def test_json_of_wrong_type_is_refused(document: object, why: str) -> None:
    with pytest.raises(ConfigRefused) as refusal:
        from_json(json.dumps(document))
    assert str(refusal.value) == f"the config parameter: {why}"
