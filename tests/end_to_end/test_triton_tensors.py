"""What Triton's own tests of tensors ask of a server, over sockets, in both forms, with Triton's client.

These are L0_infer_reshape, L0_infer_zero, L0_scalar_io, L0_string_io, L0_initializer_as_input and L0_nan_inf. The repositories
are made as Triton's generators do.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from . import repository
from .harness import Served, configuration, serving
from .test_clients import given

NAN_INF = """nan_inf_output (float[one] INPUT0) => (float[six] OUTPUT0)
<float[6] over = {0, 1, -1, 1, 2, 3}, float[6] by = {0, 0, 0, 1, 1, 1}> { OUTPUT0 = Div(over, by) }
"""


Shapes = tuple[tuple[int, ...], ...]

RESHAPES: dict[str, tuple[str, Shapes, Shapes, Shapes, Shapes, bool]] = {
    "oo1": ("STRING", ((1,),), ((),), ((1,),), ((),), True),
    "ff1": ("FP32", ((1,),), ((),), ((1,),), ((),), True),
    "ff2": ("FP32", ((1,), (8,)), ((), (4, 1, 2)), ((1,), (8,)), ((), (4, 1, 2)), True),
    "ff3": (
        "FP32",
        ((4, 4), (2,), (2, 2, 3)),
        ((16,), (1, 2), (3, 2, 2)),
        ((4, 4), (2,), (2, 2, 3)),
        ((16,), (1, 2), (3, 2, 2)),
        False,
    ),
    "ff4": ("FP32", ((4, 4), (2,), (2, 2, 3), (1,)), *[((16,), (1, 2), (3, 2, 2), (1,))] * 3, False),
    "ii1": ("INT32", ((2, 4, -1, 6),), ((8, -1, 1, 6),), ((2, 4, -1, 6),), ((8, -1, 1, 6),), False),
    "ii2": ("INT32", ((-1, 1), (2,)), *[((1, -1), (1, 2))] * 3, False),
    "ii3": ("INT32", *[((1, -1, 1), (-1,), (2, 2, 3)), ((-1,), (1, -1, 1), (3, 2, 2))] * 2, False),
}
"""Type; dims and reshape of the inputs, and of the outputs; whether there is none without batches."""

SENT: dict[str, tuple[Shapes, Shapes]] = {
    "ff1": (((1,),), ((1,),)),
    "ff2": (((1,), (8,)), ((1,), (8,))),
    "ff3": (((4, 4), (2,), (2, 2, 3)), ((4, 4), (2,), (2, 2, 3))),
    "ff4": (((4, 4), (2,), (2, 2, 3), (1,)), ((16,), (1, 2), (3, 2, 2), (1,))),
    "ii1": (((2, 4, 5, 6),), ((2, 4, 5, 6),)),
    "ii2": (((4, 1), (2,)), ((1, 4), (1, 2))),
    "ii3": (((1, 4, 1), (8,), (2, 2, 3)), ((1, 4, 1), (8,), (2, 2, 3))),
    "oo1": (((1,),), ((1,),)),
}
"""What is sent to each of them, and the shapes of the answers, without a batch."""

ZEROS: dict[str, tuple[str, Shapes]] = {
    "ff1": ("FP32", ((-1,),)),
    "ff3": ("FP32", ((-1,), (-1,), (-1,))),
    "hh1": ("FP16", ((-1, -1),)),
    "hh3": ("FP16", ((-1, -1), (-1, -1), (-1, -1))),
    "oo1": ("STRING", ((-1,),)),
    "oo3": ("STRING", ((-1, -1), (-1, -1), (-1, -1))),
    "bb1": ("BOOL", ((-1,),)),
}
SOME_ZEROS: list[tuple[str, Shapes]] = [
    *(("ff1", (shape,)) for shape in [(1,), (0,)]),
    *(("ff3", tuple((size,) for size in sizes)) for sizes in [(1, 2, 1), *itertools.product((0, 1), repeat=3)]),
    *(("hh1", (shape,)) for shape in [(2, 2), (1, 0), (0, 1), (0, 0)]),
    *(
        (name, shapes)
        for name in ("hh3", "oo3")
        for shapes in [
            *(((2, 2), (2, 2), (1, 1)), ((0, 0),) * 3, ((0, 1), (0, 1), (2, 3))),
            *(((1, 0), (1, 3), (0, 1)), ((1, 1), (3, 0), (0, 0)), ((1, 1), (0, 6), (2, 2))),
        ]
    ),
    *(("oo1", (shape,)) for shape in [(2,), (0,)]),
    *(("bb1", (shape,)) for shape in [(10,), (0,)]),
]
"""Shapes of the inputs without a batch, with and without elements."""
ONNX = {
    "STRING": TensorProto.STRING,
    "FP32": TensorProto.FLOAT,
    "INT32": TensorProto.INT32,
    "FP16": TensorProto.FLOAT16,
    "BOOL": TensorProto.BOOL,
}
WIRE = {
    "STRING": ("BYTES", object),
    "FP32": ("FP32", np.float32),
    "INT32": ("INT32", np.int32),
    "FP16": ("FP16", np.float16),
    "BOOL": ("BOOL", bool),
}


def identities(path: Path, datatype: str, inputs: Shapes, outputs: Shapes, batch: bool) -> None:
    """OUTPUTn is INPUTn, each with dimensions of its own names, as Triton's generators write them."""
    count = itertools.count()

    def values(name: str, shapes: Shapes) -> list[Any]:
        named = [[*[None] * batch, *(dim if dim >= 0 else f"var_{next(count)}" for dim in shape)] for shape in shapes]
        return [helper.make_tensor_value_info(f"{name}{n}", ONNX[datatype], dims) for n, dims in enumerate(named)]

    nodes = [helper.make_node("Identity", [f"INPUT{n}"], [f"OUTPUT{n}"]) for n in range(len(inputs))]
    graph = helper.make_graph(nodes, "identities", values("INPUT", inputs), values("OUTPUT", outputs))
    path.parent.mkdir(parents=True)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())


