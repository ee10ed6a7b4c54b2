"""TensorRT's execution contexts: the one module that creates them and calls their methods.

A context has one optimization profile for life. An engine with several profiles has a context for each, so that requests that
alternate between profiles keep their graphs, and no profile is switched while requests are served. A context keeps neither its
configuration nor its kernel cache alive, and must be freed before them. Its auxiliary streams have to be the partition's:
those that a library before TensorRT-RTX 1.7 creates itself run on all SMs.

Hazard: some calls of TensorRT-RTX 1.6.1 hold the GIL while they wait for the library's internal mutex. This was measured on an
H100 on 2026-11-22 by calling each one beside a thread that compiled: `set_optimization_profile_async` does, for as long as the
compilation takes; `set_input_shape`, `get_tensor_shape`, `set_tensor_address`, the cache's `serialize`, and captures do not.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import RLock
from typing import Any

from cuda.core import Buffer, Stream

from partitions.cuda.device import SideStream
from partitions.cuda.driver import CUDAError
from partitions.cuda.kernel_loads import KERNEL_LOADS

from ..cuda.locks import EXECUTION_LOCK
from ..errors import ExecutionFailed, ModelRefused
from ..signature import Shape
from .api import LIBRARY_LOCK, TensorRT, collect_messages, first_error
from .kernel_cache import RuntimeCache
from .plan import LoadedPlan


class DataDependentOutputs:
    """The memory and the last shape of each data-dependent output of a context, such as that of NMS and NonZero, whose size is
    known only while the inference runs. For the thread that runs the context.

    The library asks an output allocator for their memory, inside `execute_async_v3` and with the GIL held, once it knows how
    large an output is; for that it waits for the stream itself. `notify_shape` is called "sometime between when it calls
    reallocateOutput and enqueueV3 returns" (nvinfer1::IOutputAllocator in the TensorRT API documentation), so the shapes are
    known when `execute` returns, before the data are there. No memory is allocated then: each output has as much as the library
    says that it can ever need.

    TensorRT-RTX 1.6.1 refuses to build networks with such outputs, so all this was run on the simulated library only.
    """

    def __init__(self, memory: Mapping[str, tuple[int, int]]) -> None:
        """`memory` is the device address and the size in bytes of each output."""
        self._memory = dict(memory)
        self._shapes: dict[str, Shape] = {}
        self._requested: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<DataDependentOutputs {list(self._memory)}>"

    def begin(self) -> None:
        """Forget the shapes of the last inference."""
        self._shapes.clear()
        self._requested.clear()

    def allocate(self, output: str, nbytes: int) -> int:
        """The address of an output's memory; 0 if that is smaller than `nbytes`."""
        self._requested[output] = nbytes
        address, size = self._memory[output]
        return address if nbytes <= size else 0

    def set_shape(self, output: str, shape: Sequence[int]) -> None:
        """Record the shape of an output of this inference."""
        self._shapes[output] = tuple(shape)

    def shapes(self, known: Mapping[str, Shape]) -> tuple[Shape, ...]:
        """The shapes in `known`, with those of this inference filled in. Raises ExecutionFailed where one is missing."""
        if missing := [name for name in self._memory if name not in self._shapes]:
            raise ExecutionFailed(f"the library did not report the shape of {', '.join(missing)}")
        return tuple([self._shapes.get(name, shape) for name, shape in known.items()])

    def explain(self, refused: str) -> str:
        """The library's error text, and which output needed more than the library's own bound, if one did."""
        for name, requested in self._requested.items():
            if requested > self._memory[name][1]:
                bound = self._memory[name][1]
                return f"{refused}; output {name!r} needs {requested} bytes, and the library's bound was {bound}"
        return refused


