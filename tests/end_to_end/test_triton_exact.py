"""What Triton's L0_infer and L0_infer_variable ask of a server, and the examples of its documentation, with Triton's client.

The repositories are made as Triton's generators do: OUTPUT0 is the sum of INPUT0 and INPUT1, OUTPUT1 their difference, cast
from and to the types in the model's name, with and without batches, in sizes that are fixed or vary. From version 2 on the
outputs are swapped, where the configuration says which versions are served.
"""

import itertools
import queue
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as triton
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from greenlane.load.server_process import free_port
from server.config.tenant import TenantConfig

from .fixtures import served_with
from .harness import PATIENCE, Served
from .test_clients import given

TYPES: dict[str, tuple[int, str, str, Any]] = {
    "int8": (TensorProto.INT8, "TYPE_INT8", "INT8", np.int8),
    "int16": (TensorProto.INT16, "TYPE_INT16", "INT16", np.int16),
    "int32": (TensorProto.INT32, "TYPE_INT32", "INT32", np.int32),
    "int64": (TensorProto.INT64, "TYPE_INT64", "INT64", np.int64),
    "float16": (TensorProto.FLOAT16, "TYPE_FP16", "FP16", np.float16),
    "float32": (TensorProto.FLOAT, "TYPE_FP32", "FP32", np.float32),
    "object": (TensorProto.STRING, "TYPE_STRING", "BYTES", object),
}
"""ONNX's, the configuration's, the protocol's and NumPy's name for each type, by Triton's word for it."""

Types = tuple[str, str, str]
"""Of the inputs, and of each output."""
Tensors = list[Any]

FIXED = [
    *(("int8",) * 3, ("int16",) * 3, ("int32",) * 3, ("int64",) * 3, ("float16",) * 3, ("float32",) * 3, ("object",) * 3),
    *(("int32", "int8", "int8"), ("int32", "int8", "int16"), ("int32", "float32", "float32"), ("int32", "float16", "float32")),
    *(("int8", "int32", "int32"), ("float32", "int32", "int32"), ("float16", "float32", "float32")),
    *(("int32", "float16", "int16"), ("int32", "int32", "object"), ("int32", "object", "int32")),
    *(
        ("object", "int32", "int32"),
        ("object", "object", "int32"),
        ("object", "int32", "object"),
        ("int32", "object", "object"),
    ),
]
VERSIONS = {
    ("int8",) * 3: ("latest { num_versions: 1 }", (3,)),
    ("int16",) * 3: ("latest { num_versions: 2 }", (2, 3)),
    ("int32",) * 3: ("all { }", (1, 2, 3)),
    ("float16",) * 3: ("specific { versions: [ 1 ] }", (1,)),
    ("float32",) * 3: ("specific { versions: [ 1, 3 ] }", (1, 3)),
}
"""Of models with batches and three versions: the policy, and the versions that are served."""
VARIABLE = [
    *((("float32",) * 3, (16,)), (("float32", "int32", "int32"), (2, 8)), (("float32", "int64", "int64"), (8, 4))),
    *((("float32", "int32", "int64"), (2, 8, 2)), (("float32", "float32", "int32"), (16,)), (("int32",) * 3, (2, 8))),
    *((("int32", "int32", "float32"), (2, 8, 2)), (("object",) * 3, (16,)), (("object", "int32", "int32"), (2, 8))),
    *((("object", "object", "int32"), (8, 4)), (("object", "int32", "object"), (2, 8, 2))),
]
LABELS = "".join(f"label{n}\n" for n in range(1000))


def name_of(types: Types, batch: bool) -> str:
    return f"onnx{'' if batch else '_nobatch'}_{'_'.join(types)}"


