import gc
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from engines import (
    DATATYPES,
    Cancelled,
    Engine,
    ExecutionFailed,
    Executor,
    ModelRefused,
    Room,
    RuntimeSettings,
    Tensor,
    TensorMismatch,
    TensorSpec,
    load_engine,
)
from engines.base import NO_ROOM
from engines.onnxruntime.engine import OnnxExecutor
from engines.onnxruntime.errors import clean_message
from engines.onnxruntime.outputs import OnnxWork
from engines.signature import Default
from partitions.cpu import CpuDevice, CpuPartition
from tests import models
from tests.engines.tensors import Array, Memory, array, packed, run, unpacked
from tests.fakes import FakeDevice
from tests.interpreter import Watcher
from tests.memory import anonymous

NUMBERS = {
    "float": ("FP32", np.float32), "double": ("FP64", np.float64), "float16": ("FP16", np.float16),
    "bfloat16": ("BF16", np.uint16), "bool": ("BOOL", np.bool_),
    "int8": ("INT8", np.int8), "int16": ("INT16", np.int16), "int32": ("INT32", np.int32), "int64": ("INT64", np.int64),
    "uint8": ("UINT8", np.uint8), "uint16": ("UINT16", np.uint16), "uint32": ("UINT32", np.uint32),
    "uint64": ("UINT64", np.uint64),
}  # fmt: skip


@pytest.fixture
def load(tmp_path: Path) -> "Loader":
    return Loader(tmp_path)


