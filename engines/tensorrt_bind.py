"""An engine set up on a partition: its memory, streams, copies and first context, run until nothing is new to it."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from cuda.core import Buffer, Device

from partitions.cuda import CudaPartition

from .cache import RuntimeCache
from .copies import LENGTH, Copies, EngineCopies, open_copier
from .errors import ModelRefused
from .ordering import open_ordering
from .profiles import suited
from .tensorrt_context import Context, Contexts
from .tensorrt_graphs import Way, decide
from .tensorrt_run import Equipment, TensorRTExecutor

if TYPE_CHECKING:
    from .tensorrt_engine import TensorRTEngine


def open_executor(engine: "TensorRTEngine", partition: CudaPartition) -> TensorRTExecutor:
    """On a thread attached to the partition. Blocks. Raises ModelRefused, ExecutionFailed, PartitionError, CUDAError."""
    way = _way(engine)
    profile = suited(engine.profiles, engine.usable, partition.size)
    with ExitStack() as made:
        kernels = made.enter_context(engine.open_kernels())
        fitting = _Fitting(engine, partition, partition.device.make_current(), kernels, made)
        executor = TensorRTExecutor(engine, partition, way, fitting.equip(way.native, profile))
        made.callback(executor.close)
        others = [each for each in engine.usable if each != profile]
        executor.warm_up([shapes for each in (*others, profile) for shapes in engine.usual(each)])
        kernels.save()  # Now, so that a process that is killed leaves them to the next.
        made.pop_all()
    return executor


def _way(engine: "TensorRTEngine") -> Way:
    try:
        way = decide(engine.settings, engine.situation)
    except ModelRefused as error:
        raise ModelRefused(f"{engine.path}: {error}") from error
    if way.notice:
        engine.warn_once(way.notice)
    return way


class _Fitting:
    """Makes what one executor needs; `made` undoes it, in the opposite order, if something fails."""

    def __init__(
        self, engine: "TensorRTEngine", partition: CudaPartition, device: Device, kernels: RuntimeCache, made: ExitStack
    ) -> None:
        self._engine = engine
        self._partition = partition
        self._device = device
        self._kernels = kernels
        self._made = made

    def equip(self, native: bool, profile: int) -> Equipment:
        engine, partition = self._engine, self._partition
        extra = [self._own(partition.make_stream()) for _ in range(engine.plan.num_aux_streams)]
        memory = [self._allocate(size) for size in engine.context_memory]
        contexts = Contexts(engine, partition.stream, extra, self._kernels, *memory)
        context = self._own(contexts.open(native, profile))
        buffers = self._buffers(context)
        context.switch(profile)
        copies = self._copies()
        events = [self._device.create_event() for _ in range(LENGTH)]
        ordering = open_ordering(self._device, partition)
        return Equipment(contexts, context, buffers, copies, events, ordering, (self._kernels, *memory, *extra))

    def _buffers(self, context: Context) -> list[Buffer]:
        """One for each input, then each output, large enough for every profile."""
        specs = self._engine.signature.inputs
        largest = [self._engine.shapes(profile, "max") for profile in self._engine.usable]
        inputs = [max(spec.nbytes(shapes[index]) for shapes in largest) for index, spec in enumerate(specs)]
        buffers = [self._allocate(max(1, nbytes)) for nbytes in (*inputs, *context.output_sizes())]
        context.set_addresses([int(buffer.handle) for buffer in buffers])
        return buffers

    def _copies(self) -> dict[bool, Copies]:
        """By whether the SMs do them. Without copies by SMs, NVRTC is not needed either."""
        inputs, rows = len(self._engine.signature.inputs), len(self._engine.specs)
        copies: dict[bool, Copies] = {False: EngineCopies(inputs)}
        if self._engine.settings.copies != "engine":
            kernels = self._engine.copy_kernels(self._device)
            copies[True] = self._own(open_copier(self._device, self._partition.stream, kernels, inputs, rows))
        return copies

    def _allocate(self, nbytes: int) -> Buffer:
        return self._own(self._device.allocate(nbytes, stream=self._partition.stream))

    def _own(self, thing: Any) -> Any:
        self._made.callback(thing.close)
        return thing
