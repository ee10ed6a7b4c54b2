"""Rows that depend on each other are found by running two alone and together."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import DATATYPES, RuntimeSettings, Signature, TensorSpec, load_engine
from engines.model_files.onnx_file import index_bounds
from engines.verification import rows
from engines.verification.rows import dependence, run_on
from engines.verification.rule import numbers
from engines.verification.samples import draw
from partitions.cpu import CpuPartition
from tests.models import ENDLESS, save

Array = np.ndarray[Any, np.dtype[Any]]

SEPARATE = "separate (float[n, 4] x) => (float[n, 4] y) { y = Softmax<axis = 1>(x) }"
CENTRED = "centred (float[n, 4] x) => (float[n, 4] y) { m = ReduceMean<axes = [0], keepdims = 1>(x) y = Sub(x, m) }"
ACROSS = "across (float[n, 4] x) => (float[n, 4] y) { y = Softmax<axis = 0>(x) }"
FIRST = "first (float[n, 4] x) => (float[1, 4] y) <int64[1] z = {0}> { y = Gather<axis = 0>(x, z) }"
SLIGHTLY = """slightly (float[n, 4] x) => (float[n, 4] y) <float[1] c = {0.01}>
{ m = ReduceSum<keepdims = 1>(x) s = Mul(m, c) y = Add(x, s) }"""
NEVER = "never (float[n, 4] x) => (float[n, 4] y) { z = Sub(x, x) y = Div(z, z) }"
NOISY = "noisy (float[n, 4] x) => (float[n, 4] y) { r = RandomNormalLike(x) y = Add(x, r) }"
LARGEST = """largest (float[n, 4] x) => (float[n, 4] y) <int64[1] last = {1}>
{ m = ReduceMax<keepdims = 1>(x) d = Sub(x, m) e = Exp(d) s = ReduceSum<keepdims = 1>(e, last) y = Div(e, s) }"""
"""A softmax of each row that subtracts the largest number of all rows: 0 / 0 beside a row that is much larger."""
QUANTISED = """quantised (float[n, 4] x) => (float[n, 4] y)
{ q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z) }"""
"""In steps of a size that the range of all rows decides: beside a row that is much larger, a row is 0."""
ROUNDED = """rounded (float[n, 4] x) => (float[n, 4] y) <float k = {127}>
{ a = Abs(x) m = ReduceMax<keepdims = 0>(a) s = Div(m, k) d = Div(x, s) r = Round(d) q = Cast<to = 6>(r) f = Cast<to = 1>(q)
  y = Mul(f, s) }"""
"""The same by hand, by integers that are no indices."""
LEAST = """least (float[n, 1] x) => (float[n, 1] y) <float none = {0}, float far = {9}>
{ m = ReduceMin<keepdims = 1>(x) d = Add(m, far) below = Min(d, none) y = Add(x, below) }"""
WIDEST = """widest (float[n, 4] x) => (float[n, k] y) <float zero = {0}, int64[1] start = {0}, int64[1] axis = {1}>
{ b = Greater(x, zero) i = Cast<to = 7>(b) c = ReduceSum<keepdims = 0>(i, axis) m = ReduceMax<keepdims = 1>(c)
  y = Slice(x, start, m, axis) }"""
"""As wide as the row with the most numbers above 0, as detections are that are padded to the most of a batch."""
CHANGING = """changing (float[n, 4] x) => (float[n, 4] y)
<float[4] scale = {1, 1, 1, 1}, float[4] bias = {0, 0, 0, 0}, float[4] mean = {0, 0, 0, 0}, float[4] variance = {1, 1, 1, 1}>
{ y, m, v = BatchNormalization<training_mode = 1>(x, scale, bias, mean, variance) }"""
"""As it is exported by mistake: by the mean of the batch, and ONNX Runtime changes the weights with each run."""
TABLE = """table (int64[n, 3] ids) => (float[n, 3, 2] y) <float[5, 2] t = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}>
{ y = Gather<axis = 0>(t, ids) }"""
INDEXED = """indexed (KIND[n, 3] a, float[n, 3, 2] b) => (float[n, 3, 2] y) <float[5, 2] t = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}>
{ i = Cast<to = 7>(a) g = Gather<axis = 0>(t, i) y = Add(g, b) }"""


def found(source: str, folder: Path, partition: CpuPartition, precision: str = "FP32") -> tuple[str, str]:
    path = save(folder / "model.onnx", source)
    engine = load_engine(path)
    executor = engine.bind(partition)
    shapes = [tuple(1 if axis == 0 else size for axis, size in enumerate(spec.shape)) for spec in engine.signature.inputs]
    bounds = index_bounds(path.read_bytes())
    return dependence(lambda inputs: run_on(executor, inputs), engine.signature, shapes, precision, bounds)


@pytest.mark.parametrize("source", [SEPARATE, TABLE])
def test_rows_that_are_separate_are_found_to_be(source: str, tmp_path: Path, partition: CpuPartition) -> None:
    assert found(source, tmp_path, partition) == ("", "")


@pytest.mark.parametrize("source", [CENTRED, ACROSS, SLIGHTLY])
def test_rows_that_depend_on_each_other_are_found_with_the_output_and_its_error(
    source: str, tmp_path: Path, partition: CpuPartition
) -> None:
    depends, unknown = found(source, tmp_path, partition)
    assert depends.startswith("output 'y' of a row beside another is off by ")
    assert not unknown


@pytest.mark.parametrize(("source", "precision"), [(LARGEST, "FP32"), (QUANTISED, "INT8"), (ROUNDED, "INT8"), (LEAST, "FP32")])
def test_rows_that_depend_on_those_that_are_much_larger_are_found(
    source: str, precision: str, tmp_path: Path, partition: CpuPartition
) -> None:
    depends, unknown = found(source, tmp_path, partition, precision)
    assert depends.startswith("output 'y' of a row beside one 1000 times as large is off by ")
    assert not unknown


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "double"])
def test_floats_of_every_kind_are_enlarged(kind: str, tmp_path: Path, partition: CpuPartition) -> None:
    cast = LARGEST.replace("float[n, 4] x", f"{kind}[n, 4] a").replace("{ m =", "{ x = Cast<to = 1>(a) m =")
    depends, unknown = found(cast, tmp_path, partition)
    assert depends.startswith("output 'y' of a row beside one 1000 times as large is off by ")
    assert not unknown


@pytest.mark.parametrize("source", [WIDEST, WIDEST.replace("Greater", "Less")])
def test_an_output_as_wide_as_its_widest_row_is_found(source: str, tmp_path: Path, partition: CpuPartition) -> None:
    """Whichever of the two rows is the wider one."""
    assert found(source, tmp_path, partition) == ("the shape of a row's answer depends on the rows beside it", "")


def of_answers(*answers: Sequence[Array]) -> str:
    """What is found where a library that rounds as TF32 does answers this to a row, another, both, and beside large ones."""
    outputs = [TensorSpec(f"y{number}", DATATYPES[kind], ("n", 64)) for number, kind in enumerate(("FP32", "INT64"))]
    signature = Signature((TensorSpec("x", DATATYPES["FP32"], ("n", 4)),), tuple(outputs[: len(answers[0])]))
    given = iter(answers)
    return dependence(lambda _: list(next(given)), signature, [(1, 4)], "TF32", {})[0]


def rows_of(*numbers: float) -> Array:
    return np.repeat(np.float32([numbers]).T, 64, axis=1)


def test_a_row_that_is_small_by_chance_may_be_off_by_the_rounding_of_a_usual_one() -> None:
    together = [rows_of(0.0015, 1.0)]
    assert of_answers([rows_of(0.001)], [rows_of(1.0)], together, together, together) == ""


def test_a_wrong_output_is_found_where_another_may_be_off_by_more() -> None:
    labels = np.zeros((2, 64), np.int64)
    near_ties = labels.copy()
    near_ties[0, :16] = 1
    alone, right = [rows_of(1.0), labels[:1]], rows_of(1.0, 1.0)
    found = of_answers(alone, alone, [right, labels], [right, near_ties], [rows_of(1.1, 1.0), labels])
    assert found.startswith("output 'y0' of a row beside one 1000 times as large is off by 0.1 ")


def test_an_output_without_rows_is_found(tmp_path: Path, partition: CpuPartition) -> None:
    assert found(FIRST, tmp_path, partition) == ("output 'y' of two rows has not two", "")


def test_answers_that_are_never_finite_decide_nothing(tmp_path: Path, partition: CpuPartition) -> None:
    assert found(NEVER, tmp_path, partition) == ("", "its answers to random inputs are not finite, or all 0")


@pytest.mark.parametrize("source", [NOISY, CHANGING])
def test_rows_are_not_seen_to_be_separate_by_answers_that_differ_from_run_to_run(
    source: str, tmp_path: Path, partition: CpuPartition
) -> None:
    assert found(source, tmp_path, partition) == ("answers to the same inputs differ from run to run", "")


def test_a_model_that_takes_too_long_is_run_once(
    tmp_path: Path, partition: CpuPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LONGEST", 0.0)
    depends, unknown = found(SEPARATE, tmp_path, partition)
    assert not depends
    assert unknown.startswith("one run took ")


@pytest.mark.parametrize(
    ("source", "depends", "unknown"), [(SEPARATE, "", "one run took "), (LARGEST, "output 'y' of a row", "")]
)
def test_no_run_follows_one_beside_a_large_row_that_took_too_long(
    source: str, depends: str, unknown: str, tmp_path: Path, partition: CpuPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that one has shown counts."""
    engine = load_engine(save(tmp_path / "model.onnx", source))
    executor, runs = engine.bind(partition), 0

    def run(inputs: Sequence[Array]) -> list[Array]:
        nonlocal runs
        runs += 1
        if np.abs(inputs[0]).max() > 100:
            monkeypatch.setattr(rows, "LONGEST", 0.0)
        return run_on(executor, inputs)

    found = dependence(run, engine.signature, [(1, 4)], "FP32", {})
    assert runs == 4
    assert [text.startswith(start) for text, start in zip(found, (depends, unknown), strict=True)] == [True, True]
    assert [bool(text) for text in found] == [bool(depends), bool(unknown)]


