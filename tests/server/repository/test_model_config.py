"""Model configurations: reading, refusing with good errors, and applying to a signature."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.datatypes import DATATYPES
from engines.errors import ModelRefused
from engines.signature import Form, Signature, TensorSpec
from server.repository.model_config import (
    ConfigRefused,
    ModelConfig,
    StatedTensor,
    VersionPolicy,
    apply,
    batching,
    from_json,
    parse,
)
from server.repository.pbtxt import read_text
from server.repository.triton_schema import as_json

TYPICAL = """
name: "resnet50"  # as the directory {
platform: "onnxruntime_onnx"
max_batch_size: 8
input [
  { name: "image" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, -1 ] reshape { shape: [ 672, -1 ] } },
  < name: "threshold"; data_type: TYPE_FP16, is_shape_tensor: false >
]
output: [ { name: 'la' "bel" data_type: TYPE_STRING dims: 1 label_filename: "labels.txt" } ]
version_policy: { latest { num_versions: 2 } }
instance_group [ { count: 2 kind: KIND_CPU name: "max_batch_size: 3 }" } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 };
optimization { graph : { level : -1 } }
parameters { key: "a" value: { string_value: "\\"{" "more" } }
parameters { key: "b" value: { string_value: "c" } }
"""
LONG = "x" * 1000
BATCHED = Signature(
    (TensorSpec("x", DATATYPES["FP32"], ("batch", 3, "height", "")),),
    (TensorSpec("y", DATATYPES["FP32"], ("batch", "height")), TensorSpec("z", DATATYPES["BYTES"], ("batch",))),
)
STRICT = replace(BATCHED, same_sizes=True)


def read(text):
    return parse(text, "m/config.pbtxt")


def refusal(text):
    with pytest.raises(ConfigRefused) as refused:
        read(text)
    return str(refused.value)


def contradiction(text, signature=STRICT):
    with pytest.raises(ModelRefused, match="contradicts the model: ") as refused:
        apply(read(text), signature)
    return str(refused.value)


def tensor(field, name, datatype, dims):
    return f'{field} {{ name: "{name}" data_type: {datatype} dims: {dims} }}\n'


def reshaped(dims, shape, field="input", name="x"):
    return f'{field} {{ name: "{name}" data_type: TYPE_FP32 dims: {dims} reshape {{ shape: {shape} }} }}\n'


def test_a_typical_file_is_read():
    config = read(TYPICAL)
    assert (config.name, config.max_batch, config.stated_max_batch) == ("resnet50", 8, 8)
    assert config.inputs == (StatedTensor("image", "FP32", (3, 224, -1), (672, -1)), StatedTensor("threshold", "FP16", ()))
    assert config.outputs == (StatedTensor("label", "BYTES", (1,)),)
    assert config.versions == VersionPolicy(latest=2)
    assert (config.filenames, config.source) == (("model.onnx",), "m/config.pbtxt")


def test_dynamic_batching_is_read():
    config = read(TYPICAL)
    assert (config.batch_delay, config.preferred_batches) == (0.0001, (4, 8))
    assert read("dynamic_batching { preferred_batch_size: [ 8, 4, 8 ] }").preferred_batches == (4, 8)
    block = {"preferredBatchSize": [2], "max_queue_delay_microseconds": "500"}
    parsed = from_json(json.dumps({"dynamic_batching": block}))
    assert (parsed.batch_delay, parsed.preferred_batches) == (0.0005, (2,))


def test_reason_for_no_batching_is_given():
    square = Signature((TensorSpec("x", DATATYPES["FP32"], ("n", "n")),), (), 8)
    assert batching(ModelConfig(), square) == (
        None,
        "requests are not joined into batches: 'x' has the batch dimension 'n' in another place too: [n, n]",
    )


def test_fields_that_are_not_read_are_named_once():
    assert read(TYPICAL).unread == (*("instance_group.kind", "parameters.a", "parameters.b"),)
    assert read("dynamic_batching { preserve_ordering: true zzz: 1 }").unread == (
        "dynamic_batching.zzz (there is no such field)",
        "dynamic_batching.preserve_ordering",
    )


def test_a_field_with_the_value_that_it_has_anyway_is_not_named():
    text = "instance_group { kind: KIND_AUTO passive: false gpus: [] } dynamic_batching { preserve_ordering: false }"
    assert read(text + " optimization { input_pinned_memory { enable: true } }").unread == ()


def test_every_field_of_triton_is_known_in_either_form():
    """Fields from Triton's documentation that nest deepest or have unusual types."""
    text = """
      cc_model_filenames { key: "7.5" value: "m.onnx" }
      optimization { execution_accelerators { gpu_execution_accelerator : [ {
        name : "tensorrt" parameters { key: "precision_mode" value: "FP16" } } ] } }
      dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: 1
        priority_queue_policy { key: 18446744073709551615 value { timeout_action: DELAY } } }
      model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { buckets: [ 0.5, 1 ] } } }
      instance_group { rate_limiter { resources { name: "R" global: True count: 2 } } secondary_devices { device_id: 1 } }
    """
    again = from_json(json.dumps(as_json(read_text(text, "m").message)))
    assert (
        again.unread
        == read(text).unread
        == (
            *("optimization.execution_accelerators", "dynamic_batching.priority_queue_policy.value.timeout_action"),
            *("instance_group.rate_limiter", "instance_group.secondary_devices", "cc_model_filenames", "model_metrics"),
        )
    )


def test_unknown_fields_are_listed_with_a_suggestion():
    text = 'max_bacth_size: 8 input { nmae: "x" name: "x" data_type: TYPE_FP32 reshap {} } dynamic_batch {} zzz: 1'
    expected = (
        *("max_bacth_size (did you mean max_batch_size?)", "input.nmae (did you mean name?)"),
        *("input.reshap (did you mean reshape?)", "dynamic_batch (did you mean dynamic_batching?)"),
        "zzz (there is no such field)",
    )
    assert read(text).unread == expected


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"instanceGroup": [], "maxBacthSize": 8}, "maxBacthSize (did you mean max_batch_size?)"),
        ({"max_batch_siz": 8}, "max_batch_siz (did you mean max_batch_size?)"),
        ({"input": [{"name": "x", "data_type": "TYPE_FP32", "nmae": "x"}]}, "input.nmae (did you mean name?)"),
        ({LONG: 1}, f"{LONG[:40]}... (there is no such field)"),
        ({"a)": 1}, "a) (there is no such field)"),
    ],
)
def test_unknown_json_fields_are_refused_with_a_suggestion(document, expected):
    with pytest.raises(ConfigRefused) as refused:
        from_json(json.dumps(document))
    assert str(refused.value) == f"the config parameter: {expected}"


