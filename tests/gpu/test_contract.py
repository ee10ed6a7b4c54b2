"""The contract of partitions and engines on a real GPU, where a kernel that waits for the host stalls a stream."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from engines import Engine, Executor, ModelRefused, Tensor, TensorMismatch, load_engine
from partitions import Partition
from tests import models
from tests.contract import ONE, OTHER, Stall
from tests.engines import test_contract as simulated
from tests.engines.tensors import Memory, run

from .networks import Network, plan

pytestmark = pytest.mark.gpu
GIVE_UP = 5_000_000_000
"""Nanoseconds after which a stalled stream continues without `release`."""

HOLD = r"""
extern "C" __global__ void hold(volatile unsigned *gate, unsigned long long most) {
    unsigned long long began, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
    gate[1] = 1;
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (!gate[0] && now - began < most);
    gate[2] = !gate[0];
    __threadfence_system();
}
"""
PAGE = 4096
SPARE = 4
"""Pieces of memory that one test may take."""
RELEASED, RUNNING, GAVE_UP = range(3)


class GpuStall:
    """An inference behind a kernel that runs until it is released."""

    def __init__(self, executor: Executor, partition: Any, kernel: Any, gate: Memory, address: int) -> None:
        from cuda.core import LaunchConfig, launch

        self._executor = executor
        self._gate = gate.bytes.view(np.uint32)
        self._gate[:3] = 0
        launch(partition.stream, LaunchConfig(grid=1, block=1), kernel, address, np.uint64(GIVE_UP))
        self.work = executor.enqueue([Tensor.of(ONE)])

    def release(self) -> None:
        self._gate[RELEASED] = 1

    def wait_until_running(self, thread: Thread) -> None:
        while not self._gate[RUNNING]:
            thread.join(0.001)

    def gave_up(self) -> bool:
        return bool(self._gate[GAVE_UP])

    def close(self) -> None:
        self.release()
        self.work.wait()
        self._executor.close()


class GpuSubject:
    """What `tests.engines.simulated.Bench` is to the tests over the simulation."""

    def __init__(self, device: Any, identity: Path, made: ExitStack) -> None:
        from cuda.core import Program, ProgramOptions

        self.device = device
        self.bench = self
        self._made = made
        arch = device.make_current().arch
        self._kernel = Program(HOLD, "c++", ProgramOptions(arch=f"sm_{arch}")).compile("cubin").get_kernel("hold")
        self.identity = load_engine(identity, device)
        self._spare = [self._pinned() for _ in range(SPARE)]

    @property
    def surprising(self) -> Engine:
        """Refused as soon as it is built, or when it is bound."""
        folder = Path(self._made.enter_context(_folder()))
        onnx = models.save(folder / "model.onnx", models.DISTINCT).read_bytes()
        return load_engine(plan(folder, Network(onnx, {"x": ((1,), (5,), (9,))}, ())), self.device)

    @property
    def fussy(self) -> Engine:
        raise NotImplementedError("a plan does not raise")

    @property
    def passing(self) -> Engine:
        folder = Path(self._made.enter_context(_folder()))
        onnx = models.save(folder / "model.onnx", models.COPYING).read_bytes()
        return load_engine(plan(folder, Network(onnx, {"x": ((1, 1), ONE.shape, (8, 8))}, ())), self.device)

    def memory(self, nbytes: int) -> Memory:
        """Pinned, before anything was stalled: pinning may wait for the GPU."""
        assert nbytes <= PAGE
        return self._spare.pop()[0]

    def stall(self, partition: Partition) -> GpuStall:
        gate, address = self._spare.pop()
        return GpuStall(self.identity.bind(partition), partition, self._kernel, gate, address)

    def _pinned(self) -> tuple[Memory, int]:
        memory = Memory(PAGE)
        return memory, self._made.enter_context(closing(self.device.pin(*memory.room[:2]))).device_address


def _folder() -> Any:
    from tempfile import TemporaryDirectory

    return TemporaryDirectory(prefix="greenlane-contract-")


@pytest.fixture(scope="module")
def identity(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identity")
    onnx = models.save(folder / "model.onnx", models.identity()).read_bytes()
    return plan(folder, Network(onnx, {"x": ((1, 1), ONE.shape, (8, 8))}, ()))


class TestGpu(simulated.TestCuda):
    """With the differences that the simulation has, too."""

    @pytest.fixture
    def subject(self, device: Any, identity: Path) -> Iterator[GpuSubject]:
        with ExitStack() as made:
            yield GpuSubject(device, identity, made)

    def test_outputs_of_unknown_size_own_memory_that_later_works_leave_alone(self, subject: Any, partition: Partition) -> None:
        with pytest.raises(ModelRefused):
            subject.surprising.bind(partition)

    def test_an_error_of_the_model_fails_only_its_work(self, subject: Any, partition: Partition) -> None:
        """No shape that the signature takes fails here, and others are refused."""
        with closing(subject.identity.bind(partition)) as executor:
            for _ in range(2):
                with pytest.raises(TensorMismatch, match="is 9; the engine was built for 1 to 8"):
                    executor.enqueue([Tensor.of(np.zeros((9, 9), np.float32))])
                assert run(executor, ONE)[0].tolist() == ONE.tolist()
                assert run(executor, OTHER)[0].tolist() == OTHER.tolist()


def test_a_stall_holds_the_stream_until_it_is_released(device: Any, identity: Path) -> None:
    """It holds the stream until it is released, and does not time out."""
    with ExitStack() as made:
        subject = GpuSubject(device, identity, made)
        partition = made.enter_context(closing(device.carve([0])))
        stall: Stall = made.enter_context(closing(subject.stall(partition)))
        while not stall._gate[RUNNING]:
            pass
        assert "in flight" in repr(stall.work)
        stall.release()
        stall.work.wait()
        assert not stall.gave_up()