class Loader:
    """Loads models from their source, each from a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, source: str, settings: RuntimeSettings | None = None) -> Engine:
        return load_engine(models.save(self.folder / f"{len(list(self.folder.iterdir()))}.onnx", source), settings=settings)


def _extremes(dtype: type[np.generic]) -> Array:
    """Two by three elements with every bit used."""
    every = np.frombuffer(bytes(range(0x70, 0x70 + 6 * np.dtype(dtype).itemsize)), dtype)
    return (every.astype(np.uint8) % 2 == 1 if dtype is np.bool_ else every).reshape(2, 3)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("nbytes", [0, 4096])
def test_every_type_of_number_goes_through_bit_by_bit(load: Loader, partition: CpuPartition, name: str, nbytes: int) -> None:
    protocol, dtype = NUMBERS[name]
    data, memory = _extremes(dtype), Memory(4096)
    engine = load(models.identity(name))
    assert repr(engine.signature) == f"<Signature x {protocol}[-1, -1] -> y {protocol}[-1, -1], batch none>"
    with closing(engine.bind(partition)) as executor:
        (output,) = executor.enqueue([Tensor.of(data)], memory.room._replace(nbytes=nbytes)).wait()
    assert memory.holds(output) == (nbytes > 0)
    assert (output.shape, output.nbytes) == (data.shape, data.nbytes)
    assert array(output, dtype).tobytes() == data.tobytes()


@pytest.fixture
def texts(load: Loader, partition: CpuPartition) -> Iterator[Executor]:
    with closing(load(models.identity("string", "n")).bind(partition)) as executor:
        yield executor


def test_bytes_that_are_not_utf_8_go_through_bit_by_bit(texts: Executor) -> None:
    elements = [b"fine", b"\xff", b"\0\xfe" * 20]
    (output,) = texts.enqueue([packed(elements)]).wait()
    assert unpacked(output) == elements


def test_bytes_that_are_not_in_wire_form_fail_the_work(texts: Executor) -> None:
    with pytest.raises(ExecutionFailed, match="element 0 claims"):
        texts.enqueue([Tensor.of(np.full(8, 255, np.uint8))._replace(shape=(1,))]).wait()


def test_many_texts_go_with_numbers_in_their_places(load: Loader, partition: CpuPartition) -> None:
    source = (
        "mixed (string[n] s, float[m] x) => (float[m] y, string[n] t, float[k] u) {t = Identity(s) y = Neg(x) u = Unique(x)}"
    )
    memory = Memory(1 << 16)
    with closing(load(source).bind(partition)) as executor:
        for count in (3000, 2999):
            elements = [b"%d" % index for index in range(count)]
            inputs = [packed(elements), Tensor.of(np.array([count, 1, 1], np.float32))]
            y, t, u = executor.enqueue(inputs, memory.room).wait()
            assert array(y).tolist() == [-count, -1, -1]
            assert unpacked(t) == elements
            assert array(u).tolist() == [1, count]
            assert memory.holds(y)


@pytest.mark.parametrize("output", ["int64[1] n) => (string[m] y)", "int64[r] n) => (string[] y)"])
def test_outputs_of_unexpectedly_many_texts_release_the_gil(load: Loader, partition: CpuPartition, output: str) -> None:
    """The inputs are small: one text, and how often to repeat it in the output, whose rank may be unknown, too."""
    source = f"many (string[1] x, {output} {{ y = Expand(x, n) }}"
    count = 400_000
    asked = [packed([b"text"]), Tensor.of(np.array([count]))]
    engine = load(source)
    session = ort.InferenceSession(load.folder / "0.onnx", providers=["CPUExecutionProvider"])
    with Watcher() as control:
        session.run(None, {"x": np.array(["text"], object), "n": np.array([count])})
    with closing(engine.bind(partition)) as executor, Watcher() as watcher:
        (output,) = executor.enqueue(asked).wait()
    assert output.shape == (count,)
    assert watcher.longest < max(0.005, control.longest / 3), control.longest


def test_texts_keep_their_shape_and_go_with_numbers(load: Loader, partition: CpuPartition) -> None:
    source = (
        "mixed (string[n, 2] s, bfloat16[2] b, float[m] x) => (float[m] y, string[n, 2] t) {t = Identity(s) y = Identity(x)}"
    )
    with pytest.raises(ModelRefused, match="cannot serve BYTES and BF16 tensors in one model"):
        load(source)
    engine = load(source.replace("bfloat16[2] b", "float16[2] b"))
    with closing(engine.bind(partition)) as executor:
        numbers = [Tensor.of(np.zeros(2, np.float16)), Tensor.of(np.array([1, 2, 3], np.float32))]
        y, t = executor.enqueue([packed([b"a", b"b", b"c", b"d"], (2, 2)), *numbers]).wait()
    assert array(y).tolist() == [1, 2, 3]
    assert (t.shape, unpacked(t)) == ((2, 2), [b"a", b"b", b"c", b"d"])


@pytest.mark.parametrize(
    ("dims", "shape"),
    [("", ()), ("n", (0,)), ("n, m", (0, 3)), ("n, 0", (2, 0)), ("1, n", (1, 1)), ("?", (3,)), ("2, ?", (2, 1))],
)
@pytest.mark.parametrize("nbytes", [0, 4096])
def test_tensors_without_dimensions_or_elements_go_through(
    load: Loader, partition: CpuPartition, dims: str, shape: tuple[int, ...], nbytes: int
) -> None:
    data, memory = np.full(shape, 2.5, np.float32), Memory(4096)
    with closing(load(models.identity("float", dims)).bind(partition)) as executor:
        (output,) = executor.enqueue([Tensor.of(data)], memory.room._replace(nbytes=nbytes)).wait()
    assert (output.shape, output.nbytes) == (shape, data.nbytes)
    assert array(output).tolist() == data.tolist()


def test_a_tensor_without_elements_needs_no_room(
    load: Loader, partition: CpuPartition, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(load(models.identity("float", "n, 0")).bind(partition)) as executor:
        assert run(executor, np.zeros((2, 0), np.float32))[0].shape == (2, 0)
    assert not caplog.records


def test_outputs_are_laid_out_side_by_side_as_far_as_their_sizes_are_known_and_fit(
    load: Loader, partition: CpuPartition
) -> None:
    source = """many (float[n] x) => (float[n] a, float[m] b, float[n] c, float[n] d) {
        a = Identity(x) b = Unique<sorted = 0>(x) c = Neg(x) d = Identity(x) }"""
    x, memory = np.array([3, 1, 3], np.float32), Memory(4096)
    with closing(load(source).bind(partition)) as executor:
        for _ in range(2):
            outputs = executor.enqueue([Tensor.of(x)], memory.room._replace(nbytes=128)).wait()
            assert [array(output).tolist() for output in outputs] == [[3, 1, 3], [3, 1], [-3, -1, -3], [3, 1, 3]]
            assert [memory.holds(output) for output in outputs] == [True, False, True, False]
            assert [outputs[index].address - memory.room.address for index in (0, 2)] == [0, 64]


def test_an_output_may_be_an_input_or_a_constant(load: Loader, partition: CpuPartition) -> None:
    source = "lazy (float[n] x) => (float[n] x, float[2] c) <float[2] c = {1, 2}> { y = Neg(x) }"
    with closing(load(source).bind(partition)) as executor:
        x, c = run(executor, np.array([5, 6, 7], np.float32))
    assert (x.tolist(), c.tolist()) == ([5, 6, 7], [1, 2])


def test_an_output_that_is_listed_twice_is_given_once(load: Loader, partition: CpuPartition) -> None:
    twice = "twice (float[n] x) => (float[n] y, float[n] y, float[n] z) { y = Neg(x) z = Abs(x) }"
    with closing(load(twice).bind(partition)) as executor:
        assert [each.tolist() for each in run(executor, np.array([1, -2], np.float32))] == [[-1, 2], [1, 2]]


def test_a_model_without_inputs_gives_what_it_has(load: Loader, partition: CpuPartition) -> None:
    with closing(load("constant () => (float[2] y) <float[2] c = {1, 2}> { y = Identity(c) }").bind(partition)) as executor:
        assert run(executor)[0].tolist() == [1, 2]


@pytest.mark.parametrize("declared", ["1", "7", "1, 1", "n, 1", ""])
def test_a_file_that_declares_the_wrong_output_shape_is_served(load: Loader, partition: CpuPartition, declared: str) -> None:
    model = onnx.load(models.save(load.folder / "right.onnx", models.identity("float", "n")))
    model.graph.output[0].CopyFrom(onnx.parser.parse_graph(f"g () => (float[{declared}] y) {{ y = Constant() }}").output[0])
    onnx.save(model, load.folder / "wrong.onnx")
    memory = Memory(4096)
    with closing(load_engine(load.folder / "wrong.onnx").bind(partition)) as executor:
        for count in (3, 2):
            data = np.arange(count, dtype=np.float32)
            (output,) = executor.enqueue([Tensor.of(data)], memory.room).wait()
            assert output.shape == (count,)
            assert array(output).tolist() == data.tolist()


@pytest.mark.parametrize("word", ["?", "None", "-1", " ", "unknown", "unk__12", "dynamic_axes_1", "n"])
def test_dimensions_that_are_named_alike_may_have_different_sizes(tmp_path: Path, partition: CpuPartition, word: str) -> None:
    """As in PaddleOCR's classifier, [?, 3, ?, ?], which takes pictures of 48 by 192."""
    (tmp_path / "model.onnx").write_bytes(models.classifier(word, 3, word, word))
    data, memory = np.arange(2 * 3 * 4 * 6, dtype=np.float32).reshape(2, 3, 4, 6), Memory(4096)
    with closing(load_engine(tmp_path / "model.onnx").bind(partition)) as executor:
        for room in (memory.room, NO_ROOM):
            (found,) = run(executor, data, room=room)
            np.testing.assert_allclose(found, data.mean((2, 3)), rtol=1e-6)


