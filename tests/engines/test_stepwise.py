"""Answers in parts: the contract over a fake, and over Python models that run engines on cores and on a simulated GPU."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import DATATYPES, Engine, ExecutionFailed, Signature, StepwiseEngine, Tensor, TensorSpec, load_engine, parts
from engines.stepwise import Run, Tensors
from partitions import Device, Partition
from partitions.cpu import open_cpu
from tests import models
from tests.contract import StreamingContract, counted, number, start
from tests.engines.simulated import Bench, opened
from tests.engines.tensors import array
from tests.fakes import FakeDevice, FakeEngine

FP32 = DATATYPES["FP32"]
COUNTING = Signature((TensorSpec("x", FP32, (2,)),), (TensorSpec("y", FP32, (1,)),))
DECREMENT = "decrement (float[n] x) => (float[n] y) <float one = {1}> { y = Sub(x, one) }"
"""What the counting model runs for each part."""


def counting(inputs: Tensors, run: Run) -> Iterator[Tensors]:
    """See `StreamingContract`."""
    first, raising = array(inputs["x"]).tolist()
    state = Tensor.of(np.array([first], np.float32))
    while (left := float(array(state)[0])) >= 1:
        if left == raising:
            raise ValueError(f"{left:g} was to raise")
        yield {"y": state}
        state = run("decrement", {"x": state})["y"]


def count_parts(inputs: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The same for a FakeEngine."""
    first, raising = np.frombuffer(inputs[0], np.float32).tolist()
    for left in range(int(first), 0, -1):
        if left == raising:
            raise ValueError(f"{left} was to raise")
        yield [np.float32(left).tobytes()]


class Parts(StreamingContract):
    @pytest.fixture
    def partition(self, device: Device) -> Iterator[Partition]:
        with closing(device.carve([0])) as partition:
            yield partition

    @pytest.fixture
    def elsewhere(self, device: Device) -> Iterator[Partition]:
        with closing(device.carve([len(device.granules) - 1])) as partition:
            yield partition


class TestFake(Parts):
    @pytest.fixture
    def device(self) -> Device:
        return FakeDevice()

    @pytest.fixture
    def counting(self) -> Engine:
        return FakeEngine(COUNTING, compute_parts=count_parts)


class TestCpu(Parts):
    @pytest.fixture
    def device(self) -> Device:
        return open_cpu()

    @pytest.fixture
    def counting(self, tmp_path: Path) -> Engine:
        step = load_engine(models.save(tmp_path / "decrement.onnx", DECREMENT))
        return StepwiseEngine(counting, COUNTING, {"decrement": step})


class TestCuda(Parts):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        with opened(tmp_path) as bench:
            yield bench

    @pytest.fixture(autouse=True)
    def pinned(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.contract.Memory", bench.memory)

    @pytest.fixture
    def device(self, bench: Bench) -> Any:
        return bench.device

    @pytest.fixture
    def counting(self, bench: Bench) -> Engine:
        step = bench.load(bench.plan(DECREMENT, {"x": [(1,), (1,), (8,)]}))
        return StepwiseEngine(counting, COUNTING, {"decrement": step})


@pytest.fixture
def partition() -> Partition:
    return FakeDevice().carve([0])


def bound(model: Any, partition: Partition, **engines: Engine) -> Any:
    return StepwiseEngine(model, COUNTING, engines).bind(partition)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({}, "part 1 of the model's answer has no output 'y'"),
        (
            {"y": Tensor.of(np.zeros(2, np.float32))._replace(shape=(3,))},
            r"output 'y' has 8 bytes for shape \[3\] of FP32; expected 12",
        ),
        (None, "part 1 of the model's answer is a NoneType; expected its outputs by their names"),
        ({"y": 1.0}, "output 'y' is a float; expected an engines.Tensor"),
    ],
    ids=["missing", "wrong size", "nothing", "no tensor"],
)
def test_a_part_that_does_not_match_the_signature_is_refused(partition: Partition, part: Any, why: str) -> None:
    executor = bound(lambda inputs, run: iter([part]), partition)
    with pytest.raises(ExecutionFailed, match=why):
        executor.enqueue([start(1)]).wait()


def test_an_engine_that_is_not_there_and_an_input_that_is_missing_are_named(partition: Partition) -> None:
    def asking(inputs: Tensors, run: Run) -> Iterator[Tensors]:
        with pytest.raises(ExecutionFailed, match=r"there is no engine 'other'; expected one of \['step'\]"):
            run("other", {})
        yield run("step", {"z": inputs["x"]})

    executor = bound(asking, partition, step=FakeEngine(COUNTING))
    with pytest.raises(ExecutionFailed, match=r"engine 'step' needs an input 'x'; given are \['z'\]"):
        executor.enqueue([start(1)]).wait()


def test_an_engine_run_between_two_parts_is_refused(partition: Partition) -> None:
    kept: list[Run] = []

    def keeping(inputs: Tensors, run: Run) -> Iterator[Tensors]:
        kept.append(run)
        yield {"y": Tensor.of(np.ones(1, np.float32))}

    executor = bound(keeping, partition)
    executor.enqueue([start(1)]).wait()
    with pytest.raises(ExecutionFailed, match="engine 'step' was run between two parts"):
        kept[0]("step", {})


def test_a_model_whose_answer_is_not_gone_on_with_is_closed(partition: Partition) -> None:
    closed = []

    def closing_up(inputs: Tensors, run: Run) -> Iterator[Tensors]:
        try:
            for _ in range(3):
                yield {"y": Tensor.of(np.ones(1, np.float32))}
        finally:
            closed.append(True)

    executor = bound(closing_up, partition)
    part = executor.enqueue([start(1)])
    assert number(part) == 1
    del part
    assert closed == [True]


def test_closing_and_describing(tmp_path: Path) -> None:
    with closing(open_cpu()) as device, closing(device.carve([0])) as partition:
        step = load_engine(models.save(tmp_path / "decrement.onnx", DECREMENT))
        executor = bound(counting, partition, decrement=step)
        assert counted(executor, 2) == [2, 1]
        assert executor.describe()["why"] == "a Python model runs it step by step"
        assert "decrement" in repr(executor.engine)
        executor.close()
        executor.close()
        with pytest.raises(ExecutionFailed, match="takes nothing more"):
            next(parts(executor, [start(1)]))
