"""The part of an engine that does not depend on a partition: contexts, device memory, copies, and compiled kernels.

An instance outlives the executors that use it. Moving a model to another partition captures its graphs again from the same
contexts, and compiles nothing; closing an executor gives its instance back to the engine for the next one. An instance is
freed with its engine only: freeing a kernel cache holds the GIL for up to 240 ms (MobileNetV2 on an H100, 2026-11-22), during
which no tenant of the process is served.
"""

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from threading import Lock, RLock
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Buffer, Stream

from partitions.cuda.device import CudaPartition, SideStream
from partitions.cuda.driver import handle_return
from partitions.cuda.driver_memory import Taken

from ..cuda.capture import capture
from ..cuda.copies import Copies, EngineCopies, open_sm_copies, uses_sms
from ..cuda.resources import zeroed_buffers
from ..cuda.sharing import Sharers
from ..cuda.work import failing
from ..errors import EngineError, ExecutionFailed, ModelRefused
from ..memory import added
from ..signature import Shape
from ..verification.steady import Repeat
from .context import Context, Contexts, DataDependentOutputs
from .graph_mode import GraphMode, fall_back, without_capture
from .kernel_cache import CacheStatistics, RuntimeCache
from .plan import LoadedPlan

Array = np.ndarray[Any, np.dtype[Any]]


