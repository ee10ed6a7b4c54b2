"""An engine set up on a partition: on an instance that is idle or new, run until nothing is new to it; or moved there."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from partitions.cuda.device import CudaPartition

from ..errors import ModelRefused
from ..model_files.profiles import suited
from .executor import TensorRTExecutor, equip
from .graph_mode import Way, decide
from .instance import Instance
from .plan import LoadedPlan

if TYPE_CHECKING:
    from .engine import TensorRTEngine


def open_executor(engine: "TensorRTEngine", partition: CudaPartition) -> TensorRTExecutor:
    """On a thread attached to the partition. Blocks. Raises ModelRefused, ExecutionFailed, PartitionError, CUDAError."""
    loaded = engine.loaded
    profile = suited(loaded.profiles, loaded.usable, partition.size)
    others = [each for each in loaded.usable if each != profile]
    instance = engine.pool.take()
    if instance is None:
        way = _way(loaded)
        loaded.have_kernels(partition)
        instance = engine.open_instance(loaded, way, (profile, *others), partition.stream)
    executor = _on(instance, engine, partition)
    with ExitStack() as failed:
        failed.callback(executor.close)
        instance.clear(partition.stream)
        executor.warm_up([shapes for each in (*others, profile) for shapes in loaded.usual(each)])
        failed.pop_all()
    instance.save()  # Now, so that a process that is killed leaves the kernels to the next.
    return executor


def move_executor(engine: "TensorRTEngine", left: TensorRTExecutor, partition: CudaPartition) -> TensorRTExecutor:
    """As `Executor.rebind`, on a thread attached to the partition. Raises as `open_executor` does.

    An instance with graphs of the library's own stays where it is: they have the SMs of the partition they were made on.
    """
    if left.instance.way.native:
        return open_executor(engine, partition)
    executor = _on(left.instance, engine, partition)
    with ExitStack() as failed:
        failed.callback(executor.close)
        executor.adopt(left)
        failed.pop_all()
    return executor


def _on(instance: Instance, engine: "TensorRTEngine", partition: CudaPartition) -> TensorRTExecutor:
    instance.use()
    with ExitStack() as made:
        made.callback(engine.pool.give_back, instance)
        executor = TensorRTExecutor(engine, partition, instance, equip(partition, engine.loaded.plan.num_aux_streams, made))
        made.pop_all()
    return executor


def _way(loaded: LoadedPlan) -> Way:
    try:
        way = decide(loaded.settings, loaded.situation)
    except ModelRefused as error:
        raise ModelRefused(f"{loaded.path}: {error}") from error
    if way.notice:
        loaded.warn_once(way.notice)
    return way
