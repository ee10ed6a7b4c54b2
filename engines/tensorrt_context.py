"""TensorRT's execution contexts: the one place that makes them, and what an executor tells one.

A context keeps neither its configuration nor the cache of kernels alive, and must go before them. Its auxiliary streams
have to be the partition's: those that a library before TensorRT-RTX 1.7 makes itself have everybody's SMs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cuda.core import Buffer, Stream

from partitions.cuda import SideStream

from .cache import RuntimeCache
from .errors import ExecutionFailed, ModelRefused
from .signature import Shape
from .tensorrt_api import first_error, listening

if TYPE_CHECKING:
    from .tensorrt_engine import TensorRTEngine


class Context:
    """One execution context. Nothing of it may be in flight while it is told anything; one thread at a time."""

    def __init__(self, engine: "TensorRTEngine", theirs: Any, config: Any, stream: Stream) -> None:
        self.shapes: tuple[Shape, ...] | None = None
        """Those that it was told last; None while it holds no whole set."""
        self._engine = engine
        self._theirs = theirs
        self._config = config
        self._stream = stream

    def __repr__(self) -> str:
        return f"<Context of {self._engine.path.name}, shapes {self.shapes}>"

    @property
    def profile(self) -> int:
        """The optimization profile in force."""
        return int(self._theirs.active_optimization_profile)

    def switch(self, profile: int) -> None:
        """Take another optimization profile; shapes have to be set again. Raises ExecutionFailed."""
        if profile == self.profile:
            return
        self.shapes = None
        with listening() as heard:
            if not self._theirs.set_optimization_profile_async(profile, int(self._stream.handle)):
                raise ExecutionFailed(f"profile {profile}: {first_error(heard)}")

    def set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        """Raises ExecutionFailed."""
        self.shapes = None
        for spec, shape in zip(self._engine.signature.inputs, shapes, strict=True):
            with listening() as heard:
                if not self._theirs.set_input_shape(spec.name, shape):
                    raise ExecutionFailed(f"input {spec.name!r} of shape {list(shape)}: {first_error(heard)}")
        if unknown := self._unknown():
            raise ExecutionFailed(f"no shape is known for {', '.join(unknown)}")
        self.shapes = shapes

    def output_shapes(self) -> tuple[Shape, ...]:
        """What comes of the shapes that were set."""
        return tuple(tuple(self._theirs.get_tensor_shape(spec.name)) for spec in self._engine.signature.outputs)

    def output_sizes(self) -> list[int]:
        """The most bytes of each output with any profile. Leaves the last profile in force. Raises ModelRefused."""
        sizes = [[self._largest(spec.name) for spec in self._engine.signature.outputs] for _ in self._each_profile()]
        return [max(each) for each in zip(*sizes, strict=True)]

    def set_addresses(self, addresses: Sequence[int]) -> None:
        """Where inputs, then outputs lie on the device."""
        for spec, address in zip(self._engine.specs, addresses, strict=True):
            self._theirs.set_tensor_address(spec.name, address)

    def execute(self, stream: Stream) -> str:
        """Submit one inference to a stream, or into its capture; "", or what the library said when it refused."""
        with listening() as heard:
            return "" if self._theirs.execute_async_v3(int(stream.handle)) else first_error(heard)

    def close(self) -> None:
        """Let go of it; nothing may be in flight."""
        self._theirs = None
        self._config = None

    def _unknown(self) -> list[str]:
        try:
            return list(self._theirs.infer_shapes())
        except RuntimeError as error:
            raise ExecutionFailed(f"running {self._engine.path.name}: {error}") from error

    def _each_profile(self) -> Any:
        for profile in self._engine.usable:
            self.switch(profile)
            self.set_shapes(self._engine.shapes(profile, "max"))
            yield profile

    def _largest(self, output: str) -> int:
        nbytes = int(self._theirs.get_max_output_size(output))
        if nbytes < 0:
            raise ModelRefused(f"{self._engine.path}: the size of output {output!r} depends on data, which is not served")
        return nbytes


class Contexts:
    """Makes the contexts of one executor. `memory` is theirs where the settings say that it is ours to give.

    `kernels` must be this executor's alone: see `RuntimeCache`.
    """

    def __init__(
        self,
        engine: "TensorRTEngine",
        stream: Stream,
        extra: Sequence[SideStream],
        kernels: RuntimeCache,
        memory: Buffer | None = None,
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._extra = extra
        self._kernels = kernels
        self._memory = memory

    def __repr__(self) -> str:
        return f"<Contexts of {self._engine.path.name}, {len(self._extra)} auxiliary streams>"

    def open(self, native: bool, profile: int) -> Context:
        """A context with every setting applied and this profile in force. `native`: with graphs of the library's own.

        Blocks, perhaps for seconds. Raises ModelRefused, ExecutionFailed, CUDAError.
        """
        config = self._configured(native)
        with listening() as heard:
            theirs = self._engine.plan.create_execution_context(*(() if config is None else (config,)))
        if theirs is None:
            self._stream.sync()  # Raises if it gave none because the device is lost.
            raise ModelRefused(f"{self._engine.path}: {self._engine.api} gives no context: {first_error(heard)}")
        if self._memory:
            theirs.set_device_memory(int(self._memory.handle), self._memory.size)
        if self._extra:
            theirs.set_aux_streams([stream.handle for stream in self._extra])
        context = Context(self._engine, theirs, config, self._stream)
        context.switch(profile)
        self._stream.sync()
        return context

    def _configured(self, native: bool) -> Any:
        """The configuration, or None for a library that has none and gives what it likes."""
        api, settings = self._engine.api, self._engine.settings
        if "runtime_config" not in api.features:
            return None
        config = self._engine.plan.create_runtime_config()
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
        plan = self._engine.plan
        try:
            # The method keeps its configuration, of which the library's cache is a part, as long as the cache is kept.
            make = plan.create_runtime_config().create_runtime_cache
            done = config.set_runtime_cache(self._kernels.materialize(make, plan))
            why = "" if done else "the library does not take it"
        except Exception as error:
            why = str(error)
        if why:
            self._engine.warn_once(f"runs without a kernel cache: {why}")