def test_every_data_type_of_the_protocol_is_read():
    inputs = "".join(tensor("input", name, datatype.config_name, "[]") for name, datatype in DATATYPES.items())
    assert [(item.name, item.datatype) for item in read(inputs).inputs] == [(name, name) for name in DATATYPES]


@pytest.mark.parametrize(
    ("text", "filenames"),
    [
        ("", ("model.onnx", "model.plan")),
        ('platform: "tensorrt_plan"', ("model.plan",)),
        ('backend: "tensorrt"', ("model.plan",)),
        ('backend: "onnxruntime"', ("model.onnx",)),
        ('default_model_filename: "best.onnx" backend: "tensorrt"', ("best.onnx",)),
    ],
)
def test_platform_and_backend_choose_the_model_file(text, filenames):
    assert read(text).filenames == filenames


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('max_batch_size: "x"', "1", "Couldn't parse integer"),
        ('instance_group [ {\n} ]\nname: "a"\nname: "b"', "4", 'should not have multiple "name" fields'),
        ("\ninput { data_type: TYPE_FLOAT }", "2", "no value named TYPE_FLOAT.; expected a data type such as TYPE_FP32"),
        ("max_batch_size: 99999999999", "1", "Value out of range"),
        ("version_policy { latest {} all {} }", "1", "another member of oneof"),
        ("no such syntax", "1", 'no field named "no"'),
        ("input { ", "1", "Expected"),
        (f"max_batch_size: {LONG}", "1", f"Couldn't parse integer: {LONG[:50]}..."),
        ('name: { x: "y" }', "1", "Expected string"),
        ("}", "1", "Expected identifier"),
        ("\n\nzzz { key: {", "3", "zzz (there is no such field) has no value, or a bracket in it is not closed"),
        ("# x: y\nzzz:", "2", "zzz (there is no such field) has no value, or a bracket in it is not closed"),
        ('parameters { key: "a" value: 3 }', "1", "Expected"),
    ],
)
def test_syntax_errors_name_file_and_line(text, line, reason):
    assert refusal(text).startswith(f"m/config.pbtxt:{line}:")
    assert reason in refusal(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_batch_size: -1", "max_batch_size is -1; expected 0 (no batching) or more"),
        (
            "dynamic_batching { preferred_batch_size: [4, 0] }",
            "dynamic_batching.preferred_batch_size: 0 in [0, 4]; expected 1 or more",
        ),
        (
            "max_batch_size: 0 dynamic_batching { preferred_batch_size: 16 }",
            "dynamic_batching.preferred_batch_size is [16], but max_batch_size is 0, so nothing is joined into batches",
        ),
        (
            "max_batch_size: 8 dynamic_batching { preferred_batch_size: 16 }",
            "dynamic_batching.preferred_batch_size: 16 in [16]; expected 1 to 8, the max_batch_size",
        ),
        ("input { data_type: TYPE_FP32 }", "input[0] has no name"),
        ('output { name: "y" dims: 1 }', "output 'y' has no data_type; expected one such as TYPE_FP32"),
        (tensor("input", "x", "TYPE_FP32", "[2, 0]"), "input 'x': 0 in dims [2, 0]; expected 1 or more, or -1"),
        (tensor("input", "x", "TYPE_FP32", "-2"), "input 'x': -2 in dims [-2]; expected 1 or more, or -1"),
        (reshaped("[2]", "[2, 0]"), "input 'x': 0 in reshape.shape [2, 0]; expected 1 or more, or -1"),
        (
            reshaped("[4, 6]", "[5, 5]"),
            "input 'x' cannot be reshaped from dims to reshape.shape: [4, 6] and [5, 5] have different numbers of elements",
        ),
        (
            reshaped("[2, -1, 3]", "[-1, 6]"),
            "input 'x' cannot be reshaped from dims to reshape.shape: [2, -1, 3] and [-1, 6] have different",
        ),
        (
            reshaped("[2, -1]", "[2, 3]"),
            "input 'x' cannot be reshaped from dims to reshape.shape: 1 sizes that vary in [2, -1], but 0 in [2, 3]",
        ),
        (reshaped("[2]", "[]"), "input 'x' cannot be reshaped from dims to reshape.shape: [2] and [] have different"),
        (tensor("input", "x", "TYPE_FP32", "1") * 2, "input 'x' is listed twice"),
        ("version_policy { latest { num_versions: 0 } }", "version_policy.latest.num_versions is 0; expected 1 or more"),
        ("version_policy { specific {} }", "version_policy.specific.versions is []; expected one or more"),
        ("version_policy { specific { versions: [1, 0] } }", "version_policy.specific.versions is [1, 0]; expected one"),
        ('platform: "x"', "platform is 'x'; served here are onnxruntime, onnxruntime_onnx, tensorrt, tensorrt_plan"),
        ('default_model_filename: "../m.onnx"', "default_model_filename is '../m.onnx'; expected the name of a file"),
        ('default_model_filename: ".."', "default_model_filename is '..'"),
        ('default_model_filename: "a\\000b"', "default_model_filename is 'a\\x00b'"),
        (f'platform: "{LONG}"', f"platform is '{LONG[:39]}...; served here are"),
        (tensor("input", LONG, "TYPE_FP32", "0"), f"input '{LONG[:39]}...: 0 in dims [0]; expected"),
    ],
)
def test_invalid_values_name_field_and_expectation(text, reason):
    assert refusal(text).startswith(f"m/config.pbtxt: {reason}")