ADDED = "added (float[n] a, float[n] b) => (float[n] y) { y = Add(a, b) }"


def test_sizes_that_differ_for_one_name_give_what_the_library_computes(load: Loader, partition: CpuPartition) -> None:
    one, several, memory = np.ones(1, np.float32), np.arange(3, dtype=np.float32), Memory(64)
    with closing(load(ADDED).bind(partition)) as executor:
        assert run(executor, one, several, room=memory.room)[0].tolist() == [1, 2, 3]
        with pytest.raises(ExecutionFailed, match="broadcast an axis"):
            run(executor, several, np.ones(2, np.float32))
        assert run(executor, several, several, room=memory.room)[0].tolist() == [0, 2, 4]


def test_sizes_that_differ_for_one_name_give_no_outputs_above_the_limit(load: Loader, partition: CpuPartition) -> None:
    source = "outer (float[n, n] a, float[n, n] b) => (float[n, n] y) { y = Add(a, b) }"
    why = r"dimension 1 of shape \[1000, 1\] is 1; dimension 'n' is 1000 elsewhere in the request; of the larger sizes the "
    with closing(load(source, RuntimeSettings(memory_limit=100_000)).bind(partition)) as executor:
        with pytest.raises(
            TensorMismatch, match=why + r"outputs may have 4000000 bytes, and the limit is 100000 \(memory_limit\)"
        ):
            executor.enqueue([Tensor.of(np.ones(shape, np.float32)) for shape in ((1000, 1), (1, 1000))])
        assert run(executor, np.ones((100, 1), np.float32), np.ones((1, 100), np.float32))[0].shape == (100, 100)


def test_shapes_without_end_are_served(load: Loader, partition: CpuPartition) -> None:
    memory = Memory(4096)
    with closing(load(models.identity("float", "n")).bind(partition)) as executor:
        for count in [*range(200), 1]:
            assert len(run(executor, np.zeros(count, np.float32), room=memory.room)[0]) == count


# Files


def test_weights_in_a_file_of_their_own_are_found_beside_the_model(load: Loader, partition: CpuPartition) -> None:
    source = "weights (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}> { y = Mul(x, w) }"
    path = load.folder / "external.onnx"
    model = onnx.load(models.save(path, source))
    weights = np.array([1, 2, 3, 4], np.float32)  # In raw form: other forms cannot be in an external file.
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (load.folder / "weights.bin").stat().st_size >= 16
    with closing(load_engine(path).bind(partition)) as executor:
        assert run(executor, np.full(4, 10, np.float32))[0].tolist() == [10, 20, 30, 40]
    (load.folder / "weights.bin").unlink()
    with pytest.raises(ModelRefused, match=r"external\.onnx: failed to load: .*weights\.bin"):
        load_engine(path)


@pytest.mark.parametrize(
    ("header", "source", "said", "cure"),
    [
        (
            "ir_version: 8",
            "m (float[n] x) => (float[n] y) { y = Reluu(x) }",
            "Reluu",
            "the library has no such operator: export",
        ),
        ("ir_version: 8", "m (float[n] x) => (float[n] y) { y = mine.Op(x) }", "mine:Op", "the library has no such operator:"),
        ("ir_version: 99", "m (float[n] x) => (float[n] y) { y = Neg(x) }", "99", "export it with an older opset_version, or"),
        ("ir_version: 8", "m (complex64[n] x) => (complex64[n] y) { y = Identity(x) }", "complex64", "convert tensors of that"),
    ],
)
def test_a_file_that_the_library_refuses_says_what_to_do(load: Loader, header: str, source: str, said: str, cure: str) -> None:
    path = load.folder / "m.onnx"
    text = f'<{header}, opset_import: ["": 17, "mine": 1]>\n{source}'
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    with pytest.raises(ModelRefused, match=rf"m\.onnx: failed to load: .*{said}.*; {cure}"):
        load_engine(path)


