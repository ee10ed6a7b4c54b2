"""Sets an engine up on a partition: takes an idle instance or opens a new one, and warms it up; or moves an executor."""

from contextlib import ExitStack

from partitions.cuda.device import CudaPartition

from ..cuda.resources import open_resources
from ..errors import ModelRefused
from .executor import BoundEngine, TensorRTExecutor
from .graph_mode import GraphMode, decide
from .instance import Instance
from .plan import LoadedPlan


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