def test_a_model_that_refuses_the_first_inputs_is_tried_with_others(tmp_path: Path, partition: CpuPartition) -> None:
    few = TABLE.replace("float[5, 2] t = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}", "float[2, 2] t = {1, 2, 3, 4}")
    engine = load_engine(save(tmp_path / "model.onnx", few))
    executor = engine.bind(partition)
    assert dependence(lambda inputs: run_on(executor, inputs), engine.signature, [(1, 3)], "FP32", {"ids": 1000}) == ("", "")


def test_drawn_integers_are_rows_of_the_table_and_masks_are_ones(tmp_path: Path) -> None:
    ids = load_engine(save(tmp_path / "model.onnx", TABLE)).signature.inputs
    assert draw(ids, [(2, 300)], {"ids": 5})[0].max() == 4
    assert draw(ids, [(2, 300)], {})[0].max() == 1
    assert np.array_equal(draw(ids, [(2, 30)], {}, 4)[0], draw(ids, [(2, 30)], {}, 4)[0])
    source = "masked (int64[n, 3] mask) => (int64[n, 3] y) { y = Neg(mask) }"
    assert draw(load_engine(save(tmp_path / "m.onnx", source)).signature.inputs, [(2, 3)], {})[0].min() == 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("kinds (int64[n, 3] x) => (string[n, 3] y) { y = Cast<to = 8>(x) }", ""),
        ("kinds (int64[n, 3] x) => (string[n, 3] y) { m = CumSum(x, z) y = Cast<to = 8>(m) }", "output 'y' of a row beside"),
    ],
)
def test_outputs_of_text_are_compared_too(source: str, expected: str, tmp_path: Path, partition: CpuPartition) -> None:
    depends, unknown = found(source.replace("{ m =", "<int32 z = {0}> { m ="), tmp_path, partition)
    assert depends.startswith(expected)
    assert bool(depends) == bool(expected)
    assert not unknown