def test_an_opset_that_is_too_new_says_what_to_do(load: Loader) -> None:
    path = load.folder / "m.onnx"
    model = onnx.load(models.save(path, "m (float[n] x) => (float[n] y) { y = Neg(x) }"))
    model.opset_import[0].version = 99
    onnx.save_model(model, path)
    with pytest.raises(ModelRefused, match=r"99.*; export it with an older opset_version"):
        load_engine(path)


@pytest.mark.parametrize("external", [False, True])
def test_an_optional_input_has_its_initializer_as_default(load: Loader, partition: CpuPartition, external: bool) -> None:
    path = load.folder / "scaled.onnx"
    model = onnx.load(models.save(path, "scaled (float[n] x) => (float[n] y) <float[2] w = {2, 3}> { y = Mul(x, w) }"))
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array([2, 3], np.float32), "w"))
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [2]))
    onnx.save_model(model, path, save_as_external_data=external, location="weights.bin", size_threshold=0)
    ones = np.ones(2, np.float32)
    with closing(load_engine(path).bind(partition)) as executor:
        assert [spec.name for spec in executor.engine.signature.inputs] == ["x"]
        assert run(executor, ones)[0].tolist() == [2, 3]
    engine = load_engine(path, settings=RuntimeSettings(optional_inputs=("w", "x", "nothing")))
    x, w = engine.signature.inputs
    default = Default((2,), np.array([2, 3], np.float32).tobytes())
    assert (x.default, w) == (None, TensorSpec("w", DATATYPES["FP32"], (2,), default=default))
    with closing(engine.bind(partition)) as executor:
        memory = Memory(4096)
        for _ in range(2):
            assert run(executor, ones, np.array([5, 7], np.float32), room=memory.room)[0].tolist() == [5, 7]


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 MiB, nearly all of them weights."""
    path = tmp_path_factory.mktemp("heavy") / "heavy.onnx"
    model = onnx.parser.parse_model(models.HEADER + "heavy (float[n, 4096] x) => (float[n, 4096] y) { y = MatMul(x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4096, 4096), np.float32), "w"))
    path.write_bytes(model.SerializeToString())
    return path


def test_loading_and_binding_a_large_model_release_the_gil(heavy: Path, partition: CpuPartition) -> None:
    data = heavy.read_bytes()
    with Watcher() as control:
        ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    with ExitStack() as closed, Watcher() as watcher:
        engine = closed.enter_context(closing(load_engine(heavy)))
        executor = closed.enter_context(closing(engine.bind(partition)))
        closed.enter_context(closing(executor.rebind(partition)))
    assert watcher.longest < max(0.01, control.longest / 2), control.longest


def test_the_model_that_was_loaded_is_bound_when_its_file_has_changed(load: Loader, partition: CpuPartition) -> None:
    path = models.save(load.folder / "m.onnx", "m (float[n] x) => (float[n] y) { y = Neg(x) }")
    engine = load_engine(path)
    with path.open("r+b") as file:  # In place, so that a process that has it open sees the change.
        file.write(models.save(load.folder / "other.onnx", "m (float[n] x) => (float[n] y) { y = Abs(x) }").read_bytes())
    with closing(engine.bind(partition)) as executor:
        assert run(executor, np.ones(1, np.float32))[0].tolist() == [-1]
    engine.close()


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"missing\.onnx: No such file or directory$"):
        load_engine(tmp_path / "missing.onnx")


@pytest.mark.parametrize(
    ("content", "more"), [(b"", " (0 bytes)"), (b"not a model\n", ""), (b"\xff" * 100, ""), (b"\0" * 1000, "")]
)
def test_a_file_that_is_no_model_is_refused_with_its_name(tmp_path: Path, content: bytes, more: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelRefused) as caught:
        load_engine(path)
    assert str(caught.value).startswith(f"{path}: failed to load: not an ONNX file{more}")
    assert "\n" not in str(caught.value)


def test_a_model_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = models.save(tmp_path / "model.onnx", models.identity())
    whole = path.read_bytes()
    for end in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelRefused, match=r"failed to load: (not an ONNX file|Missing opset)"):
            load_engine(path)


SEQUENCE = "let the model take tensors, and make the sequence of them with SequenceConstruct$"
OPTIONAL = "make it a plain input, with an initializer of its name as the value of requests without it$"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("strange (float[n] x) => (float[n] y) { y = Frobnicate(x) }", "failed to load: .*Frobnicate"),
        (
            "odd (seq(float[n]) x) => (seq(float[n]) y) { y = Identity(x) }",
            rf"input 'x' has type seq\(tensor\(float\)\), which requests cannot have; {SEQUENCE}",
        ),
        (
            "odd (optional(float[n]) x) => (optional(float[n]) y) { y = Identity(x) }",
            rf"input 'x' has type optional\(tensor\(float\)\), which requests cannot have; {OPTIONAL}",
        ),
        (
            "rows (float[n, 2] x) => (seq(float[m]) y) { y = SplitToSequence<keepdims = 0>(x) }",
            "it has no output that can be served: output 'y' is left out, .*; let the model end",
        ),
        (
            "silent (float[n] x) => () { y = Neg(x) }",
            "it has no output, so there is nothing to answer with; export it with the",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_what_to_do(load: Loader, source: str, why: str) -> None:
    with pytest.raises(ModelRefused, match=f"^{re.escape(str(load.folder / '0.onnx'))}: {why}"):
        load(source)


ZIPMAP = """zipped (float[n, 2] x) => (int64[n] label, seq(map(int64, float)) probability) {
  label = ArgMax<axis = 1, keepdims = 0>(x)
  probability = ai.onnx.ml.ZipMap<classlabels_int64s = [0, 1]>(x)
}"""
"""What skl2onnx makes of a classifier by default."""


@pytest.mark.parametrize(
    ("source", "left_out", "cure"),
    [
        (ZIPMAP, "'probability'", 'export the classifier with options={"zipmap": False} to have it as a tensor'),
        (
            """listed (float[n, 2] x) => (int64[n] label, seq(float[m]) rows)
            { label = ArgMax<axis = 1, keepdims = 0>(x) rows = SplitToSequence<keepdims = 0>(x) }""",
            "'rows'",
            "let the model end with SequenceAt or ConcatFromSequence to have it as a tensor",
        ),
        (
            """perhaps (float[n, 2] x) => (int64[n] label, optional(float[n, 2]) maybe)
            { label = ArgMax<axis = 1, keepdims = 0>(x) maybe = Optional(x) }""",
            "'maybe'",
            "let the model end with OptionalGetElement to have it",
        ),
    ],
)
def test_outputs_that_are_no_tensors_are_left_out_and_the_others_served(
    load: Loader, partition: CpuPartition, source: str, left_out: str, cure: str
) -> None:
    engine, memory = load(source), Memory(4096)
    assert [spec.name for spec in engine.signature.outputs] == ["label"]
    with closing(engine.bind(partition)) as executor:
        (note,) = cast(list[str], executor.describe()["notes"])
        assert note.startswith(f"output {left_out} is left out, as answers cannot have its type, ")
        assert note.endswith(f"; {cure}")
        for rows in (3, 2, 3):
            data = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2) * np.resize([1, -1], (rows, 1)).astype(np.float32)
            assert run(executor, data, room=memory.room, dtype=np.int64)[0].tolist() == data.argmax(1).tolist()


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (
            "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Failed to load model because protobuf parsing failed.",
            "protobuf parsing failed.",
        ),
        ("[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load model from /proc/self/fd/7 failed:No graph.", "No graph."),
        (
            "[ONNXRuntimeError] : 1 : FAIL : /onnxruntime_src/onnxruntime/core/graph/model.cc:256 "
            "onnxruntime::Model::Model(onnx::ModelProto&&, const onnxruntime::PathString&, const Options*) "
            "Unsupported model IR version: 99, max supported IR version: 13\n",
            "Unsupported model IR version: 99, max supported IR version: 13",
        ),
        (
            "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Add node. Name:'' Status Message: "
            "/src/math/element_wise_ops.h:563 void onnxruntime::BroadcastIterator::Init(ptrdiff_t, ptrdiff_t) "
            "axis == 1 || axis == largest was false. Attempting to broadcast an axis by a dimension other than 1. 3 by 5\n",
            "Add: Attempting to broadcast an axis by a dimension other than 1. 3 by 5",
        ),
        (
            "Non-zero status code returned while running Conv node. Name:'y_nchwc' Status Message: matmul_helper.h:59 Compute "
            "MatMul dimension mismatch",
            "Conv 'y_nchwc': MatMul dimension mismatch",
        ),
        (
            "/src/tensor.h:12 const T* onnxruntime::Tensor::Data() const [with T = std::vector<int>] "
            "utils::Is<T>(x.y) was false. Tensor type mismatch.",
            "Tensor type mismatch.",
        ),
        (
            "Error: tensorprotoutils.cc:461 ValidateExternalDataPathFromDir External data path does not exist: "
            '"/models/m/1/weights.bin"',
            'Error: External data path does not exist: "weights.bin"',
        ),
        (
            "Error in execution: Got invalid dimensions for input: x for the following indices\n index: 1 Got: 5 Expected: 4\n "
            "Please fix either the inputs/outputs or the model.",
            "Error in execution: Got invalid dimensions for input: x for the following indices index: 1 Got: 5 Expected: 4 "
            "Please fix either the inputs/outputs or the model.",
        ),
        ("", "RuntimeError"),
    ],
)
def test_errors_of_the_library_are_shortened_to_their_useful_part(said: str, left: str) -> None:
    assert clean_message(RuntimeError(said), Path("/models/m/1")) == left


def test_a_file_of_a_later_format_is_refused_in_one_sentence(load: Loader) -> None:
    path = models.save(load.folder / "m.onnx", models.identity())
    model = onnx.load(path)
    model.ir_version = 99
    onnx.save(model, path)
    with pytest.raises(ModelRefused) as caught:
        load_engine(path)
    assert str(caught.value).startswith(f"{path}: failed to load: Unsupported model IR version: 99, max supported")


# Partitions


def test_a_partition_of_other_hardware_is_refused(load: Loader) -> None:
    with pytest.raises(ModelRefused, match=r"ONNX Runtime serves partitions of CPU cores, not <FakePartition \[0\]>"):
        load(models.identity()).bind(FakeDevice().carve([0]))


def _threads() -> dict[str, str]:
    """The cores that each thread of this process may use."""
    cores = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # The thread has ended.
            lines = (task / "status").read_text().splitlines()
            cores[task.name] = next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))
    return cores


def _added(before: dict[str, str], count: int) -> dict[str, str]:
    """The threads started since then. Joined threads stay listed for a moment, so this waits until there are `count`."""
    until = time.monotonic() + 10
    while len(added := {thread: cores for thread, cores in _threads().items() if thread not in before}) != count:
        assert time.monotonic() < until, added
        os.sched_yield()
    return added


def _sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The threads that start after this call."""
    import onnxruntime

    made = []
    plain = onnxruntime.InferenceSession

    def remember(*arguments: object, **options: object) -> object:
        made.append(plain(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(onnxruntime, "InferenceSession", remember)
    return made


@pytest.fixture
def twice(device: CpuDevice) -> Iterator[CpuPartition]:
    """A partition that counts one core twice, so that its session has one more thread, whose cores can be checked on any
    machine.
    """
    core = device.cores[-1]
    with closing(CpuPartition([0, 1], [core, core], threading.local())) as partition:
        yield partition


def test_an_alternate_s_threads_on_lent_cores_are_idle_ones_and_those_on_home_cores_are_not(
    load: Loader, device: CpuDevice
) -> None:
    """Two threads a core, so that it can be checked on two cores."""
    if len(device.cores) == 1:
        pytest.skip("a device of one core has none to lend")
    home, lent = device.cores[:2]
    with (
        closing(CpuPartition([0, 1], [home, home], threading.local())) as partition,
        closing(CpuPartition([0, 1, 2, 3], [home, home, lent, lent], threading.local(), {2: lent, 3: lent})) as wide,
        closing(load(models.identity()).bind(partition)) as executor,
    ):
        run(executor, zeros := np.zeros((1, 1), np.float32))
        before = _threads()
        with closing(executor.alternate(wide)) as other:
            threads = map(int, _added(before, 3))
            found = [(sorted(os.sched_getaffinity(thread)), os.sched_getscheduler(thread)) for thread in threads]
            assert sorted(found) == sorted([([home], os.SCHED_OTHER), *[(sorted([home, lent]), os.SCHED_IDLE)] * 2])
            assert other.describe()["adds"] == other.memory
            assert other.memory["session"] > 0
            for each in (executor, other, executor):
                assert run(each, zeros)[0].tolist() == [[0]]


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        ({}, 4),
        ({"intra_op_threads": 2}, 2),
        ({"intra_op_threads": 64, "inter_op_threads": 64}, 4),
        ({"execution_mode": "parallel"}, 4),
        ({"execution_mode": "parallel", "inter_op_threads": 2}, 4),
        ({"execution_mode": "parallel", "inter_op_threads": 2, "intra_op_threads": 2}, 3),
    ],
)
def test_a_session_has_no_more_threads_than_its_partition_has_cores(
    load: Loader, device: CpuDevice, settings: dict[str, Any], threads: int
) -> None:
    core = device.cores[-1]
    with closing(CpuPartition([0, 1, 2, 3], [core] * 4, threading.local())) as partition:
        run(bound := load(models.identity()).bind(partition), np.zeros((1, 1), np.float32))
        bound.close()
        before = _threads()
        with closing(load(models.identity(), RuntimeSettings(**settings)).bind(partition)) as executor:
            run(executor, np.zeros((1, 1), np.float32))
            assert set(_added(before, threads - 1).values()) == {str(core)}, "beside the thread that calls"


