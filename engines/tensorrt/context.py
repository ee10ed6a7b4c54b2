"""TensorRT's execution contexts: the one place that makes them, and what an executor tells one.

A context has one optimization profile for life: an engine with several profiles has a context for each, so that requests
for two profiles in turn keep their graphs, and no profile is switched while requests are served. A context keeps neither
its configuration nor the cache of kernels alive, and must go before them. Its auxiliary streams have to be the
partition's: those that a library before TensorRT-RTX 1.7 makes itself have everybody's SMs.

Which calls of TensorRT-RTX 1.6.1 wait for its internal mutex while they keep the interpreter was measured on an H100 on
2026-11-22 by calling each one beside a thread that compiled: `set_optimization_profile_async` does, for as long as that
takes; `set_input_shape`, `get_tensor_shape`, `set_tensor_address`, the cache's `serialize`, and captures do not.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from cuda.core import Buffer, Stream

from partitions.cuda.device import SideStream

from ..errors import ExecutionFailed, ModelRefused
from ..signature import Shape
from .api import EXECUTING, LIBRARY_USE, first_error, listening
from .kernel_cache import RuntimeCache
from .outputs import UnsizedOutputs, make_allocator
from .plan import LoadedPlan


class Context:
    """One execution context with its profile. Hold `lock` to call a method; nothing that `execute` submitted outside of a
    capture may still be in flight then, which `settle` waits for. Graphs that were captured from it may: they do not use
    what the host changes.
    """

    def __init__(self, loaded: LoadedPlan, theirs: Any, config: Any, profile: int, memory: Buffer | None) -> None:
        self.lock = Lock()
        self.profile = profile
        self.shapes: tuple[Shape, ...] | None = None
        """Those that were set last; None while there is no whole set."""
        self.compiled: set[tuple[Shape, ...]] = set()
        """Shapes that were executed before, so that their kernels are there, and they can be captured."""
        self._loaded = loaded
        self._theirs = theirs
        self._config = config
        self._memory = memory
        self._extra: Sequence[SideStream] = ()
        self._busy: Stream | None = None
        self._unsized: UnsizedOutputs | None = None

    def __repr__(self) -> str:
        return f"<Context of {self._loaded.path.name}, profile {self.profile}, shapes {self.shapes}>"

    def settle(self) -> None:
        """Wait for what was executed outside of captures, once: the stream may be gone later. Raises CUDAError."""
        busy, self._busy = self._busy, None
        if busy:
            busy.sync()

    def use_streams(self, extra: Sequence[SideStream]) -> None:
        """Auxiliary streams of the partition that the next execution is for."""
        if extra and extra is not self._extra:
            self._theirs.set_aux_streams([stream.handle for stream in extra])
            self._extra = extra

    def set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        """Raises ExecutionFailed, CUDAError."""
        if shapes == self.shapes:
            return
        self.settle()
        self.shapes = None
        for spec, shape in zip(self._loaded.signature.inputs, shapes, strict=True):
            with listening() as heard:
                if not self._theirs.set_input_shape(spec.name, shape):
                    raise ExecutionFailed(f"input {spec.name!r} of shape {list(shape)}: {first_error(heard)}")
        if unknown := self._unknown():
            raise ExecutionFailed(f"no shape is known for {', '.join(unknown)}")
        self.shapes = shapes

    def output_shapes(self) -> tuple[Shape, ...]:
        """What comes of the shapes that were set; -1 where that depends on data."""
        return tuple(tuple(self._theirs.get_tensor_shape(spec.name)) for spec in self._loaded.signature.outputs)

    def output_sizes(self) -> list[int]:
        """The most bytes of each output with this profile. Leaves its largest shapes set. Raises ModelRefused."""
        self.set_shapes(self._loaded.shapes(self.profile, "max"))
        return [self._largest(spec.name) for spec in self._loaded.signature.outputs]

    def unsized_outputs(self) -> list[str]:
        """The outputs whose size depends on data, also with the shapes that are set."""
        names = [spec.name for spec in self._loaded.signature.outputs]
        return [name for name, shape in zip(names, self.output_shapes(), strict=True) if -1 in shape]

    def allocate_through(self, unsized: UnsizedOutputs, outputs: Sequence[str]) -> None:
        """Have these outputs' memory, and say their shapes, through this. Raises ModelRefused, ExecutionFailed."""
        allocator = make_allocator(self._loaded.api, unsized)
        for name in outputs:
            with listening() as heard:
                if not self._theirs.set_output_allocator(name, allocator):
                    raise ExecutionFailed(f"output {name!r}: {first_error(heard)}")
        self._unsized = unsized

    def answered(self) -> tuple[Shape, ...]:
        """The shapes of the outputs of what was executed last. Raises ExecutionFailed."""
        known = dict(zip([spec.name for spec in self._loaded.signature.outputs], self.output_shapes(), strict=True))
        return self._unsized.shapes(known) if self._unsized else tuple(known.values())

    def set_addresses(self, addresses: Sequence[int]) -> None:
        """Where inputs, then outputs lie on the device."""
        self.settle()
        for spec, address in zip(self._loaded.specs, addresses, strict=True):
            self._theirs.set_tensor_address(spec.name, address)

    def execute(self, stream: Stream, captured: bool = False, then: Stream | None = None) -> str:
        """Submit one inference of the shapes that are set to a stream, or into its capture.

        `then` is the stream for `settle` to wait for, which has to be ordered after this one: a caller's own may be gone by
        then. Returns "", or what the library said when it refused. Compiles, perhaps for seconds, where these shapes are new.
        """
        if captured:
            return self._submit(stream)
        self._busy = then or stream
        if self.shapes in self.compiled:
            return self._submit(stream)
        with EXECUTING, LIBRARY_USE.shared():
            refused = self._submit(stream)
        if not refused and self.shapes:
            self.compiled.add(self.shapes)
        return refused

    def close(self) -> None:
        """Free it, which keeps the interpreter for milliseconds; nothing may be in flight. Calling it again does nothing."""
        self._theirs = None
        self._config = None
        memory, self._memory = self._memory, None
        if memory:
            memory.close()

    def _submit(self, stream: Stream) -> str:
        if self._unsized:
            self._unsized.begin()
        with listening() as heard:
            refused = "" if self._theirs.execute_async_v3(int(stream.handle)) else first_error(heard)
        return self._unsized.explain(refused) if refused and self._unsized else refused

    def _unknown(self) -> list[str]:
        try:
            return list(self._theirs.infer_shapes())
        except RuntimeError as error:
            raise ExecutionFailed(f"running {self._loaded.path.name}: {error}") from error

    def _largest(self, output: str) -> int:
        nbytes = int(self._theirs.get_max_output_size(output))
        if nbytes < 0:
            raise ModelRefused(f"{self._loaded.path}: {self._loaded.api} gives no bound for the size of output {output!r}")
        return nbytes


