"""A model that is run in a loop by its settings: what it gives, when it ends, and what it is refused for."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import Loop, ModelRefused, RuntimeSettings, Step, Tensor, chain, load_engine, parts
from partitions import Partition
from partitions.cpu import open_cpu
from tests import models
from tests.engines.tensors import array

COUNT = (
    "count (float[n] x, float[n] by) => (float[n] next, float[n] twice, bool[n] low) "
    "<float zero = {0}> { next = Sub(x, by) twice = Add(next, next) low = LessOrEqual(next, zero) }"
)
FEED = (("next", "x"),)


@pytest.fixture
def partition() -> Iterator[Partition]:
    with closing(open_cpu()) as device, closing(device.carve([0])) as partition:
        yield partition


def load(folder: Path, loop: Loop, text: str = COUNT) -> Any:
    return load_engine(models.save(folder / "count.onnx", text), settings=RuntimeSettings(loop=loop))


def run(engine: Any, partition: Partition, *inputs: float) -> list[list[list[float]]]:
    """Every part of an answer, each a list of outputs."""
    with closing(engine.bind(partition)) as executor:
        given = [Tensor.of(np.array([value], np.float32)) for value in inputs]
        return [[array(output).tolist() for output in part] for part in parts(executor, given)]


def test_outputs_become_inputs_until_the_last_step(tmp_path: Path, partition: Partition) -> None:
    engine = load(tmp_path, Loop(FEED, 3, outputs=("next", "twice")))
    assert run(engine, partition, 10, 2) == [[[8], [16]], [[6], [12]], [[4], [8]]]
    assert [spec.name for spec in engine.signature.outputs] == ["next", "twice"]
    assert engine.signature.in_parts
    assert engine.platform == "onnxruntime_onnx"
    engine.close()


def test_the_step_in_which_until_is_not_zero_is_the_last(tmp_path: Path, partition: Partition) -> None:
    engine = load(tmp_path, Loop(FEED, 100, "low", ("next",)))
    assert run(engine, partition, 5, 2) == [[[3]], [[1]], [[-1]]]


def test_without_names_a_part_has_all_outputs(tmp_path: Path) -> None:
    engine = load(tmp_path, Loop(FEED, 1))
    assert [spec.name for spec in engine.signature.outputs] == ["next", "twice", "low"]


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        (Loop((("nxt", "x"),), 1), "loop: the model has no output 'nxt'; did you mean 'next'? there are next, twice, low"),
        (Loop((("next", "z"),), 1), "loop: the model has no input 'z'; there are x, by"),
        (Loop((("low", "x"),), 1), r"loop: output 'low', BOOL \[-1\], cannot be input 'x', which is FP32 \[-1\]"),
        (Loop(FEED, 1, "done"), "loop: the model has no output 'done'"),
        (Loop(FEED, 1, None, ("all",)), "loop: the model has no output 'all'"),
    ],
    ids=["output", "input", "type", "until", "outputs"],
)
def test_a_loop_that_does_not_fit_its_model_is_refused(tmp_path: Path, loop: Loop, why: str) -> None:
    with pytest.raises(ModelRefused, match=why.replace("?", r"\?")):
        load(tmp_path, loop)


def test_until_has_to_be_numbers(tmp_path: Path) -> None:
    text = "same (string[n] x) => (string[n] y) { y = Identity(x) }"
    with pytest.raises(ModelRefused, match="loop: until is output 'y', which is BYTES; expected numbers or BOOL"):
        load(tmp_path, Loop((("y", "x"),), 2, "y"), text)


def test_a_loop_cannot_be_a_step_of_a_chain(tmp_path: Path) -> None:
    step = Step(load(tmp_path, Loop(FEED, 1)), {"x": "a", "by": "b"}, {"next": "c"}, label="first")
    with pytest.raises(ModelRefused, match="first answers in parts, so it cannot be a step of a chain"):
        chain([step], ["c"])


def test_settings_take_a_loop_only() -> None:
    with pytest.raises(ValueError, match="loop is 3; expected a Loop, or None"):
        RuntimeSettings(loop=3)  # type: ignore[arg-type]
