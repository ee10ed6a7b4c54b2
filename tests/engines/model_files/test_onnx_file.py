import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from engines.model_files.onnx_file import (
    Declared,
    OnnxFile,
    blame,
    index_bounds,
    initializer,
    read_onnx,
    source_digest,
    structure_digest,
    unranked_outputs,
    weight_files,
)

from ..small import IMAGES, model


def test_names_and_sizes_of_inputs_and_outputs_are_read() -> None:
    file = read_onnx(model("m (float[n, 3] x, double[2] d) => (float[n, 3] y, double[2] e) { y = Relu(x) e = Abs(d) }"))
    assert file.inputs == (Declared("x", ("n", 3), False), Declared("d", (2,), True))
    assert file.outputs == (Declared("y", ("n", 3), False), Declared("e", (2,), True))
    assert file.external == ()


def test_sizes_that_are_unknown_or_negative_have_no_name() -> None:
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, -1, 3])
    graph = helper.make_graph([], "g", [], [output, helper.make_tensor_value_info("z", TensorProto.FLOAT, None)])
    file = read_onnx(helper.make_model(graph).SerializeToString())
    assert file.outputs == (Declared("y", ("", "", 3), False), Declared("z", (), False))


def test_an_output_of_which_no_dimensions_are_stated_is_no_scalar() -> None:
    data = model("m (float[n] x) => (float[] y, float z, float[k] w) { y = Relu(x) z = ReduceSum<keepdims = 0>(x) w = Abs(x) }")
    assert unranked_outputs(data) == {"y"}


@pytest.mark.parametrize("data", [b"", b"junk", b"\x3a\xff", b"\xff" * 100, b"\x08" + b"\xff" * 11, b"\x3a\x05ab", b"\x3b"])
def test_bytes_that_are_no_onnx_file_have_no_names(data: bytes) -> None:
    assert read_onnx(data) == OnnxFile()
    assert not unranked_outputs(data)


@pytest.mark.parametrize("begin", [b"", b"\x3a\x80\x80\x40"])  # The second one is a graph of a megabyte.
def test_a_file_of_zeros_is_not_read_to_its_end(begin: bytes) -> None:
    data = begin + bytes(1 << 20)
    tracemalloc.start()
    try:
        assert read_onnx(data) == OnnxFile()
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
def test_reading_arbitrary_bytes_never_raises(data: bytes) -> None:
    read_onnx(data)
    read_onnx(b"\x3a" + bytes([len(data) & 0x7F]) + data)


@given(st.integers(0), st.integers(0, 255))
def test_reading_a_damaged_model_never_raises(at: int, byte: int) -> None:
    data = bytearray(model(IMAGES))
    data[at % len(data)] = byte
    read_onnx(bytes(data))


def test_a_weight_is_found_by_its_name() -> None:
    other, value = (numpy_helper.from_array(np.arange(300.0), name) for name in "vw")
    graph = helper.make_graph([], "g", [], [], [other, value])
    assert initializer(helper.make_model(graph).SerializeToString(), "w") == value.SerializeToString()


@pytest.mark.parametrize("data", [b"", b"junk", b"\x3a\xff", b"\x3a\x03\x2a\x01\xff", model(IMAGES)])
def test_a_weight_that_is_not_there_is_none(data: bytes) -> None:
    assert initializer(data, "nothing") is None


def test_blame_says_whether_the_bytes_are_onnx_at_all() -> None:
    whole = model(IMAGES)
    assert blame(whole, "no such operator") == "no such operator"
    assert blame(whole[:-9], "cannot parse") == "not an ONNX file, or a truncated one: cannot parse"
    assert blame(b"", "no graph") == "not an ONNX file (0 bytes)"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    assert blame(pointer, "cannot parse") == "a pointer of Git LFS in place of the file; `git lfs pull` brings that"


def test_fixed_width_numbers_are_passed_over() -> None:
    assert read_onnx(b"\x81\x01" + bytes(8) + b"\x85\x01" + bytes(4) + model(IMAGES)) == read_onnx(model(IMAGES))


