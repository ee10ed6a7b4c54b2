"""A simulated TensorRT-RTX or TensorRT: plans that carry an ONNX, which ONNX Runtime computes when the stream runs it.

What the library answers with False and a message is answered so here; what it calls undefined behaviour raises Misuse. The
classes have the members of all versions; `library` makes a module of them with those of one version, by its manifest.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from threading import Lock
from types import ModuleType
from typing import Any
from weakref import WeakSet, ref

import numpy as np
import onnxruntime as ort
from onnx import load_model_from_string

from tests.engines.manifest import find_manifest

from . import tensorrt_config
from .errors import CUDAError, Misuse
from .gpu import Gpu
from .install import bound, make_module
from .memory import PAGE
from .plans import Ranges, Shape, unpack
from .streams import Capture, Operation, Position, Stream
from .tensorrt_config import CudaGraphStrategy, EngineValidity, ExecutionContextAllocationStrategy, IRuntimeConfig


class TensorIOMode(IntEnum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class DataType(IntEnum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    INT64 = 8


TYPES: dict[str, tuple[DataType, Any]] = {
    "tensor(float)": (DataType.FLOAT, np.float32),
    "tensor(float16)": (DataType.HALF, np.float16),
    "tensor(int64)": (DataType.INT64, np.int64),
    "tensor(int32)": (DataType.INT32, np.int32),
    "tensor(bool)": (DataType.BOOL, np.bool_),
}


CONTEXT_BYTES = 4096
"""What each execution context takes of the device's memory."""

DATA_DEPENDENT_OPS = {"Compress", "NonMaxSuppression", "NonZero", "Unique"}
"""Nodes of ONNX whose outputs have sizes that depend on data."""