@given(st.lists(st.sampled_from([*'{}[]<>:,;"#\\\n', "name", "input", "other", "max_batch_size", "1", '"a"', " "])))
def test_any_text_is_either_read_or_refused(parts):
    with suppress(ConfigRefused):
        assert isinstance(read(" ".join(parts)), ModelConfig)


def test_deep_nesting_is_handled():
    assert "a bracket in it is not closed" in refusal("zzz {" * 100_000)
    assert read("zzz {" * 10_000 + "}" * 10_000).unread == ("zzz (there is no such field)",)
    assert "a bracket in it is not closed" in refusal("parameters {" * 100_000)


def test_json_form_is_read_in_both_spellings():
    tensors = [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, "3"], "is_shape_tensor": True}]
    policy = {"specific": {"versions": [3, 1]}}
    one = {"name": "m", "max_batch_size": 4, "input": tensors, "version_policy": policy, "metric_tags": {"a": "b"}}
    two = {"name": "m", "maxBatchSize": 4, "input": tensors, "versionPolicy": policy, "metricTags": {"a": "b"}}
    assert from_json(json.dumps(one)) == from_json(json.dumps(two))
    config = from_json(json.dumps(one))
    assert (config.max_batch, config.inputs) == (4, (StatedTensor("x", "FP32", (-1, 3)),))
    assert config.versions == VersionPolicy(latest=0, specific=(1, 3))
    assert config.unread == ("input.is_shape_tensor", "metric_tags")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ("[]", "[]; expected an object"),
        ("null", "null; expected an object"),
        (f'"{LONG}"', f'"{LONG[:39]}...; expected an object'),
        ("[" * 250_000, ""),
        ('{"max_batch_size": 1.5}', "max_batch_size: 1.5; expected an integer"),
        ('{"max_batch_size": true}', "max_batch_size: true; expected an integer"),
        ('{"max_batch_size": "many"}', 'max_batch_size: "many"; expected an integer'),
        ('{"max_batch_size": 99999999999}', "Failed to parse max_batch_size field: Value out of range"),
        ('{"max_batch_size": %s}' % ("1" * 5000), ""),
        (f'{{"max_batch_size": "{LONG}"}}', f'max_batch_size: "{LONG[:39]}...; expected an integer'),
        ('{"name": 1}', "name: 1; expected a string"),
        ('{"max_batch_size": -1}', "max_batch_size is -1"),
        ('{"input": 1}', "input: 1; expected an array"),
        ('{"input": [1]}', "input[0]: 1; expected an object"),
        ('{"input": [[{}]]}', "input[0]: [{}]; expected an object"),
        ('{"input": [null]}', "input[0]: null; expected an object"),
        ('{"input": [{"name": "x", "data_type": "TYPE_FLOAT"}]}', 'input[0].data_type: "TYPE_FLOAT"; expected a data type'),
        ('{"input": [{}, {"dims": [1, "a"]}]}', 'input[1].dims[1]: "a"; expected an integer'),
        ('{"input": [{"name": "x", "data_type": "\\ud800"}]}', ""),
        ('{"input": [{"name": "x"}]}', "input 'x' has no data_type"),
        ('{"version_policy": {"all": 1}}', "version_policy.all: 1; expected an object"),
        ('{"version_policy": []}', "version_policy: []; expected an object"),
    ],
)
def test_invalid_json_names_the_field(text, reason):
    with pytest.raises(ConfigRefused) as refused:
        from_json(text)
    assert str(refused.value).startswith(f"the config parameter: {reason}")


