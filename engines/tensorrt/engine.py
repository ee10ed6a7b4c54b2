"""A TensorRT plan as an engine: bound to partitions through instances that outlive their executors."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from partitions import DeviceLost, Partition, PartitionError
from partitions.cuda.device import CudaPartition
from partitions.cuda.driver import translated
from partitions.cuda.kernel_loads import KERNEL_LOADS

from ..cuda.resources import open_resources
from ..errors import ExecutionFailed, ModelRefused
from ..memory import added
from ..settings import RuntimeSettings
from ..signature import Signature
from ..wiring import Wiring
from .chain import ChainedPlan, open_chain
from .executor import BoundEngine, TensorRTExecutor
from .graph_mode import GraphMode, decide
from .instance import Instance, Opener, open_instance
from .lifetime import InstancePool, close_collected
from .plan import LoadedPlan
from .release import releasing


class TensorRTEngine:
    """See `engines.base.Engine` for the contract.

    Instances that no executor uses are kept for the next executor, and freed by `close`, or once the engine is collected: see
    `engines.tensorrt.instance`.
    """

    platform = "tensorrt_plan"
    by_shape = True

    def __init__(self, loaded: LoadedPlan, open_instance: Opener = open_instance) -> None:
        self.loaded = loaded
        self.open_instance = open_instance
        self.pool = InstancePool()
        """The engine's idle instances, and the finalizers of its executors."""
        weakref.finalize(self, close_collected, self.pool, loaded.close)

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
    def memory(self) -> Mapping[str, int]:
        """Idle instances, kept for the next executor, count here."""
        return added([{"weights": self.loaded.weights}, *self.pool.memory()]) if self.plan is not None else {}

    @property
    def executor_memory(self) -> Mapping[str, int]:
        return self.loaded.executor_memory

    @property
    def plan(self) -> Any:
        """The library's engine (ICudaEngine), None once closed."""
        return self.loaded.plan

    def chained(self, wiring: Wiring, settings: RuntimeSettings) -> "TensorRTEngine":
        """The engine of a chain whose steps are all TensorRT engines; see `engines.chain`. Raises ModelRefused."""
        plans = [engine.loaded for engine in wiring.engines if isinstance(engine, TensorRTEngine)]
        if any(isinstance(plan, ChainedPlan) for plan in plans):
            raise ModelRefused("a chain cannot be a step of another one; name its steps instead")
        if any(loaded.plan is None for loaded in plans) or len({loaded.device.index for loaded in plans}) > 1:
            raise ModelRefused(f"{[loaded.path.name for loaded in plans]} are not all loaded on one GPU; load them there")
        return TensorRTEngine(ChainedPlan(plans, wiring, settings), open_chain)

    def bind(self, partition: Partition) -> TensorRTExecutor:
        return self._made("binding", partition, lambda checked: open_executor(self, checked))

    def rebind(self, executor: TensorRTExecutor, partition: Partition) -> TensorRTExecutor:
        """See `Executor.rebind`."""
        return self._made("moving", partition, lambda checked: move_executor(self, executor, checked))

    def alternate(self, executor: TensorRTExecutor, partition: Partition) -> TensorRTExecutor:
        """See `Executor.alternate`."""
        return self._made("adding", partition, lambda checked: add_executor(self, executor, checked))

    @releasing()
    def _made(self, doing: str, partition: Partition, make: Callable[[CudaPartition], TensorRTExecutor]) -> TensorRTExecutor:
        """What `make` returns on a thread of the partition. Raises ModelRefused."""
        checked = self._checked(partition)
        self.pool.release_postponed()
        with refusing(f"{doing} {self.path} to {partition!r}"), KERNEL_LOADS.hurrying():
            return checked.run(lambda: make(checked))

    def close(self) -> None:
        """Free the weights and the idle instances; its executors must be closed before.

        Holds the GIL for up to some 100 ms an instance, so call it when no inference waits. Raises ExecutionFailed,
        DeviceLost; the weights are freed all the same.
        """
        with KERNEL_LOADS.freeing(), ExitStack() as closing:
            closing.callback(self.loaded.close)
            closing.callback(self.pool.close)

    def _checked(self, partition: Partition) -> CudaPartition:
        """The partition, if this engine can be bound to it. Raises ModelRefused."""
        if not isinstance(partition, CudaPartition):
            raise ModelRefused(f"{self.path}: TensorRT serves partitions of a GPU, not {partition!r}")
        if self.plan is None:
            raise ModelRefused(f"{self.path}: the engine is closed; load it again")
        if partition.device.index != self.loaded.device.index:
            mine, theirs = self.loaded.device.index, partition.device.index
            raise ModelRefused(f"{self.path}: loaded on GPU {mine}, but {partition!r} is of GPU {theirs}; load it there")
        return partition


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raise CUDA's and execution errors of the block as ModelRefused, but DeviceLost as it is."""
    try:
        with translated(what):
            yield
    except DeviceLost:
        raise
    except (PartitionError, ExecutionFailed) as error:
        raise ModelRefused(str(error)) from error


