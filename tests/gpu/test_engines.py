"""Engines on green contexts: the numbers of ONNX Runtime, through copies, engine and copies in one graph."""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import Engine, Executor, Room, Tensor, load_engine
from engines.builder import BuildOptions, build
from engines.profiles import Profile, Range
from partitions import Device, Partition
from server.slots import Slot

from .networks import NETWORKS, Network, Shapes

pytestmark = pytest.mark.gpu
Arrays = dict[str, np.ndarray]
TOLERANCE = 2e-2
"""Of the largest value: the GPU multiplies FP32 as TF32, with 10 bits of mantissa."""


def plan(folder: Path, network: Network) -> Path:
    ranges = {name: Range(*shapes) for name, shapes in network.ranges.items()}
    path = folder / "model.plan"
    path.write_bytes(build(network.onnx, BuildOptions(profiles=(Profile(ranges),))))
    return path


def feed(network: Network, shapes: Shapes, seed: int) -> Arrays:
    chance = np.random.default_rng(seed)
    return {
        name: chance.integers(0, 1000, shape) if name in network.integers else chance.random(shape, np.float32)
        for name, shape in shapes.items()
    }


def expected(network: Network) -> Callable[[Arrays], list[np.ndarray]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(network.onnx, providers=["CPUExecutionProvider"])
    return lambda arrays: session.run(None, arrays)


def tensors(engine: Engine, arrays: Arrays) -> list[Tensor]:
    return [Tensor.of(arrays[spec.name]) for spec in engine.signature.inputs]


def results(engine: Engine, outputs: tuple[Tensor, ...]) -> list[np.ndarray]:
    return [tensor.array(spec.datatype) for spec, tensor in zip(engine.signature.outputs, outputs, strict=True)]


def assert_close(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


@pytest.fixture(params=sorted(NETWORKS))
def network(request: pytest.FixtureRequest) -> Network:
    return NETWORKS[request.param]()


@pytest.fixture
def partition(device: Device) -> Iterator[Partition]:
    partition = device.carve(range(6))
    yield partition
    partition.close()


@pytest.fixture
def engine(network: Network, tmp_path: Path, device: Device) -> Engine:
    return load_engine(plan(tmp_path, network), device)


@pytest.fixture
def executor(engine: Engine, partition: Partition) -> Iterator[Executor]:
    executor = engine.bind(partition)
    yield executor
    executor.close()


class Pinned:
    """A slot of pinned memory holding one inference's inputs."""

    def __init__(self, device: Device, engine: Engine, arrays: Arrays) -> None:
        self.slot = Slot(0, device.pin)
        signature = engine.signature
        data = [np.ascontiguousarray(arrays[spec.name]) for spec in signature.inputs]
        shapes = [array.shape for array in data]
        offsets = self.slot.place(signature, [array.nbytes for array in data], 32 << 20)
        for offset, array in zip(offsets, data, strict=True):
            self.slot.view[offset : offset + array.nbytes] = array.tobytes()
        self.inputs, self.room = self.slot.inputs(signature, shapes)


def test_the_numbers_are_those_of_onnx_runtime_first_captured_and_replayed(
    network: Network, engine: Engine, executor: Executor, partition: Partition
) -> None:
    wanted = expected(network)
    for turn in range(4):
        for shapes in network.tries:
            arrays = feed(network, shapes, turn)
            outputs = partition.run(lambda a=arrays: executor.enqueue(tensors(engine, a)).wait())
            assert_close(results(engine, outputs), wanted(arrays))


def test_many_in_flight_each_get_their_own_numbers(
    network: Network, engine: Engine, executor: Executor, partition: Partition, device: Device
) -> None:
    wanted = expected(network)
    batches = [feed(network, network.tries[turn % len(network.tries)], turn) for turn in range(40)]
    slots = [Pinned(device, engine, arrays) for arrays in batches]

    def run() -> list[list[np.ndarray]]:
        works = [executor.enqueue(slot.inputs, slot.room) for slot in slots]
        return [results(engine, work.wait()) for work in works]

    for _ in range(2):
        for arrays, got in zip(batches, partition.run(run), strict=True):
            assert_close(got, wanted(arrays))
    for slot in slots:
        slot.slot.close()


def test_outputs_lie_in_pinned_room_and_elsewhere_without_it(
    network: Network, engine: Engine, executor: Executor, partition: Partition, device: Device
) -> None:
    slot = Pinned(device, engine, feed(network, network.tries[0], 0))
    inside = partition.run(lambda: executor.enqueue(slot.inputs, slot.room).wait())
    outside = partition.run(lambda: executor.enqueue(slot.inputs, Room()).wait())
    for tensor in inside:
        assert slot.room.address <= tensor.address <= slot.room.address + slot.room.nbytes - tensor.nbytes
    assert_close(results(engine, inside), results(engine, outside))
    slot.slot.close()


def test_times(
    network: Network,
    engine: Engine,
    executor: Executor,
    partition: Partition,
    device: Device,
    figures: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    slot = Pinned(device, engine, feed(network, network.tries[0], 0))

    def run() -> tuple[list[float], list[float]]:
        submits, totals = [], []
        for _ in range(500):
            start = time.perf_counter()
            work = executor.enqueue(slot.inputs, slot.room)
            submitted = time.perf_counter()
            work.wait()
            totals.append((time.perf_counter() - start) * 1e6)
            submits.append((submitted - start) * 1e6)
        return submits[20:], totals[20:]

    submits, totals = partition.run(run)
    figures.setdefault("engines_us", {})[request.node.callspec.id] = {
        "submit_p50": statistics.median(submits),
        "submit_p99": statistics.quantiles(submits, n=100)[98],
        "total_p50": statistics.median(totals),
        "total_p99": statistics.quantiles(totals, n=100)[98],
        "executor": repr(executor),
    }
    slot.slot.close()


def test_rebinding_again_and_again_leaves_device_memory_flat(network: Network, engine: Engine, device: Device) -> None:
    from cuda.bindings import driver

    def free() -> int:
        return int(driver.cuMemGetInfo()[1])

    left = []
    for turn in range(16):
        partition = device.carve(range(turn % 4, turn % 4 + 4))
        executor = engine.bind(partition)
        executor.close()
        partition.close()
        left.append(free())
    assert left[-1] >= left[4] - (8 << 20), left