def test_the_settings_of_a_session_are_those_that_were_asked_for(
    load: Loader, twice: CpuPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _sessions(monkeypatch)
    asked = RuntimeSettings(
        execution_mode="parallel", graph_optimization="basic", memory_arena=False, memory_pattern=False, intra_op_threads=1
    )
    executor = load(models.identity(), asked).bind(twice)
    options = made[-1].get_session_options()
    assert options.execution_mode.name == "ORT_PARALLEL"
    assert options.graph_optimization_level.name == "ORT_ENABLE_BASIC"
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (False, False)
    assert executor.describe()["parallel"] == 2
    executor.close()
    assert options.get_session_config_entry("session.inter_op.allow_spinning") == "0"


def test_closing_an_executor_ends_its_threads(load: Loader, twice: CpuPartition) -> None:
    before = _threads()
    executor = load(models.identity()).bind(twice)
    run(executor, np.zeros((1, 1), np.float32))
    _added(before, 1)
    gc.disable()
    try:
        executor.close()
        _added(before, 0)
    finally:
        gc.enable()


def test_onnx_runtime_sends_no_telemetry(tmp_path: Path) -> None:
    """Where it sends any, it keeps an identifier in the home folder and sends names and hashes of models."""
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}  # Without variables such as CI, which turn telemetry off too.
    subprocess.run([sys.executable, "-c", "import engines.onnxruntime.engine"], env=home, check=True)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_session_s_threads_do_not_spin(load: Loader, twice: CpuPartition, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _sessions(monkeypatch)
    load(models.identity()).bind(twice).close()
    assert [session.get_session_options().intra_op_num_threads for session in made] == [1, 2]
    for session in made:
        assert session.get_session_options().get_session_config_entry("session.intra_op.allow_spinning") == "0"


# What goes wrong while it runs


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((1, 5), r"^input 'x': dimension 1 of shape \[1, 5\] is 5; expected 4$"),
        ((4,), r"^input 'x': shape \[4\] has 1 dimension; expected 2, as in \[-1, 4\]$"),
        ((1, 1, 4), r"^input 'x': shape \[1, 1, 4\] has 3 dimensions; expected 2"),
    ],
)
@pytest.mark.parametrize("name", ["float", "string"])
def test_a_shape_that_the_model_does_not_take_is_refused_at_once_each_time(
    load: Loader, partition: CpuPartition, name: str, shape: tuple[int, ...], why: str
) -> None:
    wrong, right = (
        packed([b"a"] * math.prod(shape), shape) if name == "string" else Tensor.of(np.zeros(shape, np.float32))
        for shape in (shape, (2, 4))
    )
    with closing(load(models.identity(name, "n, 4")).bind(partition)) as executor:
        for _ in range(2):
            with pytest.raises(TensorMismatch, match=why):
                executor.enqueue([wrong])
            assert executor.enqueue([right]).wait()[0].shape == (2, 4)


