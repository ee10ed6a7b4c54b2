import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from engines import (
    DATATYPES,
    Cancelled,
    Engine,
    ExecutionFailed,
    Executor,
    Signature,
    Tensor,
    TensorSpec,
    load_engine,
)
from partitions import Partition
from partitions.cpu import open_cpu
from tests import models
from tests.contract import ONE, OTHER, Contract, Stall, in_a_thread
from tests.engines.simulated import Bench, opened
from tests.engines.tensors import array, run
from tests.fakes import FakeDevice, FakeEngine, FakeExecutor, Gate, Script
from tests.simulation import Gpu
from tests.simulation.tensorrt import library

FP32 = DATATYPES["FP32"]
ENOUGH_TURNS = 3_000_000
"""Seconds that a stalled inference waits for its release before it ends by itself."""


class FakeStall:
    def __init__(self, executor: FakeExecutor, gate: Gate) -> None:
        self.work = executor.enqueue([Tensor.of(np.zeros((1, 1), np.float32))])
        self._executor = executor
        self._gate = gate

    def release(self) -> None:
        self._gate.open()

    def wait_until_running(self, thread: Thread) -> None:
        self._gate.wait_for_arrival()

    def gave_up(self) -> bool:
        return "failed" in repr(self.work)

    def close(self) -> None:
        _end(self)
        self._executor.close()


class FakeSubject:
    def __init__(self) -> None:
        self.device = FakeDevice((8, 8, 16))
        self.identity = FakeEngine(_signature(("rows", "columns"), ("rows", "columns")))
        self.surprising = FakeEngine(_signature(("n",), ("",)))
        self.fussy = FakeEngine(_signature(("n",), ("n",)), compute=_only_zeros)
        same = tuple(TensorSpec(name, FP32, ("rows", "columns")) for name in "xy")
        self.passing = FakeEngine(Signature(same[:1], same), compute=_and_negative)

    def stall(self, partition: Partition) -> FakeStall:
        script = Script()
        executor = FakeEngine(self.identity.signature, script).bind(partition)
        return FakeStall(executor, script.hold("run"))


class CpuStall:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._released = np.zeros(1, np.int64)
        inputs = [Tensor.of(self._released), Tensor.of(np.array(ENOUGH_TURNS))]
        self.work = executor.enqueue(inputs)

    def release(self) -> None:
        self._released[0] = 1  # The running model checks this in every iteration.

    def wait_until_running(self, thread: Thread) -> None:
        assert thread.ident
        clock = time.pthread_getcpuclockid(thread.ident)
        while time.clock_gettime(clock) < 0.02:  # By then the worker has passed the lines before the model.
            thread.join(0.001)

    def gave_up(self) -> bool:
        return int(array(self.work.wait()[0], np.int64)) == ENOUGH_TURNS

    def close(self) -> None:
        _end(self)
        self._executor.close()


class CpuSubject:
    def __init__(self, folder: Path) -> None:
        self.device = open_cpu()
        self.identity = _load(folder, models.identity())
        self.surprising = _load(folder, models.DISTINCT)
        self.fussy = _load(folder, models.FUSSY)
        self.passing = _load(folder, models.PASSING)
        self._latch = _load(folder, models.LATCH)

    def stall(self, partition: Partition) -> CpuStall:
        return CpuStall(self._latch.bind(partition))


class CudaStall:
    def __init__(self, executor: Executor, partition: Any) -> None:
        self._executor = executor
        self._gate = Script().hold("run")
        partition.stream.simulated.pending.append(lambda: self._gate.hold(lambda: False))
        self.work = executor.enqueue([Tensor.of(ONE)])

    def release(self) -> None:
        self._gate.open()

    def wait_until_running(self, thread: Thread) -> None:
        self._gate.wait_for_arrival()

    def gave_up(self) -> bool:
        return "shut" in repr(self._gate)

    def close(self) -> None:
        _end(self)
        self._executor.close()