@pytest.mark.parametrize(
    ("policy", "selected"),
    [
        ("", [10]),
        ("version_policy { latest {} }", [10]),
        ("version_policy { latest { num_versions: 2 } }", [3, 10]),
        ("version_policy { latest { num_versions: 9 } }", [1, 3, 10]),
        ("version_policy { all {} }", [1, 3, 10]),
        ("version_policy { specific { versions: [ 10, 1, 1, 7 ] } }", [1, 10]),
    ],
)
def test_the_version_policy_selects(policy, selected):
    assert read(policy).versions.select([3, 10, 1]) == selected


def test_without_configuration_the_signature_stays_as_it_is():
    assert apply(ModelConfig(), BATCHED) == BATCHED


def test_a_batch_that_the_model_cannot_carry_is_refused():
    fixed = Signature((TensorSpec("x", DATATYPES["FP32"], (1, 3)),), ())
    with pytest.raises(ModelRefused, match=r"^m/config.pbtxt: max_batch_size: max_batch 8 needs first dimensions that vary"):
        apply(read("max_batch_size: 8"), fixed)


def test_a_reshape_that_is_not_the_model_s_is_refused_naming_it():
    text = "max_batch_size: 8\n" + reshaped("[3, 7, 9]", "[3, 63]")
    assert contradiction(text).endswith("'x' is [-1, 3, 63] (reshape.shape) with its batch, but [-1, 3, -1, -1] in the model")
    text = "max_batch_size: 8\n" + reshaped("[4, 7, 9]", "[4, 9, 7]")
    assert contradiction(text).endswith("dimension 1 of 'x' is 4, but 3 in the model")


