"""A TensorRT plan as an engine: bound to partitions on instances that outlive their executors."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from partitions import DeviceLost, Partition, PartitionError
from partitions.cuda import CudaPartition
from partitions.faults import translated

from .errors import ExecutionFailed, ModelRefused
from .release import releasing
from .signature import Signature
from .tensorrt_bind import move_executor, open_executor
from .tensorrt_instance import Instance
from .tensorrt_plan import LoadedPlan
from .tensorrt_run import TensorRTExecutor


class TensorRTEngine:
    """See `engines.base.Engine` for the contract.

    Instances that no executor uses are kept for the next, and freed by `close` only: see `engines.tensorrt_instance`.
    """

    platform = "tensorrt_plan"

    def __init__(self, loaded: LoadedPlan) -> None:
        self.loaded = loaded
        self._idle: list[Instance] = []

    def __repr__(self) -> str:
        return f"<TensorRTEngine {self.path.name} {self.signature!r}, {self.loaded.api}>"

    @property
    def path(self) -> Path:
        """The plan's file."""
        return self.loaded.path

    @property
    def signature(self) -> Signature:
        return self.loaded.signature

    @property
    def plan(self) -> Any:
        """The library's engine, None once closed."""
        return self.loaded.plan

    @releasing()
    def bind(self, partition: Partition) -> TensorRTExecutor:
        if not isinstance(partition, CudaPartition):
            raise ModelRefused(f"{self.path}: TensorRT serves partitions of a GPU, not {partition!r}")
        if self.plan is None:
            raise ModelRefused(f"{self.path}: the engine is closed; load it again")
        with refusing(f"binding {self.path} to {partition!r}"):
            return partition.run(lambda: open_executor(self, partition))

    @releasing()
    def rebind(self, executor: TensorRTExecutor, partition: Partition) -> TensorRTExecutor:
        """As `Executor.rebind`."""
        if not isinstance(partition, CudaPartition):
            raise ModelRefused(f"{self.path}: TensorRT serves partitions of a GPU, not {partition!r}")
        with refusing(f"moving {self.path} to {partition!r}"):
            return partition.run(lambda: move_executor(self, executor, partition))

    def take_idle(self) -> Instance | None:
        """An instance that no executor uses, if there is one. Any thread."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give_back(self, instance: Instance) -> None:
        """An executor does not use this instance any more; after the last one it is kept for the next. Any thread."""
        if instance.leave():
            self._idle.append(instance)

    def close(self) -> None:
        """Free the weights and the idle instances; its executors must be closed before.

        Keeps the interpreter for up to some 100 ms an instance: for when no inference waits. Raises ExecutionFailed.
        """
        with ExitStack() as left:
            while idle := self.take_idle():
                left.callback(idle.close)
        self.loaded.close()


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """What CUDA and a first run say as ModelRefused, but for errors after which nothing works: DeviceLost."""
    try:
        with translated(what):
            yield
    except DeviceLost:
        raise
    except (PartitionError, ExecutionFailed) as error:
        raise ModelRefused(str(error)) from error