def make_allocator(api: TensorRT, outputs: DataDependentOutputs) -> Any:
    """An IOutputAllocator of the library that allocates from `outputs`. Raises ModelRefused where the library has none."""
    if not hasattr(api.module, "IOutputAllocator"):
        raise ModelRefused(f"the size of an output depends on data, for which {api} lacks IOutputAllocator")

    base: Any = api.module.IOutputAllocator

    class Allocator(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def reallocate_output_async(self, name: str, memory: object, size: int, alignment: int, stream: object) -> int:
            return outputs.allocate(name, size)

        def notify_shape(self, name: str, shape: Sequence[int]) -> None:
            outputs.set_shape(name, shape)

    return Allocator()


class Context:
    """One execution context with its profile. Hold `lock` to call a method.

    Nothing that `execute` submitted outside of a capture may still be in flight when the context is changed; `wait_until_idle`
    waits for that. Graphs that were captured from it may be in flight: they do not use what the host changes.

    `kernels` is the kernel cache that it uses, which other contexts may use too.
    """

    def __init__(
        self, loaded: LoadedPlan, trt_context: Any, config: Any, profile: int, memory: Buffer | None, kernels: RuntimeCache
    ) -> None:
        self.lock = RLock()  # As the garbage collector may find another executor of its instance meanwhile.
        self._kernels = kernels
        self._kernels_lock = kernels.lock
        self.profile = profile
        self.shapes: tuple[Shape, ...] | None = None
        """The input shapes that are set; None while the set is incomplete."""
        self.compiled: set[tuple[Shape, ...]] = set()
        """Input shapes that were executed before, so that their kernels are compiled and they can be captured."""
        self._loaded = loaded
        self._trt_context = trt_context
        self._config = config
        self._memory = memory
        self._aux_streams: Sequence[SideStream] = ()
        self._busy_stream: Stream | None = None
        self._data_dependent: DataDependentOutputs | None = None

    def wait_until_idle(self) -> None:
        """Wait for what was executed outside of captures, once: the stream may not exist later. Raises CUDAError."""
        busy, self._busy_stream = self._busy_stream, None
        if busy:
            busy.sync()

    def use_streams(self, aux_streams: Sequence[SideStream]) -> None:
        """Set the auxiliary streams, which have to be of the partition that the next execution is for."""
        if aux_streams and aux_streams is not self._aux_streams:
            self._trt_context.set_aux_streams([stream.handle for stream in aux_streams])
            self._aux_streams = aux_streams

    def set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        """Set the input shapes, unless they are set already. Raises ExecutionFailed, CUDAError."""
        if shapes == self.shapes:
            return
        self.wait_until_idle()
        self.shapes = None
        for spec, shape in zip(self._loaded.signature.inputs, shapes, strict=True):
            with collect_messages() as messages:
                if not self._trt_context.set_input_shape(spec.name, shape):
                    raise ExecutionFailed(f"input {spec.name!r} of shape {list(shape)}: {first_error(messages)}")
        if unknown := self._unknown():
            raise ExecutionFailed(f"no shape is known for {', '.join(unknown)}")
        self.shapes = shapes

    def output_shapes(self) -> tuple[Shape, ...]:
        """The output shapes for the input shapes that are set; -1 where a size depends on data."""
        return tuple(tuple(self._trt_context.get_tensor_shape(spec.name)) for spec in self._loaded.signature.outputs)

    def output_sizes(self) -> list[int]:
        """The maximum size in bytes of each output with this profile. Leaves its largest shapes set. Raises ModelRefused."""
        self.set_shapes(self._loaded.shapes(self.profile, "max"))
        return [self._largest(spec.name) for spec in self._loaded.signature.outputs]

    def data_dependent_outputs(self) -> list[str]:
        """The names of the outputs whose size is unknown with the shapes that are set."""
        names = [spec.name for spec in self._loaded.signature.outputs]
        return [name for name, shape in zip(names, self.output_shapes(), strict=True) if -1 in shape]

    def allocate_through(self, data_dependent: DataDependentOutputs, outputs: Sequence[str]) -> None:
        """Let these outputs get their memory from, and report their shapes to, `data_dependent`.

        Raises ModelRefused, ExecutionFailed.
        """
        allocator = make_allocator(self._loaded.api, data_dependent)
        for name in outputs:
            with collect_messages() as messages:
                if not self._trt_context.set_output_allocator(name, allocator):
                    raise ExecutionFailed(f"output {name!r}: {first_error(messages)}")
        self._data_dependent = data_dependent

    def last_output_shapes(self) -> tuple[Shape, ...]:
        """The output shapes of the last execution. Raises ExecutionFailed."""
        known = dict(zip([spec.name for spec in self._loaded.signature.outputs], self.output_shapes(), strict=True))
        return self._data_dependent.shapes(known) if self._data_dependent else tuple(known.values())

    def set_addresses(self, addresses: Sequence[int]) -> None:
        """Set the device addresses of the inputs, then the outputs. Those of an instance never change."""
        self.wait_until_idle()
        for spec, address in zip(self._loaded.specs, addresses, strict=True):
            self._trt_context.set_tensor_address(spec.name, address)

    def execute(self, stream: Stream, captured: bool = False, ordered_stream: Stream | None = None) -> str:
        """Submit one inference of the shapes that are set to a stream, or add it to the stream's capture.

        `ordered_stream` is the stream for `wait_until_idle` to wait for, which has to be ordered after this one: a stream of
        the caller's may not exist by then. Returns "", or the library's error text. Compiles, perhaps for seconds, where these
        shapes are new.
        """
        if captured:
            return self._submit(stream)
        self._busy_stream = ordered_stream or stream
        if self.shapes in self.compiled:
            return self._submit(stream)
        measured = self._kernels.loading((self.profile, self.shapes))
        with EXECUTION_LOCK, self._kernels_lock, measured, LIBRARY_LOCK.shared(), KERNEL_LOADS.loading():
            refused = self._submit(stream)
        if not refused and self.shapes:
            self.compiled.add(self.shapes)
        return refused

    def close(self) -> None:
        """Free it, which holds the GIL for milliseconds; nothing may be in flight. Calling it again does nothing."""
        with self._kernels_lock, self._loaded.device.driver_memory.changing():
            self._trt_context = None
            self._config = None
        memory, self._memory = self._memory, None
        if memory:
            memory.close()

    def _submit(self, stream: Stream) -> str:
        if self._data_dependent:
            self._data_dependent.begin()
        with self._kernels_lock, collect_messages() as messages:
            refused = "" if self._trt_context.execute_async_v3(int(stream.handle)) else first_error(messages)
        return self._data_dependent.explain(refused) if refused and self._data_dependent else refused

    def _unknown(self) -> list[str]:
        try:
            return list(self._trt_context.infer_shapes())
        except RuntimeError as error:
            raise ExecutionFailed(f"running {self._loaded.path.name}: {error}") from error

    def _largest(self, output: str) -> int:
        nbytes = int(self._trt_context.get_max_output_size(output))
        if nbytes < 0:
            raise ModelRefused(f"{self._loaded.path}: {self._loaded.api} gives no bound for the size of output {output!r}")
        return nbytes


class Contexts:
    """Opens the contexts of one instance.

    `allocate` gives them memory where the settings say that we allocate it. `kernels` is for contexts that compile one after
    another: see `RuntimeCache`.
    """

    def __init__(self, loaded: LoadedPlan, kernels: RuntimeCache, allocate: Callable[[int, Stream], Buffer]) -> None:
        self._loaded = loaded
        self._kernels = kernels
        self._allocate = allocate

    def open(self, native: bool, profile: int, stream: Stream) -> Context:
        """A context with every setting applied and this profile set. `native`: with the library's own graphs.

        Waits for `stream`. Blocks, perhaps for seconds. Raises ModelRefused, ExecutionFailed, CUDAError.
        """
        with self._kernels.lock, KERNEL_LOADS.loading():
            return self._open(native, profile, stream)

    def _open(self, native: bool, profile: int, stream: Stream) -> Context:
        config = self._configured(native)
        changing = self._loaded.device.driver_memory.changing(in_turn=True)
        with collect_messages() as messages, changing, LIBRARY_LOCK.shared():
            trt_context = self._loaded.plan.create_execution_context(*self._how(config))
        if trt_context is None:
            stream.sync()  # Raises if the device is lost, which would be the reason.
            raise ModelRefused(f"{self._loaded.path}: {self._loaded.api} created no context: {first_error(messages)}")
        memory = next((self._allocate(size, stream) for size in self._loaded.context_memory), None)
        if memory:
            trt_context.set_device_memory(int(memory.handle), memory.size)
        self._set_profile(trt_context, profile, stream)
        _wait(stream)
        return Context(self._loaded, trt_context, config, profile, memory, self._kernels)

    def _set_profile(self, trt_context: Any, profile: int, stream: Stream) -> None:
        """Exclusive, as the call holds the GIL while it waits for the library's mutex: its holder may need the GIL to go on."""
        if profile == int(trt_context.active_optimization_profile):
            return
        with collect_messages() as messages, LIBRARY_LOCK.exclusive():
            done = trt_context.set_optimization_profile_async(profile, int(stream.handle))
        if not done:
            raise ExecutionFailed(f"profile {profile}: {first_error(messages)}")

    def _how(self, config: Any) -> tuple[Any, ...]:
        """What a context is made of: a configuration, or, with a library without any, the allocation strategy alone."""
        if config is not None:
            return (config,)
        return (self._allocation_strategy(),) if "allocation_strategy" in self._loaded.api.features else ()

    def _allocation_strategy(self) -> Any:
        kinds = self._loaded.api.module.ExecutionContextAllocationStrategy
        return getattr(kinds, self._loaded.settings.allocation_strategy.upper())

    def _configured(self, native: bool) -> Any:
        """The runtime configuration; None for a library without one."""
        api, settings = self._loaded.api, self._loaded.settings
        if "runtime_config" not in api.features:
            return None
        config = self._loaded.plan.create_runtime_config()
        if "cuda_graph_strategy" in api.features:
            config.cuda_graph_strategy = api.module.CudaGraphStrategy(int(native))
        if (name := "dynamic_shapes_kernel_specialization_strategy") in api.features:
            strategies = api.module.DynamicShapesKernelSpecializationStrategy
            setattr(config, name, getattr(strategies, getattr(settings, name).upper()))
        if "allocation_strategy" in api.features:
            config.set_execution_context_allocation_strategy(self._allocation_strategy())
        if "cache_path" in api.features:
            self._give_kernels(config)
        return config

    def _give_kernels(self, config: Any) -> None:
        """Let a context with this configuration use the cached kernels; without them, they are compiled again."""
        plan = self._kernels.maker or self._loaded.plan
        try:
            # The bound method keeps its configuration alive, which owns the library's cache.
            make = plan.create_runtime_config().create_runtime_cache
            done = config.set_runtime_cache(self._kernels.materialize(make, plan))
            why = "" if done else "the library refused it"
        except Exception as error:
            why = str(error)
        if why:
            self._loaded.warn_once(f"runs without a kernel cache: {why}")


def _wait(stream: Stream) -> None:
    """Wait for the stream, on which a profile is being switched. Raises CUDAError.

    A wait may fail without having waited. Then it is made again: the library must not free a context before its switch ends.
    """
    try:
        stream.sync()
    except CUDAError:
        with suppress(CUDAError):
            stream.sync()
        raise
