"""What an engine computes with that belongs to no partition: contexts, device memory, copies, and compiled kernels.

An instance outlives the executors that use it. Moving a model to another partition captures its graphs again, from the
same contexts, and compiles nothing; closing an executor gives its instance back to the engine for the next one. An
instance is freed with its engine only: freeing a kernel cache keeps the interpreter for up to 240 ms (MobileNetV2 on an
H100, 2026-11-22), in which no tenant of the process is served.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from threading import Lock, RLock
from typing import Any

from cuda.core import Buffer, Device, Stream

from partitions.cuda.device import SideStream

from ..errors import EngineError, ModelRefused
from ..signature import Shape
from .context import Context, Contexts
from .copies import Copies, EngineCopies, open_copier
from .graph_mode import Way, unsized
from .kernel_cache import CacheStatistics, RuntimeCache
from .outputs import UnsizedOutputs
from .plan import LoadedPlan
from .work import failing


class Instance:
    """One set of contexts, of which at most one inference runs at a time. `way` is how it reaches the GPU.

    `stream` is what its memory is freed on, and lives as long as the device: a partition's, which the device keeps.
    Executors of several partitions may have graphs of it, but only one of them may launch; who has it is counted by `use`
    and `leave`. `contexts` are by profile, `buffers` on the device for inputs, then outputs, `copies` by whether SMs do them.
    """

    def __init__(
        self,
        loaded: LoadedPlan,
        way: Way,
        contexts: Mapping[int, Context],
        buffers: Sequence[Buffer],
        copies: Mapping[bool, Copies],
        kernels: RuntimeCache | None,
        stream: Stream,
        unsized: Sequence[str],
        close: Callable[[], None],
    ) -> None:
        self.way = way
        self.contexts = dict(contexts)
        self.copies = copies
        self.unsized = tuple(unsized)
        """The outputs whose size depends on data. Such an instance has no graphs."""
        self.addresses = [int(buffer.handle) for buffer in buffers]
        self.sizes = [buffer.size for buffer in buffers]
        self._loaded = loaded
        self._buffers = buffers
        self._kernels = kernels
        self._close = close
        self._users = 0
        self._counting = RLock()  # The collector may give it back in the middle of a call.
        self.beside = Beside(loaded, stream)
        """What compiles new shapes while this serves."""
        self.prepares = kernels is not None
        """Whether it does; else the first inference of new shapes waits while they are compiled."""

    def __repr__(self) -> str:
        return f"<Instance of {self._loaded.path.name}, {len(self.contexts)} contexts, used by {self._users}>"

    def kernels(self) -> CacheStatistics:
        """What became of the kernel cache."""
        return self._kernels.statistics() if self._kernels else CacheStatistics(0, 0, refused=False)

    def use(self) -> None:
        """One more executor has it."""
        with self._counting:
            self._users += 1

    def leave(self) -> bool:
        """One executor less has it. Returns whether it was the last."""
        with self._counting:
            self._users -= 1
            return self._users == 0

    def clear(self, stream: Stream) -> None:
        """Write zeros over all tensors, so that the next executor finds nothing of the last. Does not wait."""
        for buffer in self._buffers:
            buffer.fill(0, stream=stream)

    def save(self) -> None:
        """Keep the kernels that were compiled for the next start. Blocks; what goes wrong is a warning."""
        if self._kernels:
            self._kernels.save()

    def renew(self, way: Way, stream: Stream) -> None:
        """Go on in another way, with contexts of its own graphs where `way` is native; the old ones are freed.

        Nothing may be in flight. Where a new one cannot be had the old one stays.
        """
        self.way = way
        if way.native:
            for profile, old in self.contexts.items():
                if fresh := self._fresh(profile, stream):
                    fresh.set_addresses(self.addresses)
                    self.contexts[profile] = fresh
                    old.close()

    def _fresh(self, profile: int, stream: Stream) -> Context | None:
        try:
            with failing("making a context with graphs of its own"):
                return contexts_of(self._loaded, self._kernels).open(True, profile, stream) if self._kernels else None
        except EngineError as error:
            self._loaded.warn_once(f"{error}; each inference costs more")
            return None

    def close(self) -> None:
        """Free everything; no executor may have it. Keeps the interpreter for up to some 100 ms. Raises ExecutionFailed."""
        with failing(f"closing {self!r}"), ExitStack() as left:
            context = left.enter_context(ExitStack())
            left.callback(self._close)
            for each in self.contexts.values():
                left.callback(each.close)
            left.callback(self.beside.close)
            context.enter_context(self._loaded.device.current())


class Beside:
    """Contexts for shapes that become ready while others are served, made when first needed: with a kernel cache and scratch
    memory of their own, as neither the library's cache nor a context's memory may be used by two threads or two streams at
    once.

    For each profile there are two. One compiles, on a stream of its own, and is never captured. Graphs are captured from the
    other, which runs on the partition's stream only, where its graphs run.

    `freed_on` is a stream that lives as long as the device, to free memory on: those that compile are gone by then.
    """

    def __init__(self, loaded: LoadedPlan, freed_on: Stream) -> None:
        self._loaded = loaded
        self._freed_on = freed_on
        self._turn = Lock()
        self._kernels: RuntimeCache | None = None
        self._compilers: dict[int, Context] = {}
        self.contexts: dict[int, Context] = {}
        """Those to be captured that were made so far, by profile."""

    def __repr__(self) -> str:
        return f"<Beside of {self._loaded.path.name}, {len(self.contexts)} contexts>"

    def compile(
        self, shapes: tuple[Shape, ...], profile: int, stream: Stream, extra: Sequence[SideStream]
    ) -> tuple[Shape, ...]:
        """Have kernels for these shapes in the cache, and a context for `context` to give. Returns the outputs' shapes.

        `stream` and the auxiliary ones are for this alone. Blocks, perhaps for seconds; other threads wait for their turn.
        Raises ModelRefused, ExecutionFailed, CUDAError.
        """
        with self._turn:
            compiler = self._made(self._compilers, profile, stream)
            with compiler.lock:
                compiler.use_streams(extra)
                compiler.set_shapes(shapes)
                if shapes not in compiler.compiled:
                    self._run(compiler, shapes, stream)
                self._made(self.contexts, profile, stream)
                return compiler.output_shapes()

    def context(self, profile: int) -> Context:
        """The one to be captured, after `compile` for this profile."""
        return self.contexts[profile]

    def _made(self, contexts: dict[int, Context], profile: int, stream: Stream) -> Context:
        self._kernels = self._kernels or self._loaded.open_kernels()
        if profile not in contexts:
            contexts[profile] = Contexts(self._loaded, self._kernels, self._allocate).open(False, profile, stream)
        return contexts[profile]

    def _allocate(self, size: int, stream: Stream) -> Buffer:
        buffer = self._loaded.device.make_current().allocate(size, stream=stream)
        buffer.set_deallocation_stream(self._freed_on)
        return buffer

    def _run(self, context: Context, shapes: tuple[Shape, ...], stream: Stream) -> None:
        with ExitStack() as scratch:
            buffers = zeros(self._loaded.device, self._sizes(context, shapes), stream)
            for buffer in buffers:
                scratch.callback(buffer.close)
            context.set_addresses([int(buffer.handle) for buffer in buffers])
            scratch.callback(context.settle)
            self._loaded.check_execution(context.execute(stream))
        if self._kernels:
            self._kernels.save()

    def _sizes(self, context: Context, shapes: tuple[Shape, ...]) -> list[int]:
        whole = (*shapes, *context.output_shapes())
        return [max(1, spec.nbytes(shape)) for spec, shape in zip(self._loaded.specs, whole, strict=True)]

    def close(self) -> None:
        """Free it; nothing may be in flight."""
        for context in (*self.contexts.values(), *self._compilers.values()):
            context.close()
        if self._kernels:
            self._kernels.close()


def open_instance(loaded: LoadedPlan, way: Way, profiles: Sequence[int], stream: Stream) -> Instance:
    """Contexts for these profiles, memory and copies, on a thread to which the device is current. Blocks, perhaps for seconds.

    Raises ModelRefused, ExecutionFailed, PartitionError, CUDAError.
    """
    with ExitStack() as made:
        kernels = made.enter_context(loaded.open_kernels())
        maker = contexts_of(loaded, kernels)
        contexts = _contexts(maker, way.native, profiles, stream, made)
        names = _unsized(loaded, contexts)
        if names:
            try:
                way, before = unsized(loaded.settings, way, names), way
            except ModelRefused as error:
                raise ModelRefused(f"{loaded.path}: {error}") from error
            loaded.warn_once(way.notice)
            contexts = _contexts(maker, False, profiles, stream, made) if before.native else contexts
        buffers = _buffers(loaded, contexts, stream, made)
        for context in contexts.values():
            context.set_addresses([int(buffer.handle) for buffer in buffers])
            if names:
                context.allocate_through(UnsizedOutputs(_memory(loaded, names, buffers)), names)
        copies = open_copies(loaded, stream, made)
        return Instance(loaded, way, contexts, buffers, copies, kernels, stream, names, made.pop_all().close)


def _contexts(maker: Contexts, native: bool, profiles: Sequence[int], stream: Stream, made: ExitStack) -> dict[int, Context]:
    contexts = {}
    for profile in profiles:
        contexts[profile] = maker.open(native, profile, stream)
        made.callback(contexts[profile].close)
    return contexts


def _unsized(loaded: LoadedPlan, contexts: Mapping[int, Context]) -> list[str]:
    """The outputs whose size depends on data with the largest shapes of some profile."""
    found: list[str] = []
    for profile, context in contexts.items():
        context.set_shapes(loaded.shapes(profile, "max"))
        found += [name for name in context.unsized_outputs() if name not in found]
    return found


def _memory(loaded: LoadedPlan, names: Sequence[str], buffers: Sequence[Buffer]) -> dict[str, tuple[int, int]]:
    """Address and bytes of these outputs."""
    places = zip(loaded.specs, buffers, strict=True)
    return {spec.name: (int(buffer.handle), buffer.size) for spec, buffer in places if spec.name in names}


def contexts_of(loaded: LoadedPlan, kernels: RuntimeCache) -> Contexts:
    """What makes contexts that use these kernels."""
    return Contexts(loaded, kernels, lambda size, stream: loaded.device.make_current().allocate(size, stream=stream))


def zeros(device: Any, sizes: Sequence[int], stream: Stream) -> list[Buffer]:
    """Device memory of these sizes, written to by the stream. Raises CUDAError, and then leaves none."""
    with ExitStack() as made:
        current: Device = device.make_current()
        buffers = []
        for size in sizes:
            buffers.append(current.allocate(size, stream=stream))
            made.callback(buffers[-1].close)
            buffers[-1].fill(0, stream=stream)
        made.pop_all()
        return buffers


def _buffers(loaded: LoadedPlan, contexts: Mapping[int, Context], stream: Stream, made: ExitStack) -> list[Buffer]:
    """One for each input, then each output, large enough for every profile."""
    largest = [loaded.shapes(profile, "max") for profile in contexts]
    inputs = [max(spec.nbytes(shapes[place]) for shapes in largest) for place, spec in enumerate(loaded.signature.inputs)]
    outputs = [max(sizes) for sizes in zip(*(context.output_sizes() for context in contexts.values()), strict=True)]
    buffers = zeros(loaded.device, [max(1, nbytes) for nbytes in (*inputs, *outputs)], stream)
    for buffer in buffers:
        made.callback(buffer.close)
    return buffers


def open_copies(loaded: LoadedPlan, stream: Stream, made: ExitStack) -> dict[bool, Copies]:
    """By whether the SMs do them. Without copies by SMs, NVRTC is not needed either."""
    inputs, rows = len(loaded.signature.inputs), len(loaded.specs)
    copies: dict[bool, Copies] = {False: EngineCopies(inputs)}
    if loaded.settings.copies != "engine":
        device = loaded.device.make_current()
        copies[True] = open_copier(device, stream, loaded.copy_kernels(device), inputs, rows)
        made.callback(copies[True].close)
    return copies