class ILogger:
    class Severity(IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class Dims:
    """A shape that is a sequence and not a tuple."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)


class IOutputAllocator:
    """To be subclassed, with `reallocate_output_async` (or `reallocate_output`) and `notify_shape`."""

    def __init__(self) -> None:
        self._made = True


class Runtime:
    _gpu: Gpu

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine | None":
        try:
            self._gpu.enter("Runtime.deserialize_cuda_engine", current=True)
            self._gpu.use_runtime()
            kind = self._gpu.kinds["ICudaEngine"]
            return kind(self._gpu, self._logger, *unpack(bytes(serialized_engine), self._gpu.plans))  # type: ignore[no-any-return]
        except (CUDAError, ValueError) as error:
            return _complain(self._logger, "IRuntime::deserializeCudaEngine: Error Code 1: ", error)

    def get_engine_validity(self, buffer: bytes) -> tuple[EngineValidity, int]:
        self._gpu.enter("Runtime.get_engine_validity")
        verdict, diagnostics = self._gpu.verdict
        return EngineValidity[verdict], diagnostics


class ICudaEngine:
    def __init__(self, gpu: Gpu, logger: ILogger, onnx: bytes, facts: Mapping[str, Any]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._gpu = gpu
        self._logger = logger
        self._onnx = onnx
        gpu.use_for_library(len(onnx))
        self._session = ort.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
        self._data_dependent_tensors = _data_dependent_tensors(onnx)
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._outputs = {value.name: value for value in self._session.get_outputs()}
        self._profiles: Sequence[Ranges] = facts["profiles"]
        self._facts = facts
        self._name = _structure(onnx)
        self._budget = int(facts["streamable"])
        self._contexts: WeakSet[IExecutionContext] = WeakSet()
        self._shapes: dict[tuple[Shape, ...], dict[str, Shape]] = {}

    def __del__(self) -> None:
        self._gpu.use_runtime()
        self._gpu.use_for_library(-len(self._onnx))

    @property
    def _aliases(self) -> Mapping[str, str]:
        """The aliases of outputs, by name; none in versions of the library without aliases."""
        return self._facts["aliases"] if hasattr(self, "get_aliased_input_tensor") else {}

    def _profile_sms(self, profile: int) -> int | None:
        """The SMs that a profile was built for, if that was on a green context's stream."""
        return dict(enumerate(self._facts["built_for"])).get(profile)

    @property
    def num_io_tensors(self) -> int:
        return len(self._inputs) + len(self._outputs)

    @property
    def num_aux_streams(self) -> int:
        return int(self._facts["aux_streams"])

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    @property
    def device_memory_size_v2(self) -> int:
        return CONTEXT_BYTES

    def get_engine_stat(self, stat: int = 0) -> int:
        return len(self._onnx)

    @property
    def streamable_weights_size(self) -> int:
        return int(self._facts["streamable"])

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, value: int) -> None:
        if self._contexts:
            raise Misuse("the library refuses another budget while a context lives")
        self._budget = value

    def get_weight_streaming_automatic_budget(self) -> int:
        return self._budget

    def get_tensor_name(self, index: int) -> str:
        return [*self._inputs, *self._outputs][index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims([size if isinstance(size, int) else -1 for size in self._value(name).shape])

    def get_tensor_dtype(self, name: str) -> DataType:
        return TYPES[self._value(name).type][0]

    def is_shape_inference_io(self, name: str) -> bool:
        return name in self._facts["shape_inputs"]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._facts["aliases"].get(name)  # type: ignore[no-any-return]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        return [Dims(shape) for shape in self._profiles[profile_index][name]]

    def create_runtime_config(self) -> IRuntimeConfig:
        self._gpu.enter("ICudaEngine.create_runtime_config")
        kind = self._gpu.kinds["IRuntimeConfig"]
        return kind(self._gpu, ref(self)) if issubclass(kind, IRuntimeConfig) else kind(self._gpu)  # type: ignore[no-any-return]

    def create_execution_context(
        self,
        runtime_config: IRuntimeConfig | ExecutionContextAllocationStrategy | None = None,
        *,
        strategy: ExecutionContextAllocationStrategy | None = None,
    ) -> "IExecutionContext | None":
        """Two overloads: of a configuration, or of an allocation strategy alone."""
        try:
            self._gpu.enter("ICudaEngine.create_execution_context", current=True)
        except CUDAError as error:
            return _complain(self._logger, "ICudaEngine::createExecutionContext: Error Code 1: ", error)
        config = IRuntimeConfig(self._gpu)
        if isinstance(runtime_config, IntEnum):
            strategy = runtime_config
        elif runtime_config is not None:
            config = runtime_config
        if strategy is not None:
            config.set_execution_context_allocation_strategy(strategy)
        return self._gpu.kinds["IExecutionContext"](self._gpu, self, self._logger, config)  # type: ignore[no-any-return]

    def _value(self, name: str) -> Any:
        return self._inputs[name] if name in self._inputs else self._outputs[name]

    def _takes(self, name: str, shape: Shape, profile: int) -> bool:
        declared = tuple(self.get_tensor_shape(name))
        least, _, most = self._profiles[profile].get(name, (shape,) * 3)
        fits = len(shape) == len(declared) and all(dim in (-1, size) for dim, size in zip(declared, shape, strict=True))
        return fits and all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))

    def _data_dependent_dims(self, name: str) -> list[int]:
        """The data-dependent dimensions of an output: those without an input's name, if it follows from DATA_DEPENDENT_OPS."""
        known = {size for value in self._inputs.values() for size in value.shape}
        sizes = self._outputs[name].shape if name in self._data_dependent_tensors else []
        return [at for at, size in enumerate(sizes) if not isinstance(size, int) and size not in known]

    @property
    def _has_data_dependent_outputs(self) -> bool:
        return any(self._data_dependent_dims(name) for name in self._outputs)

    def _run(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self._outputs, self._session.run(None, dict(arrays)), strict=True))

    def _output_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The output shapes for these input shapes, -1 where they depend on data."""
        key = tuple(shapes[name] for name in self._inputs)
        if key not in self._shapes:
            found = {name: list(array.shape) for name, array in self._run(self._probe(np.zeros, shapes)).items()}
            for name, shape in found.items():
                for at in self._data_dependent_dims(name):
                    shape[at] = -1
            self._shapes[key] = {name: tuple(shape) for name, shape in found.items()}
        return self._shapes[key]

    def _most_bytes(self, name: str, shapes: Mapping[str, Shape]) -> int:
        """An upper bound for inputs of these shapes: the plan's, or the maximum for zeros, ones and different numbers."""
        if name in self._facts["bounds"]:
            return int(self._facts["bounds"][name])
        results = [self._run(self._probe(make, shapes))[name] for make in (np.zeros, np.ones, _different)]
        return max(int(array.nbytes) for array in results)

    def _probe(self, make: Callable[..., Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
        return {name: make(shapes[name], TYPES[value.type][1]) for name, value in self._inputs.items()}


class IExecutionContext:
    def __init__(self, gpu: Gpu, engine: ICudaEngine, logger: ILogger, config: IRuntimeConfig) -> None:
        self.in_flight = 0
        self.enqueued = 0
        """Of those in flight, what was enqueued and not replayed by a graph. The host changes nothing that a graph has
        recorded: on an H100, TensorRT-RTX 1.6.1 answered 4,551 replays right while shapes were set and captured (2026-11-22).
        """
        self._gpu = gpu
        self._engine = engine
        self._logger = logger
        self._config = config
        self._shapes = {name: tuple(value.shape) for name, value in engine._inputs.items() if _is_fixed(value.shape)}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        self._ready: set[tuple[Shape, ...]] = set()
        self._ran, self._switch = Position(), Position()
        """The last inference, and the last switch of profiles."""
        self._profile = -1 if engine._contexts else 0
        self._generation = 0
        self._turn = Lock()
        self._extra: list[Stream] = []
        self._retained: list[Stream] = []
        """Those that the library made itself, of the main stream's green context: that has to live as long."""
        self._memory: tuple[int, int] | None = None
        engine._contexts.add(self)
        self._graphs_on: Any = None
        gpu.executions.add(self)
        managed = config.get_execution_context_allocation_strategy() == ExecutionContextAllocationStrategy.USER_MANAGED
        self._allocated = 0 if managed else CONTEXT_BYTES
        gpu.use_for_library(self._allocated)

    def __del__(self) -> None:
        self._gpu.log.append("IExecutionContext.__del__")
        self._gpu.use_for_library(-self._allocated)
        if (self.in_flight or self._switch.in_flight) and not self._gpu.lost:
            raise Misuse("an execution context was destroyed with work in flight, or before its profile was switched")
        for stream in self._retained:
            self._gpu.destroy_stream(stream)

    def get_runtime_config(self) -> IRuntimeConfig:
        return self._config

    @property
    def active_optimization_profile(self) -> int:
        return self._profile

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Graphs that were captured before become invalid, which the library does not report."""
        with self._exclusive():
            return self._set_optimization_profile(profile_index, stream_handle)

    def _set_optimization_profile(self, profile_index: int, stream_handle: int) -> bool:
        self._touch("set_optimization_profile_async", self.in_flight)
        if self._gpu.building:
            raise Misuse("a profile is switched during a build: it keeps the interpreter, which the build's logger waits for")
        stream = self._gpu.find_stream(stream_handle)
        try:
            self._gpu.enter("IExecutionContext.set_optimization_profile_async", current=True)
            stream.put(Operation(lambda: None, of=self._switch))
        except CUDAError as error:
            return self._refuse("setOptimizationProfileAsync", str(error))
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            return self._refuse("setOptimizationProfileAsync", f"Profile index {profile_index} is out of range")
        self._profile, self._generation = profile_index, self._generation + 1
        self._shapes = {name: shape for name, shape in self._shapes.items() if _is_fixed(self._engine._inputs[name].shape)}
        self._ready.clear()
        return True

    def set_aux_streams(self, aux_streams: Sequence[int]) -> None:
        self._touch("set_aux_streams")
        self._extra = [self._gpu.find_stream(handle) for handle in aux_streams]

    def set_device_memory(self, memory: int, size: int) -> None:
        self._touch("set_device_memory")
        self._memory = memory, size

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        with self._exclusive():
            return self._set_input_shape(name, shape)

    def _set_input_shape(self, name: str, shape: Shape) -> bool:
        self._touch("set_input_shape")
        self._shapes.pop(name, None)
        try:
            self._gpu.enter("IExecutionContext.set_input_shape")
        except CUDAError as error:
            return self._refuse("setInputShape", str(error))
        if self._profile < 0 or not self._engine._takes(name, tuple(shape), self._profile):
            return self._refuse("setInputShape", f"Static dimension mismatch or outside of the profile: {list(shape)}")
        self._shapes[name] = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        self._touch("infer_shapes")
        try:
            self._gpu.enter("IExecutionContext.infer_shapes")
        except CUDAError as error:
            raise RuntimeError(f"infer_shapes: {error}") from error
        return [*self._gpu.unresolved, *(name for name in self._engine._inputs if name not in self._shapes)]

    def get_tensor_shape(self, name: str) -> Dims:
        if name in self._engine._inputs:
            return Dims(self._shapes[name])
        return Dims(self._engine._output_shapes(self._shapes)[name])

    def get_max_output_size(self, name: str) -> int:
        """An upper bound, also if the size depends on data; -1 only while profile or shapes are not set."""
        if self._profile < 0 or self._missing() or name not in self._engine._outputs:
            return -1
        return self._engine._most_bytes(name, self._shapes)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._touch("set_tensor_address")
        self._addresses[name] = int(memory)
        return True

    def get_tensor_address(self, name: str) -> int:
        return self._addresses.get(name, 0)

    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator | None) -> bool:
        """The context keeps it alive. `execute_async_v3` calls its methods, for an output of any kind."""
        self._touch("set_output_allocator")
        if name not in self._engine._outputs:
            return self._refuse("setOutputAllocator", f"{name} is not an output tensor")
        if output_allocator is None:
            self._allocators.pop(name, None)
        elif not hasattr(output_allocator, "_made"):
            raise TypeError("__init__() must be called when overriding __init__")
        else:
            self._allocators[name] = output_allocator
        return True

    def get_output_allocator(self, name: str) -> IOutputAllocator | None:
        return self._allocators.get(name)

    def execute_async_v3(self, stream_handle: int) -> bool:
        with self._exclusive():
            return self._execute(stream_handle)

    def _execute(self, stream_handle: int) -> bool:
        stream = self._gpu.find_stream(int(stream_handle))
        if self.in_flight and not stream.capture and not self._ran.precedes(stream):
            raise Misuse("one execution context ran on two streams at once")
        if self._switch.in_flight and not self._switch.precedes(stream):
            raise Misuse("an inference does not follow the switch of its optimization profile, which is work on a stream")
        try:
            self._gpu.enter("IExecutionContext.execute_async_v3", current=True)
            if missing := self._missing() or self._without_address():
                return self._refuse("enqueueV3", f"shape or address of {', '.join(missing)} is not set")
            if self._engine._facts["clusters"] and self._gpu.scattered.issuperset(stream.context.sms):
                return self._refuse("enqueueV3", "cuDNN graph execution error: CUDNN_STATUS_EXECUTION_FAILED, err 912")
            if apart := [name for name, of in self._engine._aliases.items() if not self._is_shared(name, of)]:
                return self._refuse("enqueueV3", f"{', '.join(apart)} is not where the input is that it is an alias of")
            return self._submit(stream)
        except CUDAError as error:
            return self._refuse("enqueueV3", str(error))

    @property
    def _names(self) -> list[str]:
        return [*self._engine._inputs, *self._engine._outputs]

    def _missing(self) -> list[str]:
        return [name for name in self._engine._inputs if name not in self._shapes]

    def _without_address(self) -> list[str]:
        """Tensors with neither an address nor an allocator."""
        return [name for name in self._names if not self._addresses.get(name) and name not in self._allocators]

    def _is_shared(self, output: str, alias: str) -> bool:
        return self._addresses.get(output) == self._addresses.get(alias)

    def _submit(self, stream: Stream) -> bool:
        shapes, generation = dict(self._shapes), self._generation
        key = tuple(shapes.values())
        self._check(stream)
        if stream.capture:
            self._check_capture(stream.capture, key)
        self._config._cache._compile(f"{self._engine._name} {key}")
        if self._engine._has_data_dependent_outputs:
            stream.run()  # The library waits for what decides the sizes, before `execute_async_v3` returns.
        addresses, limits = dict(self._addresses), self._allocate(stream)
        if (nothing := next((name for name, address in limits.items() if not address), None)) is not None:
            return self._refuse("enqueueV3", f"the output allocator gave no memory for {nothing}")
        addresses |= limits
        enqueued = stream.capture is None
        self.enqueued += enqueued
        stream.put(Operation(lambda: self._compute(shapes, addresses, generation, enqueued), of=self))
        if self._streams_weights:
            stream.run()
        self._ready.add(key)
        return True

    def _on(self, stream: Stream) -> None:
        """It was last run on this stream, enqueued or replayed by a graph."""
        self._ran._on(stream)

    def _allocate(self, stream: Stream) -> dict[str, int]:
        """Call each allocator for memory, at least a byte, and with the shape. Returns the addresses."""
        if not self._allocators:
            return {}
        if self._engine._has_data_dependent_outputs:
            results = self._engine._run(
                {name: self._read(name, shape, self._addresses[name]) for name, shape in self._shapes.items()}
            )
            shapes = {name: tuple(array.shape) for name, array in results.items()}
        else:
            shapes = self._engine._output_shapes(self._shapes)
        given = {}
        for name, allocator in self._allocators.items():
            size = max(1, int(np.prod(shapes[name])) * np.dtype(TYPES[self._engine._value(name).type][1]).itemsize)
            given[name] = self._ask(allocator, name, size, stream)
            if given[name]:
                allocator.notify_shape(name, Dims(shapes[name]))
        return given

    def _ask(self, allocator: Any, name: str, size: int, stream: Stream) -> int:
        """An exception of an allocator is printed and dropped, and counts as no memory."""
        before = self._addresses.get(name, 0)
        try:
            if hasattr(allocator, "reallocate_output_async"):
                return int(allocator.reallocate_output_async(name, before, size, PAGE, stream.handle) or 0)
            return int(allocator.reallocate_output(name, before, size, PAGE) or 0)
        except Exception:
            return 0

    @property
    def _streams_weights(self) -> bool:
        return self._engine._budget < self._engine.streamable_weights_size

    def _check(self, stream: Stream) -> None:
        extra, lacking = self._extra[: self._engine.num_aux_streams], self._engine.num_aux_streams - len(self._extra)
        if any(each.closed for each in extra):
            raise Misuse("an auxiliary stream was destroyed before the context that uses it")
        apart = any(each.context is not stream.context for each in extra)
        if self._gpu.kinds["green"]:
            if apart and any(each.context.green for each in (stream, *extra)):
                raise CUDAError("CUDA_ERROR_INVALID_VALUE: the streams are not all of the same green context")
            self._retained += [self._gpu.create_stream(stream.context) for _ in range(lacking - len(self._retained))]
            self._compare(stream)
        elif apart:
            raise Misuse("an auxiliary stream is on other SMs, which this library does not report")
        elif lacking > 0:
            raise Misuse("auxiliary streams that the library makes itself run on all SMs")
        if self._config._graphs == CudaGraphStrategy.WHOLE_GRAPH_CAPTURE:
            self._graphs_on = self._graphs_on or stream.context
            if self._graphs_on is not stream.context:
                raise Misuse("graphs of the library's own were made on another partition, whose SMs they keep")
        kind = self._config.get_execution_context_allocation_strategy()
        if kind == ExecutionContextAllocationStrategy.USER_MANAGED:
            address, size = self._memory or (0, 0)
            if size < self._engine.device_memory_size_v2:
                raise Misuse("a context has less memory than the engine needs")
            self._gpu.reach(address, size)

    def _compare(self, stream: Stream) -> None:
        """Warn if the profile was built for more SMs than the green context has, or for no number of SMs."""
        sms = self._engine._profile_sms(self._profile)
        if stream.context.green and sms is None:
            self._warn("the optimization profile was built without CUDA green context constraints")
        elif stream.context.green and sms is not None and len(stream.context.sms) < sms:
            self._warn(f"the stream has {len(stream.context.sms)} SMs and the optimization profile was built for {sms}")

    def _warn(self, text: str) -> None:
        self._logger.log(self._logger.Severity.WARNING, text)

    def _check_capture(self, capture: Capture, key: tuple[Shape, ...]) -> None:
        self._touch("a capture")
        if self._config._graphs == CudaGraphStrategy.WHOLE_GRAPH_CAPTURE:
            raise Misuse("a context with graphs of its own was captured")
        waits = self._streams_weights or self._engine._has_data_dependent_outputs
        if key not in self._ready or not self._gpu.capturable or waits:
            raise capture.spoil()  # What a shape needs when it runs first is allocated then.

    def _compute(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], generation: int, enqueued: bool) -> None:
        self.enqueued -= enqueued
        if generation != self._generation:
            raise Misuse("a graph was launched that was captured with another optimization profile")
        given = {name: self._read(name, shape, addresses[name]) for name, shape in shapes.items()}
        wrong = self._gpu.wrong_for(tuple(shapes.values()))
        for name, array in self._engine._run(given).items():
            if wrong:
                array = np.roll(array, 1)
            self._gpu.write(addresses[name], np.ascontiguousarray(array).tobytes())

    def _read(self, name: str, shape: Shape, address: int) -> Any:
        dtype = np.dtype(TYPES[self._engine._value(name).type][1])
        return np.frombuffer(self._gpu.read(address, int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Only one thread at a time may use a context."""
        if not self._turn.acquire(blocking=False):
            raise Misuse("two threads used one execution context at once")
        try:
            yield
        finally:
            self._turn.release()

    def _touch(self, what: str, in_flight: int | None = None) -> None:
        if count := self.enqueued if in_flight is None else in_flight:
            raise Misuse(f"TensorRT contract: {what} with {count} inferences in flight")

    def _refuse(self, what: str, why: str) -> bool:
        return bool(_complain(self._logger, f"IExecutionContext::{what}: Error Code 3: ", why))


def _data_dependent_tensors(onnx: bytes) -> set[str]:
    """The tensors of a model that follow, over any number of nodes, from one of DATA_DEPENDENT_OPS."""
    found: set[str] = set()
    for node in load_model_from_string(onnx).graph.node:  # They are sorted: what a node takes comes before it.
        if node.op_type in DATA_DEPENDENT_OPS or found & set(node.input):
            found |= set(node.output)
    return found


def _different(shape: Shape, dtype: Any) -> Any:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def library(gpu: Gpu, name: str = "tensorrt_rtx", version: str = "", **others: Any) -> ModuleType:
    """The newest known library of this name and version as a module for this GPU, with the members in its manifest only.

    `others` are further names in it, or None for names that it is to lack.
    """
    manifest = find_manifest(name, version)
    ours = bound(sys.modules[__name__], gpu) | bound(tensorrt_config, gpu)
    kinds = {key: _restricted_class(kind, manifest["classes"].get(key, {})) for key, kind in ours.items()}
    gpu.kinds = {**kinds, "green": (name, manifest["version"].split(".")[0]) == ("tensorrt", "11")}
    there = {key: kind for key, kind in {**kinds, **others}.items() if key in manifest["classes"] and kind is not None}
    return make_module(name, {"__version__": manifest["version"], **there})


def _restricted_class(kind: Any, members: Mapping[str, Any]) -> Any:
    """A class without those of its public members that a version lacks; the class itself where it lacks none."""
    known = {*members.get("methods", {}), *members.get("properties", {}), *members.get("enumerations", {})}
    known |= {*members.get("overridden", {}), *members.get("values", {})}
    lacking = {member for base in kind.__mro__[:-1] for member in vars(base) if not member.startswith("_")} - known
    if not lacking or issubclass(kind, IntEnum):
        return kind
    own = {key: value for base in reversed(kind.__mro__[:-1]) for key, value in vars(base).items()}
    dropped = {*lacking, "__dict__", "__weakref__"}
    return type(kind.__name__, (), {key: value for key, value in own.items() if key not in dropped})


def _is_fixed(dims: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in dims)


def _structure(onnx: bytes) -> str:
    """What kernels depend on: everything but the weights."""
    model = load_model_from_string(onnx)
    del model.graph.initializer[:]
    return hashlib.sha256(model.SerializeToString()).hexdigest()[:8]


def _complain(logger: Any, where: str, why: object) -> Any:
    logger.log(logger.Severity.ERROR, f"{where}{why}")