class Instance:
    """One set of contexts, of which at most one inference runs at a time.

    Executors of several partitions may have graphs of an instance, and take turns to launch; `add_user`, `share` and
    `remove_user` count them. `contexts` are by profile, `buffers` on the device for inputs, then outputs, `copies` by whether
    the SMs do them. Their memory is freed on a stream of the device's, as those that the instance was used on may be gone.
    """

    def __init__(
        self,
        loaded: LoadedPlan,
        graph_mode: GraphMode,
        contexts: Mapping[int, Context],
        buffers: Sequence[Buffer],
        copies: Mapping[bool, Copies],
        kernels: RuntimeCache | None,
        data_dependent: Sequence[str],
        close: ExitStack,
    ) -> None:
        self.graph_mode = graph_mode
        self.contexts = dict(contexts)
        self.copies = copies
        self.data_dependent = tuple(data_dependent)
        """The names of the data-dependent outputs. An instance that has any has no graphs."""
        self.addresses = [int(buffer.handle) for buffer in buffers]
        self.sizes = [buffer.size for buffer in buffers]
        self._loaded = loaded
        self._buffers = buffers
        self._kernels = kernels
        self._replaced: list[RuntimeCache] = []
        self._owned = close
        self.sharers = Sharers()
        """Its executors."""
        self._users = 0
        self.times_itself = True in copies and not self.data_dependent and uses_sms(loaded.settings.copies, sum(self.sizes))
        """Whether every inference is between copies by the SMs, which can take its time."""
        self.clock_agrees = False
        """Whether the GPU's timer was found to agree with the host."""
        self.compiled: dict[tuple[int, tuple[Shape, ...]], Context] = {}
        """The contexts that graphs were captured from, by profile and input shapes: another executor compiles nothing there."""
        self._lock = RLock()  # Reentrant, as the garbage collector may give it back during a call.
        self.background = BackgroundContexts(loaded)
        """Compiles new shapes while this instance serves."""
        self.prepares = kernels is not None
        """Whether it can compile in the background; otherwise the first inference of new shapes waits."""

    def __repr__(self) -> str:
        return f"<Instance of {self._loaded.path.name}, {len(self.contexts)} contexts, used by {self._users}>"

    @property
    def memory(self) -> dict[str, int]:
        """See `Executor.memory`. Contexts that compile new shapes in the background count once there are any."""
        contexts = len(self.contexts) + self.background.count
        return {"contexts": contexts * self._loaded.context_bytes, "buffers": sum(self.sizes)}

    def kernels(self) -> CacheStatistics:
        """Statistics of the kernel cache."""
        return self._kernels.statistics() if self._kernels else CacheStatistics(0, 0, refused=False)

    def kernel_caches(self) -> list[RuntimeCache]:
        """All caches with kernels that its contexts have loaded. Any thread."""
        return [cache for cache in (*self._replaced, self._kernels, self.background.kernels) if cache]

    def add_user(self) -> None:
        """Count one more executor that uses it."""
        with self._lock:
            self._users += 1

    def share(self) -> bool:
        """Count one more executor, on another partition. False if there cannot be one, as native graphs stay on their SMs."""
        with self._lock:
            if not self.graph_mode.native:
                self._users += 1
            return not self.graph_mode.native

    def remove_user(self) -> bool:
        """Count one executor less. Returns whether it was the last."""
        with self._lock:
            self._users -= 1
            return self._users == 0

    def clear(self, stream: Stream) -> None:
        """Write zeros over all tensors, so that the next executor cannot read what the last one left. Does not wait."""
        for buffer in self._buffers:
            buffer.fill(0, stream=stream)

    def wait_until_idle(self) -> None:
        """Wait for what was submitted outside of captures, whose stream may not exist later. Blocks. Raises CUDAError."""
        for context in self.contexts.values():
            with context.lock:
                context.wait_until_idle()

    def save(self) -> None:
        """Save the kernels that were compiled, for the next start. Blocks. Errors are logged."""
        if self._kernels:
            self._kernels.save()

    def stop_capturing(self, why: str) -> GraphMode:
        """Capture nothing from now on, for this reason. Returns the mode instead, which is native only for a single executor:
        others may have graphs of the contexts, which keep working.
        """
        with self._lock:
            traits = self._loaded.traits
            self.graph_mode = fall_back(traits if self._users == 1 else replace(traits, native=False), why)
            return self.graph_mode

    def open_native_contexts(self, stream: Stream) -> None:
        """In native mode: open new contexts and free the old ones, except where opening fails. Nothing may be in flight.

        They have kernels of their own, as each of their inferences calls the library: see `shared_kernels`.
        """
        self.compiled.clear()
        if self._kernels:
            self._kernels.save()  # The next cache finds there what this one has compiled.
            self._replaced.append(self._kernels)
            self._kernels = self._owned.enter_context(self._loaded.open_kernel_cache())
        for profile, old in self.contexts.items():
            if fresh := self._open_native_context(profile, stream):
                fresh.set_addresses(self.addresses)
                self.contexts[profile] = fresh
                old.close()

    def _open_native_context(self, profile: int, stream: Stream) -> Context | None:
        try:
            with failing("opening a context with TensorRT's own graphs"):
                return contexts_of(self._loaded, self._kernels).open(True, profile, stream) if self._kernels else None
        except EngineError as error:
            self._loaded.warn_once(f"{error}; each inference costs more")
            return None

    def close(self) -> None:
        """Free everything; no executor may use it. Holds the GIL for up to some 100 ms. Raises ExecutionFailed."""
        with failing(f"closing {self!r}"), ExitStack() as closing:
            context = closing.enter_context(ExitStack())
            closing.callback(self._owned.close)
            for each in self.contexts.values():
                closing.callback(each.close)
            closing.callback(self.background.close)
            context.enter_context(self._loaded.device.current())


Judge = Callable[[Repeat], None]
"""Raises for answers that are wrong or unsteady, by what the function yields that runs an engine, if it calls that."""