class CudaSubject:
    """The contract on a simulated GPU. TestCuda overrides what a GPU refuses at once or cannot do."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.device = bench.device
        self.identity = bench.load(bench.plan(models.identity(), {"x": [(0, 1), ONE.shape, (8, 8)]}))

    @property
    def surprising(self) -> Engine:
        return self.bench.load(self.bench.plan(models.DISTINCT, {"x": [(1,), (5,), (9,)]}))

    @property
    def fussy(self) -> Engine:
        raise NotImplementedError("a plan does not raise")

    @property
    def passing(self) -> Engine:
        return self.bench.load(self.bench.plan(models.COPYING, {"x": [(0, 1), ONE.shape, (8, 8)]}))

    def stall(self, partition: Partition) -> CudaStall:
        return CudaStall(self.identity.bind(partition), partition)


class TestFake(Contract):
    @pytest.fixture
    def subject(self) -> FakeSubject:
        return FakeSubject()


class TestCpu(Contract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> CpuSubject:
        return CpuSubject(tmp_path)


class TestCuda(Contract):
    """Where a GPU differs: rooms have to be pinned, nothing is cancelled, and a model does not raise."""

    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[CudaSubject]:
        with opened(tmp_path) as bench:
            yield CudaSubject(bench)

    @pytest.fixture(autouse=True)
    def pinned(self, subject: CudaSubject, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.contract.Memory", subject.bench.memory)

    def test_an_executor_is_closed_while_another_one_s_work_is_in_flight(
        self, subject: CudaSubject, partition: Partition, executor: Executor
    ) -> None:
        with closing(subject.identity.bind(partition)) as other:
            works = [other.enqueue([Tensor.of(data)]) for data in (ONE, OTHER)]
            executor.close()
            assert [array(work.wait()[0]).tolist() for work in works] == [ONE.tolist(), OTHER.tolist()]

    def test_a_work_cancelled_before_it_began_ends_as_cancelled(self, executor: Executor, stall: CudaStall) -> None:
        """A GPU cannot cancel: the inference ends as usual."""
        cancelled, later = (executor.enqueue([Tensor.of(data)]) for data in (ONE, OTHER))
        cancelled.cancel()
        stall.release()
        assert [array(work.wait()[0]).tolist() for work in (cancelled, later)] == [ONE.tolist(), OTHER.tolist()]

    def test_a_work_cancelled_while_it_runs_ends_as_cancelled(
        self, partition: Partition, executor: Executor, stall: CudaStall
    ) -> None:
        """A GPU cannot cancel: the inference ends once it is released."""
        thread, ended = in_a_thread(stall.work.wait)
        stall.wait_until_running(thread)
        stall.work.cancel()
        assert not ended.done()
        stall.release()
        assert array(ended.result(30)[0]).tolist() == ONE.tolist()

    def test_an_error_of_the_model_fails_only_its_work(self, subject: CudaSubject, partition: Partition) -> None:
        """A run that the library refuses fails."""
        subject.bench.gpu.capturable = False
        with closing(subject.identity.bind(partition)) as executor:
            for _ in range(2):
                subject.bench.gpu.fail("IExecutionContext.execute_async_v3")
                with pytest.raises(ExecutionFailed, match=r"\w"):
                    executor.enqueue([Tensor.of(ONE)])
                assert run(executor, ONE)[0].tolist() == ONE.tolist()


class TestFullTensorRT(TestCuda):
    """The same with TensorRT, which has neither graphs nor a cache of kernels of its own, and from 11.4 on knows partitions."""

    @pytest.fixture(params=["10.11", "11.4"])
    def subject(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CudaSubject]:
        gpu = Gpu()
        with opened(tmp_path, library(gpu, "tensorrt", request.param), gpu) as bench:
            yield CudaSubject(bench)


def _signature(takes: tuple[str, ...], gives: tuple[str, ...]) -> Signature:
    return Signature((TensorSpec("x", FP32, takes),), (TensorSpec("y", FP32, gives),))


def _and_negative(inputs: Sequence[bytes]) -> Sequence[bytes]:
    return [inputs[0], (-np.frombuffer(inputs[0], np.float32)).tobytes()]


def _only_zeros(inputs: Sequence[bytes]) -> Sequence[bytes]:
    if any(inputs[0]):
        raise ValueError("there is something other than zero in x")
    return inputs


def _load(folder: Path, source: str) -> Engine:
    return load_engine(models.save(folder / f"{source.split()[0]}.onnx", source))


def _end(stall: Stall) -> None:
    stall.release()
    try:
        stall.work.wait()
    except (Cancelled, ExecutionFailed):
        return
