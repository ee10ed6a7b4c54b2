"""F08: the context that is current in a thread belongs to the caller. Every call leaves it as it was."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import ExecutionFailed, ModelRefused
from engines.tensorrt.api import find_tensorrt
from engines.tensorrt.building.builder import BuildOptions, build
from partitions import PartitionError
from tests.contract import in_a_thread
from tests.engines.simulated import Bench, affine, opened, rows
from tests.engines.small import ADD, model
from tests.engines.tensors import Memory, run
from tests.simulation import Gpu
from tests.simulation.building import building
from tests.simulation.tensorrt import library

ELSEWHERE = 0x77
"""Some context that is not the device's primary one."""

CALLS = [
    "open", "describe device", "carve", "locate", "pin", "unpin", "load", "bind", "describe", "enqueue", "enqueue new shapes",
    "prepare", "rebind", "close executor", "close engine", "close partition", "close device",
]  # fmt: skip
"""The calls, in an order that works."""


class Caller:
    """Makes each of the calls with the context current that it was given."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._memory = Memory(4096)
        self._device: Any = None
        self._made: dict[str, Any] = {}

    def call(self, name: str) -> object:
        step: Callable[[], object] = getattr(self, name.replace(" ", "_"))
        return step()

    def open(self) -> None:
        self._device = self._bench.cuda.open_cuda(Gpu.index)

    def describe_device(self) -> str:
        return str(self._device.describe())

    def carve(self) -> None:
        self._made["partition"], self._made["other"] = self._device.carve([0]), self._device.carve([1])

    def locate(self) -> Any:
        return self._made["partition"].locate()

    def pin(self) -> None:
        self._made["pin"] = self._device.pin(*self._memory.room[:2])

    def unpin(self) -> None:
        self._made["pin"].close()

    def load(self) -> None:
        self._made["engine"] = self._bench.load(self._bench.plan())

    def bind(self) -> None:
        self._made["executor"] = self._made["engine"].bind(self._made["partition"])

    def describe(self) -> Any:
        return self._made["executor"].describe()

    def enqueue(self) -> None:
        assert run(self._made["executor"], rows(2))[0].tolist() == affine(rows(2)).tolist()

    def enqueue_new_shapes(self) -> None:
        assert run(self._made["executor"], rows(7))[0].tolist() == affine(rows(7)).tolist()

    def prepare(self) -> None:
        self._made["executor"].preparing([(6, 3)]).result(30)

    def rebind(self) -> None:
        self._made["moved"] = self._made["executor"].rebind(self._made["other"])

    def close_executor(self) -> None:
        self._made["executor"].close()
        self._made["moved"].close()

    def close_engine(self) -> None:
        self._made["engine"].close()

    def close_partition(self) -> None:
        self._made["partition"].close()
        self._made["other"].close()

    def close_device(self) -> None:
        self._device.close()


@pytest.mark.parametrize("before", [ELSEWHERE, 0], ids=["another context", "none"])
def test_f08_every_call_restores_the_current_context(bench: Bench, before: int) -> None:
    def calls() -> list[str]:
        caller = Caller(bench)
        left: list[str] = []
        for name in CALLS:
            if name == "enqueue" and not before:
                bench.partition.attach()  # Work is enqueued by threads that are the partition's, which keep its context.
            current = bench.gpu.current()
            caller.call(name)
            if bench.gpu.current() != current:
                left.append(name)
        return left

    def body() -> list[str]:
        if before:
            bench.gpu.here.pushed = [before]
        return calls()

    assert in_a_thread(body)[1].result(60) == []


@pytest.mark.parametrize("before", [ELSEWHERE, 0], ids=["another context", "none"])
def test_f08_a_build_restores_the_current_context(tmp_path: Path, before: int) -> None:
    try:
        real = find_tensorrt(["tensorrt_rtx"]).module
    except ModelRefused as refusal:
        pytest.skip(str(refusal))
    gpu = Gpu()
    with opened(tmp_path, library(gpu, **building(gpu, real)), gpu) as bench:

        def body() -> int:
            gpu.here.pushed = [before] if before else []
            build(model(ADD), BuildOptions())
            return gpu.current()

        assert in_a_thread(body)[1].result(60) == before
        bench.close()


@pytest.mark.parametrize("before", [ELSEWHERE, 0], ids=["another context", "none"])
def test_f08_collecting_an_engine_restores_the_current_context(bench: Bench, before: int) -> None:
    def body() -> int:
        bench.gpu.here.pushed = [before] if before else []
        bench.load(bench.plan()).bind(bench.partition).close()
        bench.engines.clear()
        gc.collect()
        return bench.gpu.current()

    assert in_a_thread(body)[1].result(60) == before


def test_f08_a_thread_that_attaches_keeps_the_primary_context(bench: Bench) -> None:
    bench.gpu.here.pushed = [ELSEWHERE]
    bench.partition.attach()
    assert bench.gpu.current() == bench.gpu.primary.handle


def test_f08_an_inference_switches_contexts_only_if_another_is_current(bench: Bench) -> None:
    executor = bench.bind()
    data, room = bench.pinned(rows(2)), bench.room()
    executor.enqueue(data, room).wait()
    bench.gpu.log.clear()
    executor.enqueue(data, room).wait()
    assert bench.gpu.log.count("cuCtxGetCurrent") == 1
    assert "cuCtxPushCurrent" not in bench.gpu.log
    bench.gpu.here.pushed = [ELSEWHERE]
    seen: list[int] = []
    bench.gpu.meanwhile("cuGraphLaunch", lambda: seen.append(bench.gpu.current()))
    executor.enqueue(data, room).wait()
    assert seen == [bench.gpu.primary.handle]
    assert bench.gpu.log.count("cuCtxPushCurrent") == bench.gpu.log.count("cuCtxPopCurrent") == 1
    bench.gpu.here.pushed = []


@pytest.mark.parametrize("failing", ["cuGraphLaunch", "Stream.record"])
def test_f08_an_inference_that_fails_gives_the_context_back(bench: Bench, failing: str) -> None:
    executor = bench.bind()
    run(executor, rows(2))
    bench.gpu.here.pushed = [ELSEWHERE]
    bench.gpu.fail(failing)
    with pytest.raises(ExecutionFailed, match="as scripted"):
        run(executor, rows(2))
    assert bench.gpu.current() == ELSEWHERE
    executor.close()
    bench.gpu.here.pushed = []


@pytest.mark.parametrize(
    ("call", "failing"),
    [
        ("pin", "cuMemHostRegister"),
        ("close executor", "Stream.sync"),
        ("close partition", "Stream.sync"),
        ("load", "Device.set_current"),
    ],
)
def test_f08_a_call_that_fails_gives_the_context_back(bench: Bench, call: str, failing: str) -> None:
    def body() -> int:
        bench.gpu.here.pushed = [ELSEWHERE]
        caller = Caller(bench)
        for name in CALLS[: CALLS.index(call)]:
            caller.call(name)
        bench.gpu.fail(failing)
        with pytest.raises((PartitionError, ModelRefused, ExecutionFailed), match="as scripted"):
            caller.call(call)
        return bench.gpu.current()

    assert in_a_thread(body)[1].result(60) == ELSEWHERE