def save_with_weights(folder: Path, weights: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> Path:
    """A model whose weights lie in a file of their own, one of them inside a branch."""
    then = helper.make_graph(
        [helper.make_node("Constant", [], ["t"], value=numpy_helper.from_array(weights))],
        "then",
        [],
        [helper.make_tensor_value_info("t", TensorProto.FLOAT, weights.shape)],
    )
    graph = helper.make_graph(
        [
            helper.make_node("If", ["c"], ["u"], then_branch=then, else_branch=then),
            helper.make_node("MatMul", ["u", "w"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, weights.shape)],
        [numpy_helper.from_array(weights, "w")],
    )
    path = folder / "model.onnx"
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(
        proto, str(path), save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0, convert_attribute=True
    )
    return path


def test_files_with_weights_are_found_also_inside_branches(tmp_path: Path) -> None:
    path = save_with_weights(tmp_path, np.ones((2, 2), np.float32))
    beside = sorted(file.name for file in tmp_path.iterdir() if file != path)
    assert list(read_onnx(path.read_bytes()).external) == beside
    assert len(beside) > 1


def test_the_digest_of_a_plain_model_is_that_of_its_file(tmp_path: Path) -> None:
    data = model(IMAGES)
    assert source_digest(data, weight_files(data, tmp_path)) == hashlib.sha256(data).hexdigest()


def test_the_digest_changes_with_weights_in_other_files_and_ignores_a_missing_one(tmp_path: Path) -> None:
    data = save_with_weights(tmp_path, np.ones((2, 2), np.float32)).read_bytes()
    digests = {source_digest(data, weight_files(data, tmp_path)), source_digest(data, weight_files(data, tmp_path / "nowhere"))}
    file = tmp_path / read_onnx(data).external[0]
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert len(digests | {source_digest(data, weight_files(data, tmp_path))}) == 3


NETWORK = """<ir_version: 8, opset_import: ["": 17], producer_name: "{producer}">
net (float[n, 4] x) => (float[n, 4] y) <float[4] w = {{{w}}}, int64[2] size = {{{size}}}, float most = {{{most}}}> {{
    a = {op}(x, w)
    b = Reshape(a, size)
    y = Min(b, most)
}}"""
USUAL = {"w": "1, 2, 3, 4", "size": "-1, 4", "most": "9", "op": "Add", "producer": "pytorch 2.4"}


def network(**changes: str) -> bytes:
    return bytes(onnx.parser.parse_model(NETWORK.format(**USUAL | changes)).SerializeToString())


@pytest.mark.parametrize("change", [{"w": "4, 3, 2, 1"}, {"producer": "pytorch 2.5"}])
def test_a_network_that_was_trained_again_has_the_same_structure(change: dict[str, str]) -> None:
    assert structure_digest(network(**change)) == structure_digest(network())
    assert source_digest(network(**change), ()) != source_digest(network(), ())


@pytest.mark.parametrize("change", [{"size": "4, -1"}, {"most": "8"}, {"op": "Mul"}])
def test_another_operator_size_or_bound_is_another_structure(change: dict[str, str]) -> None:
    assert structure_digest(network(**change)) != structure_digest(network())


def test_weights_in_files_of_their_own_are_not_part_of_the_structure(tmp_path: Path) -> None:
    digests = set()
    for number in range(2):
        proto = onnx.load_model_from_string(network(w=f"{number}, 2, 3, 4"))
        (weight,) = (tensor for tensor in proto.graph.initializer if tensor.name == "w")
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight), "w"))  # As bytes, which alone are moved.
        path = tmp_path / f"{number}.onnx"
        onnx.save(proto, str(path), save_as_external_data=True, location=f"weights {number}", size_threshold=8)
        assert read_onnx(path.read_bytes()).external
        digests.add(structure_digest(path.read_bytes()))
    assert len(digests) == 1


@pytest.mark.parametrize("data", [b"\xff", b"\x3a\x7f", network()[:-3]])
def test_bytes_that_cannot_be_parsed_have_no_structure(data: bytes) -> None:
    assert structure_digest(data) == ""


TABLE = "<float[5, 2] t = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, int64[2] two = {1, 1}, float half = {0.5}>"