def test_configured_dims_exclude_the_batch():
    text = "max_batch_size: 8\n" + tensor("input", "x", "TYPE_FP32", "[-1, -1, -1]")
    assert apply(read(text), BATCHED) == BATCHED.with_max_batch(8)


def test_overruled_max_batch_does_not_reinterpret_dims():
    from_file = read(tensor("input", "x", "TYPE_FP32", "[-1, 3, -1, 5]"))
    overruled = ModelConfig(max_batch=4, stated_max_batch=None, inputs=from_file.inputs)
    assert apply(overruled, BATCHED).max_batch == 4
    assert apply(overruled, BATCHED).inputs[0].shape == (-1, 3, -1, 5)


def test_a_reshaped_tensor_is_shown_as_its_dims_and_narrowed_by_its_reshape():
    model = Signature(
        (TensorSpec("x", DATATYPES["FP32"], ("batch", 4, "n", 1)),), (TensorSpec("y", DATATYPES["FP32"], ("batch",)),)
    )
    text = "max_batch_size: 8\n" + reshaped("[2, 2, -1]", "[4, -1, 1]") + reshaped("[1]", "[]", "output", "y")
    (x,), (y,) = (lambda applied: (applied.inputs, applied.outputs))(apply(read(text), model))
    assert (x.dims, x.shape, x.form) == (("batch", 4, "n", 1), (-1, 2, 2, -1), Form((-1, 2, 2, -1), (-1, 4, -1, 1)))
    assert (y.dims, y.shape, y.form) == (("batch",), (-1, 1), Form((-1, 1), (-1,)))


def test_a_reshape_to_the_same_shape_is_none():
    assert apply(read("max_batch_size: 8\n" + reshaped("[3, 5, -1]", "[3, 5, -1]")), BATCHED).inputs[0].form is None


def test_a_scalar_is_stated_with_dims_of_one_element():
    model = Signature((TensorSpec("x", DATATYPES["FP32"], ()),), ())
    for dims in ("[1]", "[1, 1]"):
        (x,) = apply(read(tensor("input", "x", "TYPE_FP32", dims)), model).inputs
        assert (x.dims, list(x.shape)) == ((), json.loads(dims))
    assert apply(read(reshaped("[1]", "[]")), model).inputs[0].shape == (1,)
    for dims in ("[2]", "[-1, -1]"):
        assert contradiction(tensor("input", "x", "TYPE_FP32", dims), model).endswith(f"'x' is {dims}, but [] in the model")


def test_outputs_may_be_listed_in_part_and_all_are_kept():
    text = "max_batch_size: 8\n" + tensor("output", "z", "TYPE_STRING", "[]")
    assert apply(read(text), BATCHED) == BATCHED.with_max_batch(8)


def test_input_and_output_may_share_a_name():
    model = Signature((TensorSpec("x", DATATYPES["FP32"], ("",)),), (TensorSpec("x", DATATYPES["INT8"], (4,)),))
    text = tensor("input", "x", "TYPE_FP32", "2") + tensor("output", "x", "TYPE_INT8", "4")
    assert apply(read(text), model).inputs[0].dims == (2,)