def stated(kind: str, name: str, datatype: str, dims: tuple[int, ...], reshape: tuple[int, ...]) -> str:
    shape = f"reshape: {{ shape: {list(reshape)} }}" if reshape != dims else ""
    return f'{kind} [ {{ name: "{name}" data_type: TYPE_{datatype} dims: {list(dims)} {shape} }} ]\n'


def write_reshaping(root: Path, name: str, batch: bool) -> None:
    datatype, inputs, inner, outputs, given, _ = RESHAPES[name]
    folder = root / f"reshape_{name}{'' if batch else '_nobatch'}"
    identities(folder / "1" / "model.onnx", datatype, inner, given, batch)
    text = f"max_batch_size: {8 * batch}\n"
    for kind, tensors in (("input", zip(inputs, inner, strict=True)), ("output", zip(outputs, given, strict=True))):
        text += "".join(stated(kind, f"{kind.upper()}{n}", datatype, *each) for n, each in enumerate(tensors))
    (folder / "config.pbtxt").write_text(text)


def write_zero(root: Path, name: str, batch: bool) -> None:
    datatype, shapes = ZEROS[name]
    folder = root / f"zero_{name}{'' if batch else '_nobatch'}"
    identities(folder / "1" / "model.onnx", datatype, shapes, shapes, batch)
    text = "".join(
        stated(kind, f"{kind.upper()}{n}", datatype, dims, dims)
        for kind in ("input", "output")
        for n, dims in enumerate(shapes)
    )
    (folder / "config.pbtxt").write_text(f"max_batch_size: {8 * batch}\n{text}")


def write_scalar(root: Path, name: str, dims: str) -> None:
    """A tensor without a rank."""
    tensors = (helper.make_tensor_value_info(each, TensorProto.FLOAT, None) for each in ("INPUT", "OUTPUT"))
    given, taken = ([each] for each in tensors)
    graph = helper.make_graph([helper.make_node("Identity", ["INPUT"], ["OUTPUT"])], name, given, taken)
    path = root / name / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())
    text = "".join(f'{kind} [ {{ name: "{kind.upper()}" data_type: TYPE_FP32 dims: {dims} }} ]' for kind in ("input", "output"))
    (root / name / "config.pbtxt").write_text(text)


OPTIONAL = 'input [ {{ name: "{}" data_type: TYPE_{} dims: [ {} ] optional: true }} ]\n'