def test_inputs_of_text_decide_nothing(tmp_path: Path, partition: CpuPartition) -> None:
    depends, unknown = found("texts (string[n, 2] x) => (string[n, 2] y) { y = Identity(x) }", tmp_path, partition)
    assert not depends
    assert "BYTES" in unknown


@pytest.mark.parametrize("kind", ["float", "float16", "double", "bfloat16"])
def test_floats_that_become_indices_stay_within_their_table_and_others_are_enlarged(
    kind: str, tmp_path: Path, partition: CpuPartition
) -> None:
    path = save(tmp_path / "model.onnx", INDEXED.replace("KIND", kind))
    engine = load_engine(path)
    executor = engine.bind(partition)
    seen: list[list[Array]] = []

    def run(inputs: Sequence[Array]) -> list[Array]:
        seen.append([numbers(spec.datatype, each) for spec, each in zip(engine.signature.inputs, inputs, strict=True)])
        return run_on(executor, inputs)

    assert dependence(run, engine.signature, [(1, 3), (1, 3, 2)], "FP32", index_bounds(path.read_bytes())) == ("", "")
    indices, others = (np.concatenate([np.abs(each).ravel() for each in arrays]) for arrays in zip(*seen, strict=True))
    assert 1 < indices.max() < 5
    assert others.max() > 100
    assert len(seen) == 5


@pytest.mark.parametrize("kind", ["FP16", "FP32", "FP64", "BF16"])
@pytest.mark.parametrize("bound", [1, 5, 255, 30522])
def test_no_drawn_float_is_rounded_up_to_its_bound(kind: str, bound: int) -> None:
    spec = TensorSpec("x", DATATYPES[kind], ("n",))
    (drawn,) = draw([spec], [(1 << 20,)], {"x": bound})
    assert 0 <= numbers(spec.datatype, drawn).min() <= numbers(spec.datatype, drawn).max() < bound


def test_a_run_that_does_not_end_is_stopped(tmp_path: Path, partition: CpuPartition) -> None:
    spinning = ENDLESS.replace("float[n]", "float[n, 4]")
    engine = load_engine(save(tmp_path / "model.onnx", spinning), settings=RuntimeSettings(trial_limit=1))
    executor = engine.bind(partition)
    found = dependence(partial(run_on, executor, seconds=0.1), engine.signature, [(1, 4)], "float", {})
    assert found == ("", "it had not ended after 0.1 s, and was stopped")
    executor.close()
