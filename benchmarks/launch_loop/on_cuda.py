"""Engines on a real GPU, and what the launch loop has to know of their executors."""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import nets
from engines import Engine, Executor, RuntimeSettings, load_engine
from engines.signature import Shape
from partitions import Device, Partition, open_device

from .launcher import Recipe

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CudaModel:
    """An engine of benchmarks/nets.py on a partition, for one row. It reads and sets what its executor counts."""

    def __init__(self, name: str, executor: Any, partition: Any) -> None:
        self.name = name
        self.executor: Executor = executor
        self.partition: Partition = partition
        self.shapes: tuple[Shape, ...] = ((1, *nets.NETS["cuda"][name].row),)
        self._executor = executor
        self._net = nets.NETS["cuda"][name]

    def recipe(self) -> Recipe:
        """What a launch needs. The shapes have to be captured. Raises RuntimeError if a launch takes more than the graph."""
        executor, fit = self._executor, self._executor._shapes.find(self.shapes)
        if fit is None or fit.prepared.graph is None or not fit.prepared.copies.captured:
            raise RuntimeError(f"{self.name} {self.shapes}: nothing is captured, or copies are not in the graph")
        copies = fit.prepared.copies
        length = copies._tables.shape[0]
        return Recipe(
            graph=number(fit.prepared.graph._handle),
            stream=number(executor._stream.handle),
            context=self.partition.run(_current_context),
            tables=number(copies._ring.handle),
            length=length,
            device=tuple(executor.instance.addresses),
            outputs=fit.outputs,
        )

    @property
    def counted(self) -> int:
        """How many inferences have used the copy tables."""
        return int(self._copies._counted)

    def count(self, counted: int) -> None:
        """So many have now; all of them have ended."""
        executor = self._executor
        executor._runs += counted - self._copies._counted
        self._copies._counted = counted
        executor._completed.count = executor._runs

    def draw(self, seed: int) -> Bytes:
        """An input, as bytes."""
        return self._net.draw(1, seed).view(np.uint8).ravel()

    def differs(self, got: Bytes, wanted: Bytes) -> bool:
        """Whether an answer is wrong: on the same partition it is the same to a thousandth."""
        ours, theirs = got.view(np.float32), wanted.view(np.float32)
        return not np.abs(ours - theirs).max() <= 1e-3 * np.abs(theirs).max()

    @property
    def _copies(self) -> Any:
        return self._executor._shapes.find(self.shapes).prepared.copies


class CudaBench:
    """The GPU, its partitions and engines; `close` closes them all. `repository` keeps models and their kernels."""

    def __init__(self, repository: Path) -> None:
        self._stack = ExitStack()
        self._repository = repository
        self._engines: dict[str, Engine] = {}
        self.device: Device = self._stack.enter_context(closing(open_device("cuda")))
        self.cuda: Any = ctypes.CDLL("libcuda.so.1")
        nets.write_all(repository, "cuda")

    def carve(self, granules: Sequence[int]) -> Partition:
        """A partition of these granules."""
        return self._stack.enter_context(closing(self.device.carve(granules)))

    def bind(self, name: str, partition: Partition) -> CudaModel:
        """Bind a model. Blocks, perhaps for seconds."""
        if name not in self._engines:
            path = self._repository / name / "1" / "model.onnx"
            settings = RuntimeSettings(copies="auto", warm_up=(1,))
            self._engines[name] = self._stack.enter_context(closing(load_engine(path, self.device, settings, nets.MOST_ROWS)))
        executor = self._engines[name].bind(partition)
        self._stack.enter_context(closing(executor))
        return CudaModel(name, executor, partition)

    def close(self) -> None:
        """Close everything; nothing may be in flight."""
        self._stack.close()


def number(handle: Any) -> int:
    """A driver's handle as an integer."""
    return int(handle)


def _current_context() -> int:
    from cuda.bindings import driver

    from partitions.cuda.driver import handle_return

    return int(handle_return(driver.cuCtxGetCurrent()))
