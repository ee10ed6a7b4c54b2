"""A partition of a simulated GPU with a simulated TensorRT, for tests of engines.tensorrt.load and its neighbours."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from engines import Room, RuntimeSettings, Tensor, load_engine
from engines.model_files.artifact import Artifact
from engines.model_files.profiles import Profile, Range
from tests.engines.small import model
from tests.engines.tensors import Array, Memory, run
from tests.simulation import Gpu, installed
from tests.simulation.plans import Ranges, make_plan
from tests.simulation.tensorrt import library

AFFINE = "affine (float[n, 3] x) => (float[n, 3] y) <float three = {3}> { t = Add(x, x) y = Sub(t, three) }"
ROWS: Ranges = {"x": [(0, 3), (2, 3), (8, 3)]}

SEVERAL = """several (float[n, 3] a, int64[n] b) => (float[n, 3] sum, int64[n] more, float[n, 6] both)
{ sum = Add(a, a) more = Add(b, b) both = Concat<axis = 1>(a, sum) }"""
TWO: Ranges = {"a": [(1, 3), (2, 3), (5, 3)], "b": [(1,), (2,), (5,)]}


class Bench:
    """The calling thread is attached to the partition."""

    def __init__(self, gpu: Gpu, cuda: Any, folder: Path) -> None:
        self.gpu = gpu
        self.cuda = cuda
        self.folder = folder
        self.device = cuda.open_cuda(Gpu.index)
        self.partition = self.device.carve([0])
        self.partition.attach()
        self.tensorrt = importlib.import_module("engines.tensorrt.load")
        self.copies = importlib.import_module("engines.cuda.copies")
        self.address_cache = importlib.import_module("engines.cuda.address_cache")
        self.engines: list[Any] = []
        """The engines that were loaded."""
        self._executors: list[Any] = []
        self._pins: list[Any] = []
        self._plans = 0

    def plan(self, text: str = AFFINE, *ranges: Ranges, **facts: Any) -> Path:
        """A bare plan, with a profile for each of the ranges; by default, of AFFINE with ROWS."""
        self._plans += 1
        path = self.folder / f"{text.split()[0]}{self._plans}.plan"
        path.write_bytes(make_plan(model(text), *(ranges or [ROWS]), **facts))
        return path

    def artifact(self, text: str = AFFINE, ranges: Ranges = ROWS, **fields: Any) -> Path:
        """An engine file; `streamable` is of its plan."""
        profile = Profile({name: Range(*(tuple(shape) for shape in shapes)) for name, shapes in ranges.items()})
        profiles = fields.pop("profiles", (profile,))
        path = self.plan(text, *[ranges] * len(profiles), streamable=fields.pop("streamable", 0))
        onnx = path.with_suffix(".onnx")
        onnx.write_bytes(model(text))
        api = self.tensorrt.find_tensorrt()
        given = {"library": api.library, "version": api.version, "targets": (), "source": "5ea1", **fields}
        path.write_bytes(Artifact(signature=load_engine(onnx).signature, profiles=profiles, **given).pack(path.read_bytes()))
        onnx.unlink()  # Answers would be compared with it, which takes a second.
        return path

    def load(self, path: Path, **settings: Any) -> Any:
        """Answers are not verified unless the settings say so: each set of shapes would run 16 times more."""
        self.engines.append(load_engine(path, self.device, RuntimeSettings(**{"verify": "off", **settings})))
        return self.engines[-1]

    def bind(self, text: str = AFFINE, ranges: Ranges = ROWS, **settings: Any) -> Any:
        """An executor that is closed with the engines, unless it was before."""
        self._executors.append(self.load(self.plan(text, ranges), **settings).bind(self.partition))
        return self._executors[-1]

    def pinned(self, *arrays: Array) -> list[Tensor]:
        """The arrays in memory that the GPU reads."""
        tensors = []
        for array in arrays:
            memory = self.memory(max(1, array.nbytes))
            memory.bytes[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
            tensors.append(Tensor(array.shape, memory.room.address, array.nbytes))
        return tensors

    def room(self, nbytes: int = 4096) -> Room:
        """Memory that the GPU writes to."""
        return self.memory(nbytes).room

    def memory(self, nbytes: int) -> Memory:
        """Pinned memory, which lives as long as the bench."""
        memory = Memory(nbytes)
        self._pins.append((memory, self.device.pin(*memory.room[:2])))
        return memory

    def holdings(self) -> tuple[int, int, int, int, int]:
        """Counts of what has to be freed: memory, graphs, events, execution contexts, bytes.

        Without the memory that our kernels share, which is freed with the device.
        """
        gpu = self.gpu
        shared = [region.nbytes for region in gpu.allocated.values() if region.context]
        free = gpu.free + sum(shared)
        return len(gpu.allocated) - len(shared), len(gpu.graphs), len(gpu.events), len(gpu.executions), free

    def close_engines(self) -> None:
        """Close the engines and what they keep for the next executor. Executors that `bind` did not make are closed before."""
        for each in (*self._executors, *self.engines):
            each.close()
        self._executors.clear()
        self.engines.clear()

    def close(self) -> None:
        """Close the device, unless it is lost."""
        if self.gpu.lost:
            return
        self.close_engines()
        for _, pin in self._pins:
            pin.close()
        self.partition.close()
        self.device.close()


@contextmanager
def opened(folder: Path, module: ModuleType | None = None, gpu: Gpu | None = None) -> Iterator[Bench]:
    """A bench on a new GPU; `module` is its TensorRT."""
    gpu = gpu or Gpu()
    with installed(gpu, module or library(gpu)) as cuda:
        yield Bench(gpu, cuda, folder)


def affine(array: Array) -> Array:
    """The result of AFFINE."""
    return 2 * array - 3


def rows(count: int, seed: int = 0) -> Array:
    """An input for AFFINE."""
    return np.random.default_rng(seed).random((count, 3), np.float32)


def assert_right(executor: Any, data: Array) -> None:
    """It computes AFFINE."""
    assert run(executor, data)[0].tolist() == affine(data).tolist()


def never_captured(bench: Bench) -> Any:
    """An executor that runs without captured graphs."""
    bench.gpu.capturable = False
    return bench.bind()
