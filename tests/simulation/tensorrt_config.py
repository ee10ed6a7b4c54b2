"""The configuration of a simulated TensorRT-RTX's contexts, and the kernel cache that they may share."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from .errors import Misuse
from .gpu import Gpu

COMPILING = "compiling a kernel"
"""What the log has for each kernel that is in no cache."""


class CudaGraphStrategy(IntEnum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class DynamicShapesKernelSpecializationStrategy(IntEnum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class ExecutionContextAllocationStrategy(IntEnum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class EngineValidity(IntEnum):
    VALID = 0
    SUBOPTIMAL = 1
    INVALID = 2


class EngineInvalidityDiagnostics(IntEnum):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2
    OLD_CUDA_DRIVER = 4
    OLD_CUDA_RUNTIME = 8
    INSUFFICIENT_GPU_MEMORY = 16
    MALFORMED_ENGINE = 32
    CUDA_ERROR = 64


class IRuntimeCache:
    """Kernels by name. It adds what another one of the same GPU and driver has serialised to its own.

    Contexts may share it, also those of other engines, but not two threads at once: the real one then crashes the process in
    `execute_async_v3`. So it does where it is serialised after the engine was freed that it was made of.
    """

    def __init__(self, gpu: Gpu, engine: Callable[[], object]) -> None:
        self._gpu = gpu
        self._engine = engine
        self._kernels: set[str] = set()
        self._loaded = 0
        self._in_memory: set[str] = set()
        self._turn = threading.RLock()

    def __del__(self) -> None:
        self._gpu.log.append("IRuntimeCache.__del__")
        self._gpu.use_for_driver(-self._loaded)

    def serialize(self) -> bytes | None:
        """None in a thread without a context, where the real one logs that it "failed to capture the device fingerprint"."""
        self._gpu.enter("IRuntimeCache.serialize")
        if not self._gpu.current():
            return None
        if self._engine() is None:
            raise Misuse("a cache of kernels was saved after the engine was freed that it was made of")
        with self._exclusive():
            return json.dumps([self._gpu.uuid, sorted(self._kernels)]).encode() if self._kernels else b""

    def deserialize(self, blob: bytes) -> bool:
        self._gpu.enter("IRuntimeCache.deserialize", current=True)
        try:
            uuid, kernels = json.loads(bytes(blob))
        except ValueError:
            return False
        with self._exclusive():
            if uuid == self._gpu.uuid:
                self._kernels |= set(kernels)
        return bool(uuid == self._gpu.uuid)

    def _compile(self, kernel: str) -> None:
        """Called by every use of a kernel: the first one loads it, and compiles it unless that was done. A test can hold a
        thread here with `meanwhile(COMPILING, ...)`.
        """
        with self._exclusive():
            if kernel not in self._kernels:
                self._gpu.enter(COMPILING)
                self._kernels.add(kernel)
                self._gpu.compiled.append(kernel)
            if kernel not in self._in_memory:
                self._in_memory.add(kernel)
                self._loaded += self._gpu.kernel_bytes
                self._gpu.use_for_driver(self._gpu.kernel_bytes)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise Misuse("two threads used one cache of kernels at once")
        try:
            yield
        finally:
            self._turn.release()


class IRuntimeConfig:
    def __init__(self, gpu: Gpu, engine: Callable[[], object] = lambda: True) -> None:
        self._gpu = gpu
        self._engine = engine
        self._graphs = CudaGraphStrategy.DISABLED
        self._kernels = DynamicShapesKernelSpecializationStrategy.LAZY
        self._allocation = ExecutionContextAllocationStrategy.STATIC
        self._cache = IRuntimeCache(gpu, engine)

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

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self._allocation = ExecutionContextAllocationStrategy(strategy)

    def get_execution_context_allocation_strategy(self) -> ExecutionContextAllocationStrategy:
        return self._allocation

    def create_runtime_cache(self) -> IRuntimeCache:
        self._gpu.enter("IRuntimeConfig.create_runtime_cache")
        return IRuntimeCache(self._gpu, self._engine)

    def get_runtime_cache(self) -> IRuntimeCache:
        return self._cache

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self._cache = cache
        return self._gpu.takes_caches