def write(root: Path, types: Types, dims: tuple[int, ...], batch: bool) -> None:
    """One model as `create_onnx_modelfile` and `create_onnx_modelconfig` of gen_qa_models.py make it."""
    folder, policy = root / name_of(types, batch), VERSIONS.get(types, ("",))[0] if batch else ""
    count = itertools.count()
    kinds = [TYPES[name][0] for name in (types[0], *types)]
    names = ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")
    values = [
        helper.make_tensor_value_info(
            name, kind, [*[None] * batch, *(f"var_{next(count)}" if dim < 0 else dim for dim in dims)]
        )
        for name, kind in zip(names, kinds, strict=True)
    ]
    wide = TensorProto.INT32 if types[0] in ("int8", "int16", "object") else kinds[0]
    cast = [helper.make_node("Cast", [f"INPUT{n}"], [f"_INPUT{n}"], to=wide) for n in range(2)]
    back = [helper.make_node("Cast", [f"CAST{n}"], [f"OUTPUT{n}"], to=kinds[2 + n]) for n in range(2)]
    for version in (1, 2, 3) if policy else (1,):
        works = ("Add", "Sub") if version == 1 else ("Sub", "Add")
        work = [helper.make_node(each, ["_INPUT0", "_INPUT1"], [f"CAST{n}"]) for n, each in enumerate(works)]
        save(folder, helper.make_graph([*cast, *work, *back], "exact", values[:2], values[2:]), version)
    text = f'name: "{folder.name}"\nplatform: "onnxruntime_onnx"\nmax_batch_size: {8 * batch}\n'
    text += f"version_policy: {{ {policy} }}\n" if policy else ""
    for index, name in enumerate(names):
        label = 'label_filename: "output0_labels.txt"' if name == "OUTPUT0" else ""
        kind = TYPES[(types[0], *types)[index]][1]
        entry = f'{{ name: "{name}" data_type: {kind} dims: {list(dims)} {label} }}'
        text += f"{'input' if index < 2 else 'output'} [ {entry} ]\n"
    (folder / "config.pbtxt").write_text(text)
    (folder / "output0_labels.txt").write_text(LABELS)


def save(folder: Path, graph: Any, version: int = 1) -> None:
    path = folder / str(version) / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())


def write_densenet(root: Path) -> None:
    """Its configuration as in docs/examples/model_repository, and a model of the same shapes: the mean of each channel."""
    image = helper.make_tensor_value_info("data_0", TensorProto.FLOAT, [1, 3, 224, 224])
    classes = helper.make_tensor_value_info("fc6_1", TensorProto.FLOAT, [1, 1000, 1, 1])
    pads = helper.make_tensor("pads", TensorProto.INT64, [8], [0] * 5 + [997, 0, 0])
    nodes = [helper.make_node("GlobalAveragePool", ["data_0"], ["mean"]), helper.make_node("Pad", ["mean", "pads"], ["fc6_1"])]
    folder = root / "densenet_onnx"
    save(folder, helper.make_graph(nodes, "densenet", [image], [classes], [pads]))
    (folder / "config.pbtxt").write_text(
        """
name: "densenet_onnx"
platform: "onnxruntime_onnx"
max_batch_size : 0
input [
  {
    name: "data_0"
    data_type: TYPE_FP32
    format: FORMAT_NCHW
    dims: [ 3, 224, 224 ]
    reshape { shape: [ 1, 3, 224, 224 ] }
  }
]
output [
  {
    name: "fc6_1"
    data_type: TYPE_FP32
    dims: [ 1000 ]
    reshape { shape: [ 1, 1000, 1, 1 ] }
    label_filename: "densenet_labels.txt"
  }
]
"""
    )
    (folder / "densenet_labels.txt").write_text("RED\nGREEN\nBLUE\n")


def write_all(folder: Path, variable: bool) -> None:
    for batch in (True, False):
        for types, shape in VARIABLE if variable else [(types, (16,)) for types in FIXED]:
            write(folder, types, (-1,) * len(shape) if variable else shape, batch)
    if not variable:
        write_densenet(folder)


def acme() -> TenantConfig:
    return TenantConfig(name="acme", granules=1, models=("*",), grpc_port=free_port())


fixed = served_with(acme, fill=partial(write_all, variable=False))
variable = served_with(acme, fill=partial(write_all, variable=True))


def as_type(numbers: Any, name: str) -> Any:
    if name != "object":
        return numbers.astype(TYPES[name][3])
    return np.array([str(number).encode() for number in numbers.ravel()], object).reshape(numbers.shape)