class Contexts:
    """Makes the contexts of one instance.

    `allocate` gives them memory where the settings say that it is ours to give. `kernels` are for contexts that compile one
    after another: see `RuntimeCache`.
    """

    def __init__(self, loaded: LoadedPlan, kernels: RuntimeCache, allocate: Callable[[int, Stream], Buffer]) -> None:
        self._loaded = loaded
        self._kernels = kernels
        self._allocate = allocate

    def __repr__(self) -> str:
        return f"<Contexts of {self._loaded.path.name}>"

    def open(self, native: bool, profile: int, stream: Stream) -> Context:
        """A context with every setting applied and this profile in force. `native`: with graphs of the library's own.

        `stream` is waited for. Blocks, perhaps for seconds. Raises ModelRefused, ExecutionFailed, CUDAError.
        """
        config = self._configured(native)
        with listening() as heard, LIBRARY_USE.shared():
            theirs = self._loaded.plan.create_execution_context(*(() if config is None else (config,)))
        if theirs is None:
            stream.sync()  # Raises if it gave none because the device is lost.
            raise ModelRefused(f"{self._loaded.path}: {self._loaded.api} gives no context: {first_error(heard)}")
        memory = next((self._allocate(size, stream) for size in self._loaded.context_memory), None)
        if memory:
            theirs.set_device_memory(int(memory.handle), memory.size)
        self._set_profile(theirs, profile, stream)
        stream.sync()
        return Context(self._loaded, theirs, config, profile, memory)

    def _set_profile(self, theirs: Any, profile: int, stream: Stream) -> None:
        """The library's call keeps the interpreter while it waits for its mutex, so no other thread may be in the library."""
        if profile == int(theirs.active_optimization_profile):
            return
        with listening() as heard, LIBRARY_USE.alone():
            done = theirs.set_optimization_profile_async(profile, int(stream.handle))
        if not done:
            raise ExecutionFailed(f"profile {profile}: {first_error(heard)}")

    def _configured(self, native: bool) -> Any:
        """The configuration, or None for a library that has none and gives what it likes."""
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
            kinds = api.module.ExecutionContextAllocationStrategy
            config.set_execution_context_allocation_strategy(getattr(kinds, settings.allocation_strategy.upper()))
        if "cache_path" in api.features:
            self._lend_kernels(config)
        return config

    def _lend_kernels(self, config: Any) -> None:
        """Let a context with this configuration use the kernels compiled before; without them, they are compiled again."""
        plan = self._loaded.plan
        try:
            # The method keeps its configuration, of which the library's cache is a part, as long as the cache is kept.
            make = plan.create_runtime_config().create_runtime_cache
            done = config.set_runtime_cache(self._kernels.materialize(make, plan))
            why = "" if done else "the library does not take it"
        except Exception as error:
            why = str(error)
        if why:
            self._loaded.warn_once(f"runs without a kernel cache: {why}")