def write_with_initializer(root: Path, datatype: str) -> None:
    """INPUT + INITIALIZER, which is all ones, or all "z", where it is not given."""
    names, kind = ("INPUT", "INITIALIZER", "OUTPUT"), ONNX[datatype]
    *given, taken = (helper.make_tensor_value_info(name, kind, [5, 5]) for name in names)
    value = helper.make_tensor("INITIALIZER", kind, [5, 5], [1.0] * 25 if datatype == "FP32" else [b"z"] * 25)
    operator = "Add" if datatype == "FP32" else "StringConcat"
    graph = helper.make_graph([helper.make_node(operator, names[:2], names[2:])], "add", given, [taken], [value])
    path = root / f"with_initializer_{datatype}" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8).SerializeToString())
    text = stated("input", "INPUT", datatype, (5, 5), (5, 5)) + OPTIONAL.format("INITIALIZER", datatype, "5, 5")
    (path.parent.parent / "config.pbtxt").write_text(text + stated("output", "OUTPUT", datatype, (5, 5), (5, 5)))


def write_all(root: Path) -> Path:
    repository.write(root, "nan_inf_output", NAN_INF)
    for name in RESHAPES:
        for batch in (True,) if RESHAPES[name][-1] else (True, False):
            write_reshaping(root, name, batch)
    for name in ZEROS:
        for batch in (True, False):
            write_zero(root, name, batch)
    repository.write(root, "string_identity", "i (string[n] INPUT0) => (string[n] OUTPUT0) { OUTPUT0 = Identity(INPUT0) }")
    for name in ("FP32", "STRING"):
        write_with_initializer(root, name)
    repository.write(root, "needed", repository.IDENTITY, config=OPTIONAL.format("x", "FP32", "-1, -1"))
    for name, dims in (("onnx_scalar_1dim", "[ 1 ]"), ("onnx_scalar_2dim", "[ 1, 1 ]"), ("onnx_scalar_wrong", "[ 2 ]")):
        write_scalar(root, name, dims)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=["asgi", "direct"])