def answers(
    loaded: LoadedPlan, context: Context, inputs: Sequence[Array] | None, stream: Stream, partition: CudaPartition | None = None
) -> Generator[list[Array], None, None]:
    """Run the shapes that are set in a context on inputs from the host again and again; yields copies of the outputs of each
    run. With None, the inputs are zeros, and no outputs are copied.

    The first run is submitted call by call. With a partition, which has to be the stream's, the others are launched as a graph
    that is captured there, as inferences are served. Outputs are zeroed in between, so what is not written is seen.

    The tensors are in memory of the GPU until the generator is closed, and the context has its addresses after it: set others.
    Hold the context's lock. Blocks. Raises ExecutionFailed, CUDAError.
    """
    outputs = context.output_shapes()
    shapes = (*(context.shapes or ()), *outputs)
    with ExitStack() as scratch:
        sizes = [max(1, spec.nbytes(shape)) for spec, shape in zip(loaded.specs, shapes, strict=True)]
        buffers = zeroed_buffers(loaded.device, sizes, stream)
        for buffer in buffers:
            scratch.callback(buffer.close)
        places = [int(buffer.handle) for buffer in buffers]
        context.set_addresses(places)
        scratch.callback(context.wait_until_idle)
        given = [np.ascontiguousarray(each) for each in inputs or ()]
        for address, each in zip(places, given, strict=False):
            if each.nbytes:
                handle_return(driver.cuMemcpyHtoDAsync(address, each.ctypes.data, each.nbytes, stream.handle))
        loaded.check_execution(context.execute(stream))
        yield _fetched(loaded, places, () if inputs is None else outputs, stream)
        graph = None
        if partition:
            context.wait_until_idle()
            what = loaded.structure, context.profile, context.shapes
            with suppress(ExecutionFailed), failing("capturing"):  # What is served is captured next, and says why it is not.
                graph = capture(partition, lambda side: context.execute(side.stream, captured=True), what)
                scratch.callback(graph.close)
                scratch.callback(stream.sync)  # Even after a failure, it must not be in flight.
        while True:
            for buffer in buffers[len(loaded.signature.inputs) :]:
                buffer.fill(0, stream=stream)
            if graph:
                graph.launch(stream)
            else:
                loaded.check_execution(context.execute(stream))
            yield _fetched(loaded, places, () if inputs is None else outputs, stream)


def _fetched(loaded: LoadedPlan, places: Sequence[int], shapes: Sequence[Shape], stream: Stream) -> list[Array]:
    """Copies of outputs, in the order of the stream. Blocks. Raises CUDAError."""
    found = [np.empty(shape, spec.datatype.numpy) for spec, shape in zip(loaded.signature.outputs, shapes, strict=False)]
    for address, each in zip(places[len(loaded.signature.inputs) :], found, strict=False):
        if each.nbytes:
            handle_return(driver.cuMemcpyDtoHAsync(each.ctypes.data, address, each.nbytes, stream.handle))
    stream.sync()
    return found


class BackgroundContexts:
    """Contexts that prepare new shapes while other shapes are served. They are opened when first needed.

    They have a kernel cache and scratch memory apart from the instance's, because two threads or streams must not use the
    library's cache or a context's memory at once. There are two contexts for each profile: one compiles, on a stream made for
    that, and graphs of it are destroyed before another thread may use it. The other is captured, and runs on the partition's
    stream only, where its graphs run too.
    """

    def __init__(self, loaded: LoadedPlan) -> None:
        self._loaded = loaded
        self._lock = Lock()
        self._kernels: RuntimeCache | None = None
        self._compilers: dict[int, Context] = {}
        self.contexts: dict[int, Context] = {}
        """The contexts to capture that were opened so far, by profile."""

    @property
    def kernels(self) -> RuntimeCache | None:
        """Their cache, once a context was opened. Any thread."""
        return self._kernels

    @property
    def count(self) -> int:
        """How many contexts were opened so far. Any thread."""
        return len(self._compilers) + len(self.contexts)

    def compile(
        self,
        shapes: tuple[Shape, ...],
        profile: int,
        stream: Stream,
        aux_streams: Sequence[SideStream],
        partition: CudaPartition,
        judge: Judge,
    ) -> tuple[Shape, ...]:
        """Compile kernels for these shapes, and open the context that `context` returns. Returns the output shapes.

        `stream` and the auxiliary streams must not be used by anything else. Blocks, perhaps for seconds; threads wait for
        each other. Raises ModelRefused, ExecutionFailed, CUDAError, and what `judge` raises.
        """
        with self._lock:
            compiler = self._context_for(self._compilers, profile, stream)
            with compiler.lock:
                compiler.use_streams(aux_streams)
                compiler.set_shapes(shapes)
                judge(lambda inputs: answers(self._loaded, compiler, inputs, stream, partition))
                if shapes not in compiler.compiled:
                    with closing(answers(self._loaded, compiler, None, stream)) as once:
                        next(once)
                if self._kernels:
                    self._kernels.save()
                self._context_for(self.contexts, profile, stream)
                return compiler.output_shapes()

    def context(self, profile: int) -> Context:
        """The context to capture, after `compile` for this profile."""
        return self.contexts[profile]

    def _context_for(self, contexts: dict[int, Context], profile: int, stream: Stream) -> Context:
        self._kernels = self._kernels or self._loaded.open_kernel_cache()
        if profile not in contexts:
            contexts[profile] = contexts_of(self._loaded, self._kernels).open(False, profile, stream)
        return contexts[profile]

    def close(self) -> None:
        """Free everything; nothing may be in flight."""
        for context in (*self.contexts.values(), *self._compilers.values()):
            context.close()
        if self._kernels:
            self._kernels.close()