def ask(served: Served, how: str, model: str, tensors: Tensors, classes: tuple[int, int], **named: Any) -> Any:
    """The result of a request for both outputs: "binary" or "json" over HTTP, or over gRPC in a call ("grpc") or a "stream"."""
    if how in ("binary", "json"):
        inputs = [
            given(f"INPUT{n}", np_to_triton_dtype(array.dtype), array, how == "binary") for n, array in enumerate(tensors)
        ]
        outputs = [
            triton.InferRequestedOutput(f"OUTPUT{n}", binary_data=how == "binary", class_count=count)
            for n, count in enumerate(classes)
        ]
        with triton.InferenceServerClient(served.address) as client:
            return client.infer(model, inputs, outputs=outputs, **named)
    wanted = [grpc.InferRequestedOutput(f"OUTPUT{n}", class_count=count) for n, count in enumerate(classes)]
    return ask_over_grpc(served, how, model, {f"INPUT{n}": array for n, array in enumerate(tensors)}, outputs=wanted, **named)


def ask_over_grpc(served: Served, how: str, model: str, tensors: dict[str, Any], **named: Any) -> Any:
    sent = [
        grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)
        for name, array in tensors.items()
    ]
    with grpc.InferenceServerClient(f"127.0.0.1:{served.service.config.tenants['acme'].grpc_port}") as client:
        if how == "grpc":
            return client.infer(model, sent, **named)
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, sent, **named)
        result, error = answers.get(timeout=PATIENCE)
    if error:
        raise error
    return result


def check(
    served: Served,
    types: Types,
    shape: tuple[int, ...],
    batch: bool,
    how: str,
    classes: tuple[int, int] = (0, 0),
    version: int = 0,
) -> None:
    """As `infer_exact` of Triton's infer_util.py. `classes` is how many of each output are asked for; of 0 the numbers are."""
    random, model = np.random.default_rng(7), name_of(types, batch)
    numbers = [random.integers(0, 60, shape) for _ in range(2)]
    tensors = [as_type(each, types[0]) for each in numbers]
    result = ask(served, how, model, tensors, classes, model_version=str(version or ""), request_id="r-7")
    answered = version or (VERSIONS[types][1][-1] if batch and types in VERSIONS else 1)
    assert described(result) == ("r-7", model, str(answered), ["OUTPUT0", "OUTPUT1"])
    expected = [numbers[0] + numbers[1], numbers[0] - numbers[1]]
    for n, each in enumerate(expected if answered == 1 else reversed(expected)):
        found = result.as_numpy(f"OUTPUT{n}")
        if classes[n]:
            check_classes(found, each, batch, "label{}" if n == 0 else "")
        else:
            wanted = as_type(each, types[1 + n])
            text = how == "json" and types[1 + n] == "object"
            decoded = np.char.decode(wanted.astype(np.bytes_)).astype(object) if text else wanted
            assert found.shape == each.shape
            assert found.tolist() == decoded.tolist()


def described(result: Any) -> tuple[str, str, str, list[str]]:
    """The id, the model, its version and the outputs of an answer."""
    found = result.get_response()
    if isinstance(found, dict):
        return found["id"], found["model_name"], found["model_version"], [each["name"] for each in found["outputs"]]
    return found.id, found.model_name, found.model_version, [each.name for each in found.outputs]


def check_classes(found: Any, expected: Any, batch: bool, label: str) -> None:
    rows = expected.reshape(len(expected), -1) if batch else expected.reshape(1, -1)
    assert found.shape == ((len(rows), 3) if batch else (3,))
    for texts, row in zip(found.reshape(len(rows), 3), rows, strict=True):
        for text, place in zip(texts, np.argsort(-row, kind="stable"), strict=False):
            value, index, *name = (text.decode() if isinstance(text, bytes) else text).split(":")
            assert (float(value), int(index), name) == (row[place], place, [label.format(place)] if label else [])


NUMBERS = [types for types in FIXED if "object" not in types]
WAYS = [(False, "binary"), (False, "json"), (True, "binary"), (True, "json"), (True, "grpc"), (True, "stream")]


