import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from engines import DATATYPES, Cancelled, Engine, ExecutionFailed, Executor, Signature, Tensor, TensorSpec, load_engine
from partitions import Partition
from partitions.cpu import open_cpu
from tests import models
from tests.contract import Contract, Stall
from tests.engines.tensors import array
from tests.fakes import FakeDevice, FakeEngine, FakeExecutor, Gate, Script

FP32 = DATATYPES["FP32"]
ENOUGH_TURNS = 3_000_000
"""Some seconds: what ends then was not released."""


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
        self._released[0] = 1  # Under the running model: it looks again at every turn.

    def wait_until_running(self, thread: Thread) -> None:
        assert thread.ident
        clock = time.pthread_getcpuclockid(thread.ident)
        while time.clock_gettime(clock) < 0.02:  # By then the few lines before the model are over.
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
        self._latch = _load(folder, models.LATCH)

    def stall(self, partition: Partition) -> CpuStall:
        return CpuStall(self._latch.bind(partition))


class TestFake(Contract):
    @pytest.fixture
    def subject(self) -> FakeSubject:
        return FakeSubject()


class TestCpu(Contract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> CpuSubject:
        return CpuSubject(tmp_path)


def _signature(takes: tuple[str, ...], gives: tuple[str, ...]) -> Signature:
    return Signature((TensorSpec("x", FP32, takes),), (TensorSpec("y", FP32, gives),))


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