def test_inputs_are_listed_all_or_not_at_all():
    model = Signature((*BATCHED.inputs, TensorSpec("mask", DATATYPES["BOOL"], (1,))), ())
    message = contradiction(tensor("input", "x", "TYPE_FP32", "[-1, 3, -1, -1]"), model)
    assert message.endswith("the model also has input 'mask'; list all inputs or none")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (tensor("input", "images", "TYPE_FP32", "1"), "the model has no input 'images', it has 'x'"),
        (tensor("output", "w", "TYPE_FP32", "1"), "the model has no output 'w', it has 'y', 'z'"),
        (tensor("input", "x", "TYPE_FP16", "1"), "'x' is TYPE_FP16, but TYPE_FP32 in the model"),
        (tensor("output", "z", "TYPE_FP32", "1"), "'z' is TYPE_FP32, but TYPE_STRING in the model"),
        (tensor("input", "x", "TYPE_FP32", "[3, 4]"), "'x' is [3, 4], but [-1, 3, -1, -1] in the model"),
        ("max_batch_size: 8 " + tensor("input", "x", "TYPE_FP32", "3"), "'x' is [-1, 3] with its batch, but [-1, 3, -1, -1]"),
        (tensor("input", "x", "TYPE_FP32", "[-1, 4, 5, 6]"), "dimension 1 of 'x' is 4, but 3 in the model"),
        (
            tensor("input", "x", "TYPE_FP32", "[-1, 3, 5, 6]") + tensor("output", "y", "TYPE_FP32", "[-1, 6]"),
            "dimension 1 of 'y' is 6, but 5 elsewhere, where it is 'height' too",
        ),
    ],
)
def test_contradictions_name_tensor_and_both_values(text, reason):
    assert contradiction(text).startswith(f"m/config.pbtxt contradicts the model: {reason}")


def test_sizes_that_differ_for_one_name_are_taken_where_the_library_takes_them():
    squares = Signature(
        (TensorSpec("x", DATATYPES["FP32"], ("n", "n")), TensorSpec("m", DATATYPES["FP32"], ("k", "n"))),
        (TensorSpec("y", DATATYPES["FP32"], ("n", "k")),),
    )
    text = tensor("input", "x", "TYPE_FP32", "[48, 192]") + tensor("input", "m", "TYPE_FP32", "[5, -1]")
    found = apply(read(text), squares)
    assert [spec.dims for spec in (*found.inputs, *found.outputs)] == [(48, 192), (5, "n"), ("n", 5)]
    reason = "dimension 1 of 'x' is 192, but 48 elsewhere, where it is 'n' too"
    assert contradiction(text, replace(squares, same_sizes=True)).endswith(reason)


def test_dims_without_batch_hint_at_max_batch_size():
    hint = "; dims leave the batch out only with a max_batch_size above 0: set it"
    assert contradiction(tensor("input", "x", "TYPE_FP32", "[3, 4, 5]")).endswith(hint)
    assert not contradiction(tensor("input", "x", "TYPE_FP32", "[3, 4]")).endswith(hint)
    assert not contradiction("max_batch_size: 8 " + tensor("input", "x", "TYPE_FP32", "3")).endswith(hint)


def test_an_input_of_a_model_that_has_none_is_refused():
    assert contradiction(tensor("input", "x", "TYPE_FP32", "1"), Signature((), ())).endswith("no input 'x', it has none")


@pytest.mark.parametrize(
    ("policy", "described"),
    [
        (VersionPolicy(latest=0), {"all": {}}),
        (VersionPolicy(latest=0, specific=(1, 3)), {"specific": {"versions": [1, 3]}}),
        (VersionPolicy(latest=2), {"latest": {"num_versions": 2}}),
    ],
)
def test_a_described_version_policy_is_read_back_the_same(policy, described):
    assert policy.describe() == described
    assert from_json(json.dumps({"version_policy": described})).versions == policy