def every_way(fixture: str) -> Any:
    """Have a test ask the server of this fixture, in both forms over HTTP, in each of the ways that `ask` has.

    Without the scope pytest would start a server for each test.
    """
    ids = [f"{'direct' if direct else 'asgi'}-{how}" for direct, how in WAYS]
    return pytest.mark.parametrize((fixture, "how"), WAYS, indirect=[fixture], ids=ids, scope="module")


def has_form(types: Types, how: str) -> bool:
    """Half precision has no JSON form, in Triton neither."""
    return how != "json" or "float16" not in types


@pytest.mark.parametrize("types", FIXED, ids="_".join)
@every_way("fixed")
def test_raw_outputs_of_fixed_sizes(fixed: Served, types: Types, how: str) -> None:
    if has_form(types, how):
        check(fixed, types, (16,), False, how)
        for rows in (1, 8):
            check(fixed, types, (rows, 16), True, how)


@pytest.mark.parametrize("types", NUMBERS, ids="_".join)
@every_way("fixed")
def test_classes_of_outputs_of_fixed_sizes(fixed: Served, types: Types, how: str) -> None:
    """All outputs as classes, and one of the two."""
    for classes in ((3, 3), (0, 3), (3, 0)):
        if has_form(types, how):
            check(fixed, types, (16,), False, how, classes)
            for rows in (1, 8):
                check(fixed, types, (rows, 16), True, how, classes)


@pytest.mark.parametrize("types", VERSIONS, ids="_".join)
@every_way("fixed")
def test_versions_are_those_of_the_policy(fixed: Served, types: Types, how: str) -> None:
    """As test_raw_version_latest_1, latest_2, all, specific_1 and specific_1_3."""
    for version in (1, 2, 3):
        if version in VERSIONS[types][1]:
            if has_form(types, how):
                check(fixed, types, (1, 16), True, how, version=version)
        else:
            name = name_of(types, True)
            with pytest.raises(InferenceServerException) as refused:
                check(fixed, types, (1, 16), True, "binary" if how == "json" else how, version=version)
            assert refused.value.message() == f"Request for unknown model: '{name}' version {version} is not found"


@pytest.mark.parametrize(("types", "shape"), VARIABLE, ids=lambda value: "_".join(map(str, value)))
@every_way("variable")
def test_raw_outputs_of_sizes_that_vary(variable: Served, types: Types, shape: tuple[int, ...], how: str) -> None:
    check(variable, types, shape, False, how)
    for rows in (1, 8):
        check(variable, types, (rows, *shape), True, how)


@pytest.mark.parametrize(
    ("types", "shape"), [case for case in VARIABLE if "object" not in case[0]], ids=lambda value: "_".join(map(str, value))
)
@every_way("variable")
def test_classes_of_outputs_of_sizes_that_vary(variable: Served, types: Types, shape: tuple[int, ...], how: str) -> None:
    for classes in ((3, 3), (0, 3), (3, 0)):
        check(variable, types, shape, False, how, classes)
        for rows in (1, 8):
            check(variable, types, (rows, *shape), True, how, classes)


def test_the_first_model_of_triton_s_documentation_classifies_a_picture(fixed: Served) -> None:
    """As `image_client.py -m densenet_onnx -c 3` asks."""
    with triton.InferenceServerClient(fixed.address) as client:
        metadata, config = client.get_model_metadata("densenet_onnx"), client.get_model_config("densenet_onnx")
        (image,), (classes,) = metadata["inputs"], metadata["outputs"]
        assert (image["shape"], config["input"][0]["format"], classes["shape"]) == ([3, 224, 224], "FORMAT_NCHW", [1000])
        picture = np.zeros((3, 224, 224), np.float32) + np.array([1, 3, 2], np.float32)[:, None, None]
        wanted = [triton.InferRequestedOutput("fc6_1", class_count=3)]
        result = client.infer("densenet_onnx", [given("data_0", "FP32", picture)], outputs=wanted)
        assert result.as_numpy("fc6_1").tolist() == [b"3.000000:1:GREEN", b"2.000000:2:BLUE", b"1.000000:0:RED"]
        assert client.infer("densenet_onnx", [given("data_0", "FP32", picture)]).as_numpy("fc6_1").shape == (1000,)
