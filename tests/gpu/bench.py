"""Shared by the tests on a GPU: inputs in pinned memory, ONNX Runtime's outputs for them, and the tolerance."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from engines import Engine, Executor, Tensor
from partitions import Device, Partition
from tests.engines.tensors import Memory

from .networks import Arrays, Network, decoded, encoded, feed

MIB = 1 << 20
TOLERANCE = {"FP32": 2e-2, "FP16": 3e-2, "BF16": 1e-1}
"""Of the largest value. The GPU multiplies FP32 as TF32, with 10 bits of mantissa as FP16 has; BF16 has 7."""
ROOM = 32 << 20


class Pinned:
    """One inference's inputs in pinned memory, and pinned room for its outputs."""

    def __init__(self, device: Device, engine: Engine, network: Network, arrays: Arrays, room: int = ROOM) -> None:
        data = [np.ascontiguousarray(encoded(arrays[spec.name], network.datatype)) for spec in engine.signature.inputs]
        memories = [Memory(max(1, array.nbytes)) for array in data]
        for array, memory in zip(data, memories, strict=True):
            memory.bytes[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        self.memory = Memory(room)
        self.inputs = [Tensor(array.shape, m.room.address, array.nbytes, m) for array, m in zip(data, memories, strict=True)]
        self.room = self.memory.room
        self._pins = [device.pin(*memory.room[:2]) for memory in (*memories, self.memory)]

    def close(self) -> None:
        """Close it; no inference may be in flight."""
        for pin in self._pins:
            pin.close()


def expected(network: Network) -> Callable[[Arrays], list[np.ndarray]]:
    """ONNX Runtime's outputs for these inputs, in FP32."""
    import onnxruntime

    session = onnxruntime.InferenceSession(network.reference or network.onnx, providers=["CPUExecutionProvider"])
    return lambda arrays: session.run(None, arrays)


def tensors(engine: Engine, network: Network, arrays: Arrays) -> list[Tensor]:
    """Inputs in memory that is not pinned."""
    return [Tensor.of(encoded(arrays[spec.name], network.datatype), spec.datatype) for spec in engine.signature.inputs]


def results(engine: Engine, outputs: tuple[Tensor, ...]) -> list[np.ndarray]:
    """Copies of outputs, in FP32."""
    pairs = zip(engine.signature.outputs, outputs, strict=True)
    return [decoded(tensor.array(spec.datatype), spec.datatype.name) for spec, tensor in pairs]


def assert_close(got: list[np.ndarray], wanted: list[np.ndarray], datatype: str = "FP32") -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= TOLERANCE[datatype] * np.abs(theirs).max()


def assert_right(network: Network, executor: Executor, partition: Partition, turns: int = 4) -> None:
    """Run every shape so often that it is captured and replayed, and compare each time."""
    wanted = expected(network)
    for turn in range(turns):
        for shapes in network.tries:
            arrays = feed(network, shapes, turn)
            inputs = tensors(executor.engine, network, arrays)
            outputs = partition.run(lambda given=inputs: executor.enqueue(given).wait())  # type: ignore[misc]
            assert_close(results(executor.engine, outputs), wanted(arrays), network.datatype)


def own_memory(device: Any) -> int:
    """Bytes of the GPU's memory that this process has, by NVML."""
    from partitions.cuda.nvml import open_nvml

    nvml = open_nvml(device.address)
    assert nvml
    has = nvml.memory(os.getpid())
    assert has
    return has


def free_memory(device: Any) -> int:
    """Free bytes of the GPU's memory, which other processes use as well."""
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    device.make_current()
    return int(handle_return(driver.cuMemGetInfo())[0])
