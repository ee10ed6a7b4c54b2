"""Engines on a real GPU."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import nets
from engines import Engine, Executor, RuntimeSettings, load_engine
from engines.signature import Shape
from partitions import Device, Partition, open_device

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CudaModel:
    """An engine of benchmarks/nets.py on a partition, for one row."""

    def __init__(self, name: str, executor: Any, partition: Any) -> None:
        self.name = name
        self.executor: Executor = executor
        self.partition: Partition = partition
        self.shapes: tuple[Shape, ...] = ((1, *nets.NETS["cuda"][name].row),)
        self._executor = executor
        self._net = nets.NETS["cuda"][name]

    @property
    def launched(self) -> int:
        """How many inferences its recipes have launched."""
        return int(sum(int(count[0]) for count in self._executor._recipes._launched.values()))

    def draw(self, seed: int) -> Bytes:
        """An input, as bytes."""
        return self._net.draw(1, seed).view(np.uint8).ravel()

    def differs(self, got: Bytes, wanted: Bytes) -> bool:
        """Whether an answer is wrong: on the same partition it is the same to a thousandth."""
        ours, theirs = got.view(np.float32), wanted.view(np.float32)
        return not np.abs(ours - theirs).max() <= 1e-3 * np.abs(theirs).max()


class CudaBench:
    """The GPU, its partitions and engines; `close` closes them all. `repository` keeps models and their kernels."""

    def __init__(self, repository: Path) -> None:
        self._stack = ExitStack()
        self._repository = repository
        self._engines: dict[str, Engine] = {}
        self.device: Device = self._stack.enter_context(closing(open_device("cuda")))
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