def test_a_closed_executor_says_so_and_what_to_do(load: Loader, partition: CpuPartition) -> None:
    executor = load(models.identity()).bind(partition)
    executor.close()
    with pytest.raises(ExecutionFailed, match=r"^<OnnxExecutor 0\.onnx, 1 run, closed> takes nothing more; bind the engine"):
        executor.enqueue([Tensor.of(np.zeros((1, 1), np.float32))])


def test_an_index_out_of_range_fails_the_work_in_one_line(load: Loader, partition: CpuPartition) -> None:
    with closing(load(models.FUSSY).bind(partition)) as executor:
        with pytest.raises(ExecutionFailed, match="idx=7 must be within") as caught:
            run(executor, np.full(3, 7, np.float32))
        assert "\n" not in str(caught.value)
        assert run(executor, np.zeros(3, np.float32))[0].tolist() == [0, 0, 0]


def test_a_warm_up_that_fails_names_the_way_to_other_sizes(
    load: Loader, partition: CpuPartition, caplog: pytest.LogCaptureFixture
) -> None:
    source = "fixed (float[n, h] x) => (float[n, 3] y) <float[3] three = {1, 2, 3}, int64[2] shape = {-1, 3}> "
    load(source + "{ whole = Reshape(x, shape) y = Add(whole, three) }").bind(partition).close()
    (record,) = caplog.records
    assert "warm-up with zeros (x [1, 1]) failed" in record.getMessage()
    cure = 'model_warmup { name: "usual" inputs { key: "x" value { data_type: TYPE_FP32 dims: [...] zero_data: true } } }'
    assert record.getMessage().endswith(f"; have config.pbtxt name sizes that it takes, as in {cure}")