Opener = Callable[[LoadedPlan, GraphMode, Sequence[int], Stream], Instance]
"""The type of `open_instance`."""


def open_instance(loaded: LoadedPlan, graph_mode: GraphMode, profiles: Sequence[int], stream: Stream) -> Instance:
    """Open contexts for these profiles, memory and copies. Blocks, perhaps for seconds.

    Call it on a thread to which the device is current. Raises ModelRefused, ExecutionFailed, PartitionError, CUDAError.
    """
    with ExitStack() as made:
        kernels = _kernels(loaded, graph_mode, made)
        contexts = _contexts(contexts_of(loaded, kernels), graph_mode.native, profiles, stream, made)
        names = _data_dependent_outputs(loaded, contexts)
        if names:
            try:
                graph_mode, before = without_capture(loaded.settings, graph_mode, names), graph_mode
            except ModelRefused as error:
                raise ModelRefused(f"{loaded.path}: {error}") from error
            loaded.warn_once(graph_mode.note)
            if before.native or before.capture:
                for context in contexts.values():
                    context.close()
                kernels = _kernels(loaded, graph_mode, made)
                contexts = _contexts(contexts_of(loaded, kernels), False, profiles, stream, made)
        buffers = _buffers(loaded, contexts, stream, made)
        for context in contexts.values():
            context.set_addresses([int(buffer.handle) for buffer in buffers])
            if names:
                context.allocate_through(DataDependentOutputs(_memory(loaded, names, buffers)), names)
        copies = open_copies(loaded, stream, made)
        return Instance(loaded, graph_mode, contexts, buffers, copies, kernels, names, made.pop_all())


def _kernels(loaded: LoadedPlan, mode: GraphMode, made: ExitStack) -> RuntimeCache:
    """The kernels that the engine's instances share, or others for one without captured graphs: see `shared_kernels`.

    Nothing is shared where the library has no cache: then an instance would only wait for others.
    """
    if not mode.capture or "cache_path" not in loaded.api.features:
        return made.enter_context(loaded.open_kernel_cache())
    kernels = loaded.kernels.take()
    made.callback(loaded.kernels.give_back)
    return kernels


def _contexts(maker: Contexts, native: bool, profiles: Sequence[int], stream: Stream, made: ExitStack) -> dict[int, Context]:
    contexts = {}
    for profile in profiles:
        contexts[profile] = maker.open(native, profile, stream)
        made.callback(contexts[profile].close)
    return contexts