def triton_served(root: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(configuration(root), direct=request.param == "direct") as served:
        yield served


@pytest.fixture
def client(triton_served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(triton_served.address) as client:
        yield client


def post(served: Served, model: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v2/models/{model}/infer", json=fields)


ONE = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}


def some(datatype: str, shape: tuple[int, ...]) -> Any:
    """An array with something in it."""
    numbers = np.arange(1, math.prod(shape) + 1).reshape(shape)
    if datatype == "STRING":
        return np.array([str(number).encode() for number in numbers.ravel()], object).reshape(shape)
    return numbers.astype(WIRE[datatype][1])


def check_identities(client: triton.InferenceServerClient, model: str, datatype: str, shapes: Shapes, answered: Shapes) -> None:
    """As `infer_zero` of Triton's infer_util.py: in binary and in JSON, what was sent comes back in the shape promised."""
    arrays = [some(datatype, shape) for shape in shapes]
    for binary in (True, False) if datatype != "FP16" else (True,):
        inputs = [given(f"INPUT{n}", WIRE[datatype][0], array, binary) for n, array in enumerate(arrays)]
        outputs = [triton.InferRequestedOutput(f"OUTPUT{n}", binary_data=binary) for n in range(len(shapes))]
        for _ in range(2):  # The second time it is remembered.
            result = client.infer(model, inputs, outputs=outputs)
            for n, (array, shape) in enumerate(zip(arrays, answered, strict=True)):
                found = result.as_numpy(f"OUTPUT{n}")
                assert found.shape == shape
                assert found.astype(array.dtype).ravel().tolist() == [
                    each if binary or datatype != "STRING" else each.decode() for each in array.ravel().tolist()
                ]


class TestInferReshape:
    """L0_infer_reshape."""

    @pytest.mark.parametrize("name", list(RESHAPES))
    def test_shapes_are_those_of_the_configuration(self, client: triton.InferenceServerClient, name: str) -> None:
        datatype, *_, only_batch = RESHAPES[name]
        sent, answered = SENT[name]
        for rows in (1, 8):
            with_batch = [tuple((rows, *shape) for shape in shapes) for shapes in (sent, answered)]
            check_identities(client, f"reshape_{name}", datatype, *with_batch)
        if not only_batch:
            check_identities(client, f"reshape_{name}_nobatch", datatype, sent, answered)

    def test_metadata_and_configuration_have_the_shapes_for_callers(self, client: triton.InferenceServerClient) -> None:
        metadata = client.get_model_metadata("reshape_ii1")
        assert metadata["inputs"][0]["shape"] == metadata["outputs"][0]["shape"] == [-1, 2, 4, -1, 6]
        (entry,) = client.get_model_config("reshape_ii1")["input"]
        assert (entry["dims"], entry["reshape"]) == ([2, 4, -1, 6], {"shape": [8, -1, 1, 6]})

    @pytest.mark.parametrize("shape", [[1], [1, 2, 4], [1, 4, 2, 5, 6], [1, 8, 5, 1, 6]])
    def test_another_shape_is_refused_with_the_one_expected(self, triton_served: Served, shape: list[int]) -> None:
        tensor = {"name": "INPUT0", "datatype": "INT32", "shape": shape, "data": [0] * math.prod(shape)}
        response = post(triton_served, "reshape_ii1", inputs=[tensor])
        expected = f"input 'INPUT0': shape {shape}; expected one as in [-1, 2, 4, -1, 6]"
        assert (response.status_code, response.json()["error"]) == (400, expected)

    def test_rows_of_several_requests_are_joined_and_parted(self, triton_served: Served) -> None:
        tensors = [[given("INPUT0", "FP32", np.full((rows, 1), rows, np.float32))] for rows in (1, 2, 3)] * 5
        with triton.InferenceServerClient(triton_served.address, concurrency=15) as many:
            pending = [many.async_infer("reshape_ff1", inputs) for inputs in tensors]
            for n, request in enumerate(pending):
                rows = n % 3 + 1
                assert request.get_result().as_numpy("OUTPUT0").tolist() == [[rows]] * rows


class TestInferZero:
    """L0_infer_zero."""

    @pytest.mark.parametrize(("name", "shapes"), SOME_ZEROS)
    def test_tensors_without_elements_come_back(self, client: triton.InferenceServerClient, name: str, shapes: Shapes) -> None:
        for rows in (1, 8):
            with_batch = tuple((rows, *shape) for shape in shapes)
            check_identities(client, f"zero_{name}", ZEROS[name][0], with_batch, with_batch)
        check_identities(client, f"zero_{name}_nobatch", ZEROS[name][0], shapes, shapes)


class TestScalarIO:
    """L0_scalar_io."""

    @pytest.mark.parametrize(("model", "shape"), [("onnx_scalar_1dim", (1,)), ("onnx_scalar_2dim", (1, 1))])
    def test_scalar_io(self, client: triton.InferenceServerClient, model: str, shape: tuple[int, ...]) -> None:
        assert client.get_model_metadata(model)["inputs"][0]["shape"] == list(shape)
        found = client.infer(model, [given("INPUT", "FP32", np.ones(shape, np.float32))]).as_numpy("OUTPUT")
        assert (found.shape, found.ravel().tolist()) == (shape, [1])

    def test_dims_of_more_than_one_element_do_not_load(self, triton_served: Served) -> None:
        index = httpx.post(f"{triton_served.url}/v2/repository/index").json()
        (entry,) = [entry for entry in index if entry["name"] == "onnx_scalar_wrong"]
        assert (entry["state"], "'INPUT' is [2], but [] in the model" in entry["reason"]) == ("UNAVAILABLE", True)


class TestInitializerAsInput:
    """L0_initializer_as_input."""

    @pytest.mark.parametrize("binary", [False, True])
    @pytest.mark.parametrize("name", ["FP32", "STRING"])
    def test_without_and_with_the_optional_input(self, client: triton.InferenceServerClient, name: str, binary: bool) -> None:
        one, other = (np.array([f"{letter}{n}".encode() for n in range(25)], object).reshape(5, 5) for letter in "ab")
        if name == "FP32":
            one, other = np.zeros((5, 5), np.float32), np.full((5, 5), 7, np.float32)
        given_one = given("INPUT", WIRE[name][0], one, binary)
        for _ in range(2):
            answered = client.infer(f"with_initializer_{name}", [given_one]).as_numpy("OUTPUT")
            assert answered.tolist() == (one + (1 if name == "FP32" else b"z")).tolist()
            inputs = [given("INITIALIZER", WIRE[name][0], other, binary), given_one]
            answered = client.infer(f"with_initializer_{name}", inputs).as_numpy("OUTPUT")
            assert answered.tolist() == (one + other).tolist()

    def test_metadata_lists_the_optional_input(self, client: triton.InferenceServerClient) -> None:
        assert [entry["name"] for entry in client.get_model_metadata("with_initializer_FP32")["inputs"]] == [
            "INPUT",
            "INITIALIZER",
        ]
        assert [entry["optional"] for entry in client.get_model_config("with_initializer_FP32")["input"]] == [False, True]

    def test_an_input_that_the_model_needs_is_missed_though_it_is_configured_as_optional(self, triton_served: Served) -> None:
        response = post(triton_served, "needed", inputs=[])
        assert (response.status_code, response.json()["error"]) == (400, "inputs: 'x' missing; the model takes 'x'")


TEXTS = [
    b"\nF\n'\n\x01a\x12\"\x1a\x1e\xfa\x03\x94\x01\x89\xcc=\n\xdf\\\xcb\xbf",
    b"\xf6\xa2\xc5\x01",
    b"\xff\xd8\xff\xe0JFIF\0",
    b"\0\0",
    b"",
    b"plain",
    "grün".encode(),
    b"\xc3",
]
"""Some of the serialised messages of L0_string_io, the head of a JPEG, zeros, nothing, texts, and half a letter."""


class TestStringIO:
    """L0_string_io."""

    @pytest.mark.parametrize("binary_in", [True, False])
    @pytest.mark.parametrize("binary_out", [True, False])
    @pytest.mark.parametrize("dtype", [np.object_, np.bytes_, np.str_])
    def test_str_dtype(self, client: triton.InferenceServerClient, dtype: Any, binary_in: bool, binary_out: bool) -> None:
        array = np.array([str(n) for n in range(10000, 10008)], dtype)
        wanted = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary_out)]
        array = array.astype(np.object_) if dtype is np.str_ else array
        found = client.infer("string_identity", [given("INPUT0", "BYTES", array, binary_in)], outputs=wanted)
        assert found.as_numpy("OUTPUT0").astype(np.bytes_).tolist() == array.astype(np.bytes_).tolist()

    @pytest.mark.parametrize("times", [1, 200], ids=["few", "many"])
    def test_bytes_of_any_kind_in_binary(self, client: triton.InferenceServerClient, times: int) -> None:
        array = np.array(TEXTS * times, object)
        found = client.infer("string_identity", [given("INPUT0", "BYTES", array)])
        assert found.as_numpy("OUTPUT0").tolist() == TEXTS * times

    def test_bytes_that_are_no_text_asked_for_in_json(self, client: triton.InferenceServerClient) -> None:
        wanted = [triton.InferRequestedOutput("OUTPUT0", binary_data=False)]
        with pytest.raises(
            InferenceServerException, match=r"output 'OUTPUT0': element 0 is not UTF-8 .*; ask for a binary tensor"
        ):
            client.infer("string_identity", [given("INPUT0", "BYTES", np.array(TEXTS, object))], outputs=wanted)

    def test_requests_with_and_without_text_are_joined(self, triton_served: Served) -> None:
        with triton.InferenceServerClient(triton_served.address, concurrency=16) as many:
            inputs = [np.array([[TEXTS[n % len(TEXTS)]]], object) for n in range(32)]
            pending = [many.async_infer("reshape_oo1", [given("INPUT0", "BYTES", array)]) for array in inputs]
            for array, request in zip(inputs, pending, strict=True):
                assert request.get_result().as_numpy("OUTPUT0").tolist() == array.tolist()

    def test_a_picture_as_a_raw_body(self, triton_served: Served) -> None:
        picture = bytes(range(256)) * 1000
        path, head = f"{triton_served.url}/v2/models/reshape_oo1/infer", {"Inference-Header-Content-Length": "0"}
        response = httpx.post(path, content=picture, headers=head)
        assert response.status_code == 200
        assert response.content.endswith(len(picture).to_bytes(4, "little") + picture)


class TestNanInf:
    """L0_nan_inf."""

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