@pytest.mark.parametrize(
    ("inputs", "nodes", "bounds"),
    [
        ("int64[n, 3] x", "y = Gather(t, x)", {"x": 5}),
        ("float[n, 3] x", "i = Cast<to = 7>(x) y = Gather(t, i)", {"x": 5}),
        ("float[n, 3] x", "h = Mul(x, half) i = Cast<to = 6>(h) y = Gather(t, i)", {"x": 1}),
        ("float[n, 3] x, float[n, 3] z", "h = Floor(x) i = Cast<to = 7>(h) g = Gather(t, i) y = Add(g, z)", {"x": 1}),
        ("bfloat16[n, 3] x", "f = Cast<to = 1>(x) y = Range(half, f, half)", {"x": 1}),
        ("float[n, 3] x, int64[1] i", "h = CastLike(x, i) y = Gather(t, h)", {"x": 1}),
        ("float[n, 3] x", "s = Shape(x) i = Cast<to = 6>(s) y = Expand(x, s)", {}),
        ("float[n, 3] x", "r = Round(x) i = Cast<to = 6>(r) y = Cast<to = 1>(i)", {}),
        ("float[n, 3] x", "h = Mul(x, half) i = Cast<to = 7>(h) f = Cast<to = 1>(i) g = Gather(t, i) y = Add(f, g)", {"x": 1}),
        ("float[n, 3] x", "i = Cast<to = 6>(x) f = Cast<to = 1>(i) j = Cast<to = 7>(f) k = Add(j, two) y = Gather(t, k)",
         {"x": 1}),
        ("bool c, float[n, 3] x", "i = Cast<to = 7>(x) f = Cast<to = 1>(i) y = If(c) <then_branch = a () => (float[n] u) "
         "{ u = Gather(t, i) }, else_branch = b () => (float[n] v) { v = Identity(f) }>", {"x": 1}),
        ("float[n, 3] x", "b = Greater(x, half) i = Cast<to = 7>(b) y = Gather(t, i)", {}),
        ("float[n, 3] x", "b = Cast<to = 9>(x) i = Cast<to = 7>(b) y = Gather(t, i)", {}),
        ("float[n, 3] x", "v, k = TopK(x, two) i = Cast<to = 6>(k) y = Gather(t, i)", {}),
        ("float[n, 3] x", "v, k = TopK(x, two) i = Cast<to = 6>(v) y = Gather(t, i)", {"x": 1}),
        ("float[n, 3] x", "q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)", {}),
        ("float[n, 3] x", "y = Resize(x, , two)", {}),
        ("float[n, 3] x", "y = Resize(t, , x)", {"x": 1}),
        ("bool c, float[n, 3] x", "y = If(c) <then_branch = a () => (float[n] u) { i = Cast<to = 7>(x) u = Gather(t, i) }, "
         "else_branch = b () => (float[n] v) { v = Identity(x) }>", {"x": 1}),
        ("bool c, float[n, 3] x", "y = If(c) <then_branch = a () => (float[n] u) { u = Abs(x) }, "
         "else_branch = b () => (float[n] v) { v = Identity(x) }>", {}),
    ],
)  # fmt: skip
def test_inputs_of_which_an_index_or_a_size_is_made_are_found(inputs: str, nodes: str, bounds: dict[str, int]) -> None:
    assert index_bounds(model(f"m ({inputs}) => (float[n] y) {TABLE} {{ {nodes} }}")) == bounds


@pytest.mark.parametrize(("kind", "bounds"), [(TensorProto.INT64, {"x": 1}), (TensorProto.FLOAT, {})])
def test_an_index_that_a_function_of_the_model_makes_is_found(kind: int, bounds: dict[str, int]) -> None:
    opset = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    inner = helper.make_function("own", "inner", ["a"], ["b"], [helper.make_node("Cast", ["a"], ["b"], to=kind)], opset)
    outer = helper.make_function("own", "outer", ["a"], ["b"], [helper.make_node("inner", ["a"], ["b"], domain="own")], opset)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
    graph = helper.make_graph([helper.make_node("outer", ["x"], ["y"], domain="own")], "g", [x], [y])
    made = helper.make_model(graph, functions=[inner, outer], opset_imports=opset)
    assert index_bounds(made.SerializeToString()) == bounds


@given(st.integers(0), st.integers(0, 255))
def test_looking_for_indices_in_a_damaged_model_never_raises(at: int, byte: int) -> None:
    data = bytearray(model("m (float[n, 3] x) => (float[n, 3, 2] y) " + TABLE + " { i = Cast<to = 7>(x) y = Gather(t, i) }"))
    data[at % len(data)] = byte
    index_bounds(bytes(data))