def open_executor(engine: BoundEngine, partition: CudaPartition) -> TensorRTExecutor:
    """An executor that has run every shape of its warm-up, so that its kernels are compiled and its graphs captured.

    Call it on a thread attached to the partition. Blocks, for seconds where kernels are compiled. Raises ModelRefused,
    ExecutionFailed, PartitionError, CUDAError.
    """
    loaded = engine.loaded
    sets = loaded.warm_up_sets(partition)
    if loaded.verifier:
        loaded.verifier.expect(sets)
    instance = engine.pool.take()
    if instance is None:
        mode = _graph_mode(loaded)
        try:
            loaded.compile_kernels_in_child(partition)
        except ModelRefused as refusal:
            loaded.warn_once(str(refusal))
        instance = engine.open_instance(loaded, mode, loaded.profiles_for(partition), partition.stream)
    instance.add_user()
    executor = _executor(instance, engine, partition)
    with ExitStack() as failed:
        failed.callback(executor.close)
        instance.clear(partition.stream)
        executor.warm_up(sets)
        failed.pop_all()
    instance.save()  # Now rather than on close: the next process finds the kernels even if this one is killed.
    return executor


def move_executor(engine: BoundEngine, old: TensorRTExecutor, partition: CudaPartition) -> TensorRTExecutor:
    """An executor of the same instance on another partition; see `Executor.rebind`. Raises as `open_executor` does.

    An instance with native graphs is not moved, as these keep the SMs of the partition they were made on: another instance
    is opened.
    """
    if not old.instance.share():
        return open_executor(engine, partition)
    executor = _executor(old.instance, engine, partition)
    with ExitStack() as failed:
        failed.callback(executor.close)
        executor.recapture(old)
        failed.pop_all()
    return executor


def add_executor(engine: BoundEngine, home: TensorRTExecutor, partition: CudaPartition) -> TensorRTExecutor:
    """An executor that takes turns with `home`; see `Executor.alternate`. It is made as if `home` were moved."""
    executor = move_executor(engine, home, partition)
    executor.alternate_of = home.instance
    return executor


def _executor(instance: Instance, engine: BoundEngine, partition: CudaPartition) -> TensorRTExecutor:
    """An executor of an instance that counts it already."""
    with ExitStack() as made:
        made.callback(engine.pool.give_back, instance)
        resources = open_resources(partition, engine.loaded.plan.num_aux_streams, made)
        executor = TensorRTExecutor(engine, partition, instance, resources)
        made.pop_all()
    return executor


def _graph_mode(loaded: LoadedPlan) -> GraphMode:
    try:
        mode = decide(loaded.settings, loaded.traits)
    except ModelRefused as error:
        raise ModelRefused(f"{loaded.path}: {error}") from error
    if mode.note:
        loaded.warn_once(mode.note)
    return mode