def test_a_warm_up_that_fails_is_only_a_warning(
    load: Loader, partition: CpuPartition, caplog: pytest.LogCaptureFixture
) -> None:
    source = models.FUSSY.replace("index = Cast<to = 7>(x)", "less = Sub(x, five) index = Cast<to = 7>(less)")
    source = source.replace("<float[1] table = {0}>", "<float[1] table = {0}, float five = {5}>")
    with caplog.at_level(logging.WARNING), closing(load(source).bind(partition)) as executor:
        assert run(executor, np.full(2, 5, np.float32))[0].tolist() == [0, 0]
        engine = executor.engine
        engine.bind(partition).close()
        assert executor.describe()["shapes"] == []
    (record,) = caplog.records
    assert "0.onnx: warm-up with zeros (x [1]) failed, so the first request pays for it: " in record.getMessage()
    assert "idx=-5" in record.getMessage()


def test_a_warm_up_that_does_not_end_is_stopped_and_not_begun_again(
    load: Loader, partition: CpuPartition, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load(models.ENDLESS, RuntimeSettings(trial_limit=1))
    with closing(engine.bind(partition)) as executor, closing(engine.bind(partition)):
        assert executor.describe()["shapes"] == []
        executor.trim(0, idle=True)
        work = executor.enqueue([Tensor.of(np.zeros(1, np.float32))])
        work.cancel()
        with pytest.raises(Cancelled):
            work.wait()
    (record,) = caplog.records
    assert record.getMessage().endswith("the first request pays for it: it had not ended after 1 s, and was stopped")


def test_a_run_does_not_change_its_caller_s_cores(load: Loader, partition: CpuPartition) -> None:
    before = os.sched_getaffinity(0)
    with closing(load(models.identity()).bind(partition)) as executor:
        run(executor, np.zeros((1, 1), np.float32))
    assert os.sched_getaffinity(0) == before


def test_warm_up_shapes_are_run_before_bind_returns(
    tmp_path: Path, partition: CpuPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.save(tmp_path / "model.onnx", models.identity())
    ran: list[tuple[int, ...]] = []
    enqueue = OnnxExecutor.enqueue

    def remember(self: OnnxExecutor, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> OnnxWork:
        ran.extend(tensor.shape for tensor in inputs)
        return enqueue(self, inputs, room)

    monkeypatch.setattr(OnnxExecutor, "enqueue", remember)
    engine = load_engine(path, settings=RuntimeSettings(warm_up=(1, 4, (("x", (2, 5)),))))
    with closing(engine.bind(partition)) as executor:
        assert ran == [(1, 1), (4, 1), (2, 5)]
        assert executor.describe() == {"graphs": "none", "threads": 1, "shapes": [[[1, 1]], [[4, 1]], [[2, 5]]]}


def test_the_warm_up_has_the_sizes_that_requests_are_known_to_have(tmp_path: Path, partition: CpuPartition) -> None:
    path = models.save(tmp_path / "model.onnx", models.identity())
    known = RuntimeSettings(warm_up="usual", usual_shapes=(("x", (-1, 64)),))
    with closing(load_engine(path, settings=known).bind(partition)) as executor:
        assert executor.describe()["shapes"] == [[[1, 64]]]
    with closing(load_engine(path, settings=known.merge(warm_up=(8,))).bind(partition)) as executor:
        assert executor.describe()["shapes"] == [[[8, 64]]]


def test_a_warm_up_shape_that_the_model_does_not_take_is_refused(tmp_path: Path) -> None:
    path = models.save(tmp_path / "model.onnx", models.identity())
    with pytest.raises(ModelRefused, match=r"model\.onnx: warm_up: the model has no input 'z'; it has 'x'"):
        load_engine(path, settings=RuntimeSettings(warm_up=((("z", (2, 5)),),)))


# Memory


MUCH = 1 << 27
EXPAND = "expand (float[1] x, int64[1] n) => (float[m] y) { y = Expand(x, n) }"


def expand(executor: Executor, nbytes: int) -> None:
    """Have the model answer with so many bytes, and drop the answer."""
    run(executor, np.ones(1, np.float32), np.array([nbytes // 4]))


def test_trim_frees_the_memory_of_a_large_inference_when_nothing_runs(load: Loader, partition: CpuPartition) -> None:
    with closing(cast(OnnxExecutor, load(EXPAND).bind(partition))) as executor:
        before = anonymous()
        expand(executor, MUCH)
        assert anonymous() - before > MUCH // 2
        executor.trim(after=3600, idle=True)
        assert anonymous() - before > MUCH // 2
        executor.trim(after=0, idle=True)
        assert anonymous() - before < MUCH // 4
        runs = repr(executor)
        executor.trim(after=0, idle=True)
        assert repr(executor) == runs, "there was nothing more to give back"


def test_trim_frees_memory_with_the_next_inference(load: Loader, partition: CpuPartition) -> None:
    with closing(cast(OnnxExecutor, load(EXPAND).bind(partition))) as executor:
        before = anonymous()
        expand(executor, MUCH)
        executor.trim(after=0, idle=False)
        assert anonymous() - before > MUCH // 2
        expand(executor, 4)
        assert anonymous() - before < MUCH // 4


def test_trim_frees_the_memory_of_a_model_that_refuses_zeros(load: Loader, partition: CpuPartition) -> None:
    source = """fussy (float[1] x, int64[1] n) => (float[m] y) <float[1] one = {1}, int64[1] none = {0}>
        { is_none = Equal(n, none) at = Cast<to = 7>(is_none) first = Gather(one, at) z = Mul(x, first) y = Expand(z, n) }"""
    with closing(cast(OnnxExecutor, load(source).bind(partition))) as executor:
        before = anonymous()
        expand(executor, MUCH)
        assert anonymous() - before > MUCH // 2
        executor.trim(after=0, idle=True)
        assert anonymous() - before < MUCH // 4


def test_trim_frees_the_memory_of_known_shapes(load: Loader, partition: CpuPartition) -> None:
    """Tensors between the layers are freed, although outputs are in the room, whose binding is cached."""
    source = "deep (float[n] x) => (float[n] y) { a = Sigmoid(x) b = Exp(a) c = Mul(a, b) d = Sigmoid(c) y = Mul(a, d) }"
    memory, x = Memory(MUCH // 4), np.zeros(MUCH // 16, np.float32)
    with closing(cast(OnnxExecutor, load(source).bind(partition))) as executor:
        for _ in range(3):
            before = anonymous()
            (output,) = executor.enqueue([Tensor.of(x)], memory.room).wait()
            assert memory.holds(output)
            assert anonymous() - before > MUCH // 4
            executor.trim(after=0, idle=True)
            assert anonymous() - before < MUCH // 8


def test_trim_does_nothing_without_a_memory_arena(load: Loader, partition: CpuPartition) -> None:
    """The model refuses to run on zeros."""
    engine = load_engine(models.save(load.folder / "m.onnx", EXPAND), settings=RuntimeSettings(memory_arena=False))
    with closing(cast(OnnxExecutor, engine.bind(partition))) as executor:
        expand(executor, MUCH)
        for idle in (False, True):
            executor.trim(after=0, idle=idle)
            expand(executor, MUCH)