def _data_dependent_outputs(loaded: LoadedPlan, contexts: Mapping[int, Context]) -> list[str]:
    """The outputs whose size depends on data with the largest shapes of some profile."""
    found: list[str] = []
    for profile, context in contexts.items():
        context.set_shapes(loaded.shapes(profile, "max"))
        found += [name for name in context.data_dependent_outputs() if name not in found]
    return found


def _memory(loaded: LoadedPlan, names: Sequence[str], buffers: Sequence[Buffer]) -> dict[str, tuple[int, int]]:
    """The address and size in bytes of these outputs."""
    places = zip(loaded.specs, buffers, strict=True)
    return {spec.name: (int(buffer.handle), buffer.size) for spec, buffer in places if spec.name in names}


def contexts_of(loaded: LoadedPlan, kernels: RuntimeCache) -> Contexts:
    """Opens contexts that use these kernels."""

    def allocate(size: int, stream: Stream) -> Buffer:
        buffer = loaded.device.make_current().allocate(size, stream=stream)
        buffer.set_deallocation_stream(loaded.device.free_stream)
        return buffer

    return Contexts(loaded, kernels, allocate)


def _buffers(loaded: LoadedPlan, contexts: Mapping[int, Context], stream: Stream, made: ExitStack) -> list[Buffer]:
    """A buffer for each input, then each output, large enough for every profile."""
    largest = [loaded.shapes(profile, "max") for profile in contexts]
    inputs = [max(spec.nbytes(shapes[place]) for shapes in largest) for place, spec in enumerate(loaded.signature.inputs)]
    outputs = [max(sizes) for sizes in zip(*(context.output_sizes() for context in contexts.values()), strict=True)]
    buffers = zeroed_buffers(loaded.device, [max(1, nbytes) for nbytes in (*inputs, *outputs)], stream)
    for buffer in buffers:
        made.callback(buffer.close)
    stream.sync()
    for buffer in buffers:
        buffer.set_deallocation_stream(loaded.device.free_stream)
    return buffers


def open_copies(loaded: LoadedPlan, stream: Stream, made: ExitStack) -> dict[bool, Copies]:
    """By whether the SMs do them. Where the settings rule out copies by SMs, NVRTC is not needed."""
    inputs, rows = len(loaded.signature.inputs), len(loaded.specs)
    copies: dict[bool, Copies] = {False: EngineCopies(inputs)}
    if loaded.settings.copies != "engine":
        file = loaded.settings.cache_file(loaded.path)
        copies[True] = open_sm_copies(loaded.device, stream, inputs, rows, file and file.parent / "copies")
        made.callback(copies[True].close)
    return copies


def graph_memory(graphs: Iterable[Taken]) -> dict[str, int]:
    """As `Executor.memory`, what graphs take through the driver (`partitions.cuda.driver_memory`): nothing if none was seen.

    Any thread may call.
    """
    nbytes = sum(taken.nbytes for taken in graphs)
    return {"graphs": nbytes} if nbytes else {}


def kernel_memory(instance: Instance) -> dict[Hashable, Mapping[str, int]]:
    """As `Sharing.shared_memory`: the kernels of each cache, from which all engines of one structure run."""
    taken = {cache: cache.taken.nbytes for cache in instance.kernel_caches() if cache.taken}
    return {cache: {"kernels": nbytes} for cache, nbytes in taken.items() if nbytes}


def described(instance: Instance, graphs: Sequence[Taken]) -> Mapping[str, object]:
    """`kernels` of `Executor.describe`, and `driver_memory` if there is anything to say."""
    cached = instance.kernels()
    kernels = {"found": cached.found, "saved": cached.saved, "refused": cached.refused}
    parts = [*graphs, *(cache.taken for cache in instance.kernel_caches() if cache.taken)]
    unmeasured = sum(taken.unmeasured for taken in parts)
    found = {**added(kernel_memory(instance).values()), **graph_memory(graphs)}
    said = {"driver_memory": {**found, "unmeasured": unmeasured}} if found or unmeasured else {}
    return {"kernels": kernels, **said}
