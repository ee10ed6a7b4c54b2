"""A simulated TensorRT-RTX: plans that carry an ONNX, which ONNX Runtime computes when the stream comes to it.

What the library answers with False and a message is answered so here; what it calls undefined behaviour raises Misuse.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort

from .errors import CUDAError, Misuse
from .gpu import Gpu
from .install import bound, make_module
from .streams import Operation, Stream

MAGIC = b"simulated plan\n"
Shape = tuple[int, ...]
Ranges = Mapping[str, Sequence[Shape]]
"""The smallest, best and largest shape of each dynamic input."""


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


class CudaGraphStrategy(IntEnum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class DynamicShapesKernelSpecializationStrategy(IntEnum):
    LAZY = 0
    EAGER = 1
    NONE = 2


TYPES: dict[str, tuple[DataType, Any]] = {
    "tensor(float)": (DataType.FLOAT, np.float32),
    "tensor(float16)": (DataType.HALF, np.float16),
    "tensor(int64)": (DataType.INT64, np.int64),
    "tensor(int32)": (DataType.INT32, np.int32),
    "tensor(bool)": (DataType.BOOL, np.bool_),
}


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


class IRuntimeConfig:
    def __init__(self) -> None:
        self._graphs = CudaGraphStrategy.DISABLED
        self._kernels = DynamicShapesKernelSpecializationStrategy.LAZY

    @property
    def cuda_graph_strategy(self) -> CudaGraphStrategy:
        return self._graphs

    @cuda_graph_strategy.setter
    def cuda_graph_strategy(self, value: CudaGraphStrategy) -> None:
        self._graphs = CudaGraphStrategy(value)

    @property
    def dynamic_shapes_kernel_specialization_strategy(self) -> DynamicShapesKernelSpecializationStrategy:
        return self._kernels

    @dynamic_shapes_kernel_specialization_strategy.setter
    def dynamic_shapes_kernel_specialization_strategy(self, value: DynamicShapesKernelSpecializationStrategy) -> None:
        self._kernels = DynamicShapesKernelSpecializationStrategy(value)


class Runtime:
    _gpu: Gpu

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine | None":
        try:
            self._gpu.enter("Runtime.deserialize_cuda_engine", current=True)
            return ICudaEngine(self._gpu, self._logger, *_unpack(bytes(serialized_engine), self._gpu.plans))
        except (CUDAError, ValueError) as error:
            return _complain(self._logger, "IRuntime::deserializeCudaEngine: Error Code 1: ", error)


class ICudaEngine:
    def __init__(self, gpu: Gpu, logger: ILogger, onnx: bytes, facts: Mapping[str, Any]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._gpu = gpu
        self._logger = logger
        self._session = ort.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._outputs = {value.name: value for value in self._session.get_outputs()}
        self._ranges: Ranges = facts["ranges"]
        self._aux = facts["aux_streams"]
        self._shapes: dict[tuple[Shape, ...], dict[str, Shape]] = {}

    @property
    def num_io_tensors(self) -> int:
        return len(self._inputs) + len(self._outputs)

    @property
    def num_aux_streams(self) -> int:
        return int(self._aux)

    def get_tensor_name(self, index: int) -> str:
        return [*self._inputs, *self._outputs][index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims([size if isinstance(size, int) else -1 for size in self._value(name).shape])

    def get_tensor_dtype(self, name: str) -> DataType:
        return TYPES[self._value(name).type][0]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        return [Dims(shape) for shape in self._ranges[name]]

    def create_runtime_config(self) -> IRuntimeConfig:
        self._gpu.enter("ICudaEngine.create_runtime_config")
        return IRuntimeConfig()

    def create_execution_context(self, runtime_config: IRuntimeConfig | None = None) -> "IExecutionContext | None":
        try:
            self._gpu.enter("ICudaEngine.create_execution_context", current=True)
        except CUDAError as error:
            return _complain(self._logger, "ICudaEngine::createExecutionContext: Error Code 1: ", error)
        return IExecutionContext(self._gpu, self, self._logger, runtime_config or IRuntimeConfig())

    def _value(self, name: str) -> Any:
        return self._inputs[name] if name in self._inputs else self._outputs[name]

    def _takes(self, name: str, shape: Shape) -> bool:
        declared = tuple(self.get_tensor_shape(name))
        least, _, most = self._ranges.get(name, (shape,) * 3)
        fits = len(shape) == len(declared) and all(dim in (-1, size) for dim, size in zip(declared, shape, strict=True))
        return fits and all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))

    def _depends_on_data(self, name: str) -> bool:
        """An output has a size that no input has a name for."""
        known = {size for value in self._inputs.values() for size in value.shape}
        return any(not isinstance(size, int) and size not in known for size in self._outputs[name].shape)

    def _run(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self._outputs, self._session.run(None, dict(arrays)), strict=True))

    def _output_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """What comes of zeros of these shapes."""
        key = tuple(shapes[name] for name in self._inputs)
        if key not in self._shapes:
            zeros = {name: np.zeros(shapes[name], TYPES[value.type][1]) for name, value in self._inputs.items()}
            self._shapes[key] = {name: array.shape for name, array in self._run(zeros).items()}
        return self._shapes[key]


class IExecutionContext:
    def __init__(self, gpu: Gpu, engine: ICudaEngine, logger: ILogger, config: IRuntimeConfig) -> None:
        self.in_flight = 0
        self._gpu = gpu
        self._engine = engine
        self._logger = logger
        self._config = config
        self._shapes = {name: tuple(value.shape) for name, value in engine._inputs.items() if _is_fixed(value.shape)}
        self._addresses: dict[str, int] = {}
        self._ready: set[tuple[Shape, ...]] = set()
        self._stream: Stream | None = None
        gpu.executions.add(self)

    def __del__(self) -> None:
        self._gpu.log.append("IExecutionContext.__del__")
        if self.in_flight and not self._gpu.lost:
            raise Misuse("an execution context was destroyed with work in flight")

    def get_runtime_config(self) -> IRuntimeConfig:
        return self._config

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        self._touch("set_input_shape")
        self._shapes.pop(name, None)
        if not self._engine._takes(name, tuple(shape)):
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
        if self._engine._depends_on_data(name) or self._missing():
            return -1
        shape = self._engine._output_shapes(self._shapes)[name]
        return int(np.prod(shape)) * np.dtype(TYPES[self._engine._value(name).type][1]).itemsize

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._touch("set_tensor_address")
        self._addresses[name] = int(memory)
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        stream = self._gpu.find_stream(int(stream_handle))
        if self.in_flight and stream is not self._stream:
            raise Misuse("one execution context ran on two streams at once")
        try:
            self._gpu.enter("IExecutionContext.execute_async_v3", current=True)
            if missing := self._missing() or [name for name in self._names if name not in self._addresses]:
                return self._refuse("enqueueV3", f"shape or address of {', '.join(missing)} is not set")
            return self._submit(stream)
        except CUDAError as error:
            return self._refuse("enqueueV3", str(error))

    @property
    def _names(self) -> list[str]:
        return [*self._engine._inputs, *self._engine._outputs]

    def _missing(self) -> list[str]:
        return [name for name in self._engine._inputs if name not in self._shapes]

    def _submit(self, stream: Stream) -> bool:
        if stream.capture:
            self._touch("a capture")
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        key = tuple(shapes.values())
        if stream.capture and (key not in self._ready or not self._gpu.capturable):
            raise stream.capture.spoil()  # What a shape needs when it runs first is allocated then.
        stream.put(Operation(lambda: self._compute(shapes, addresses), of=self))
        self._ready.add(key)
        self._stream = stream
        return True

    def _compute(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        given = {name: self._read(name, shape, addresses[name]) for name, shape in shapes.items()}
        for name, array in self._engine._run(given).items():
            array = np.ascontiguousarray(array)
            self._gpu.write(addresses[name], array.tobytes())

    def _read(self, name: str, shape: Shape, address: int) -> Any:
        dtype = np.dtype(TYPES[self._engine._value(name).type][1])
        return np.frombuffer(self._gpu.read(address, int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)

    def _touch(self, what: str) -> None:
        if self.in_flight:
            raise Misuse(f"TensorRT contract: {what} with {self.in_flight} inferences in flight")

    def _refuse(self, what: str, why: str) -> bool:
        return bool(_complain(self._logger, f"IExecutionContext::{what}: Error Code 3: ", why))


def make_plan(onnx: bytes, ranges: Ranges | None = None, aux_streams: int = 0) -> bytes:
    """A plan that the simulated library can load."""
    facts = {"ranges": {name: [list(shape) for shape in shapes] for name, shapes in (ranges or {}).items()}}
    return b"".join([MAGIC, json.dumps({**facts, "aux_streams": aux_streams}).encode(), b"\n", onnx])


def library(gpu: Gpu, name: str = "tensorrt_rtx", **others: Any) -> ModuleType:
    """The library as a module for this GPU; `others` are further names in it, or None for those that it lacks."""
    contents = {"__version__": "1.6.1.120", **bound(sys.modules[__name__], gpu), **others}
    return make_module(name, {key: value for key, value in contents.items() if value is not None})


def _unpack(plan: bytes, known: Mapping[bytes, bytes]) -> tuple[bytes, Mapping[str, Any]]:
    if plan in known:
        return known[plan], {"ranges": {}, "aux_streams": 0}
    if not plan.startswith(MAGIC):
        raise ValueError("Serialization (Magic tag does not match)")
    facts, _, onnx = plan.removeprefix(MAGIC).partition(b"\n")
    return onnx, json.loads(facts)


def _is_fixed(dims: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in dims)


def _complain(logger: Any, where: str, why: object) -> Any:
    logger.log(logger.Severity.ERROR, f"{where}{why}")
