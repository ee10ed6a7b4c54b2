"""The one module that imports TensorRT: it finds the library, its version and its features, and collects its messages.

There are two libraries under four module names, and features come and go between versions. So each feature is looked up by
name and never inferred from a version. Nothing is imported before `find_tensorrt`.

While any of its objects exists, the library keeps the first logger that it was given and ignores later ones. So who receives a
message is decided by the thread that caused it, and not by the logger: see `collect_messages`.
"""

import importlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from partitions.cuda.kernel_loads import KERNEL_LOADS
from partitions.installing import install_command

from ..cuda.locks import SharedLock
from ..datatypes import DATATYPES, DataType
from ..errors import ModelRefused

log = logging.getLogger("greenlane.tensorrt")

LIBRARIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"), "tensorrt": ("tensorrt", "tensorrt_bindings")}
)
"""Each library and the modules it may be installed as, in the order they are tried."""

_TITLES = {"tensorrt_rtx": "TensorRT-RTX", "tensorrt": "TensorRT"}

FEATURES = {
    "runtime_config": "IRuntimeConfig",
    "allocation_strategy": "IRuntimeConfig.set_execution_context_allocation_strategy",
    "cuda_graph_strategy": "IRuntimeConfig.cuda_graph_strategy",
    "dynamic_shapes_kernel_specialization_strategy": "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "cache_path": "IRuntimeConfig.create_runtime_cache",
    "weight_streaming_budget": "ICudaEngine.weight_streaming_budget_v2",
    "compute_capabilities": "IBuilderConfig.num_compute_capabilities",
    "profile_stream": "IOptimizationProfile.profile_stream",
    "engine_validity": "Runtime.get_engine_validity",
}
"""Each feature and the class, or the attribute of a class, that exists where the library has the feature."""

_DATATYPES = {"FLOAT": "FP32", "HALF": "FP16"} | {name: name for name in ("BF16", "INT8", "INT32", "INT64", "BOOL", "UINT8")}

_LEVELS = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING, "INFO": logging.INFO}


class Message(NamedTuple):
    """A log message of the library: INTERNAL_ERROR, ERROR, WARNING or INFO, and its text."""

    severity: str
    text: str


LIBRARY_LOCK = SharedLock()
"""For calls into the library that may take long, as its internal mutex is one for the whole process.

Problem: some calls release the GIL and hold the mutex (loading, creating contexts, compiling); others hold the GIL and wait
for the mutex. A thread that holds the mutex and logs needs the GIL for that, so two such threads wait for each other forever.

Solution: the first kind shares this lock, and the second kind takes it exclusively.
"""

_MESSAGES: ContextVar[list[Message] | None] = ContextVar("greenlane_tensorrt_messages", default=None)


@dataclass(frozen=True)
class TensorRT:
    """A library that was found. `library` is `tensorrt_rtx` or `tensorrt`; its objects are created with `logger`."""

    module: Any = field(repr=False)
    library: str
    version: str
    features: frozenset[str]
    logger: Any = field(repr=False)

    def __str__(self) -> str:
        return f"{_TITLES[self.library]} {self.version}"

    def deserialize(self, plan: bytes | memoryview, where: str) -> Any:
        """The engine of a plan. Needs a GPU; blocks, perhaps for seconds. Raises ModelRefused with the library's error."""
        with collect_messages() as messages, LIBRARY_LOCK.shared(), KERNEL_LOADS.hurrying():
            engine = self.module.Runtime(self.logger).deserialize_cuda_engine(plan)
        if engine is None:
            raise ModelRefused(f"{where}: {self} cannot load it: {first_error(messages)}")
        return engine

    def validity(self, plan: bytes | memoryview) -> tuple[str, tuple[str, ...]]:
        """The library's verdict, VALID, SUBOPTIMAL, INVALID or UNKNOWN, and its reasons; without a GPU, INVALID and none."""
        if "engine_validity" not in self.features:
            return "UNKNOWN", ()
        with collect_messages(), KERNEL_LOADS.hurrying():
            verdict, bits = self.module.Runtime(self.logger).get_engine_validity(plan)
        reasons = self.module.EngineInvalidityDiagnostics.__members__
        return verdict.name, tuple(name for name, reason in reasons.items() if int(reason) & bits)

    def facts(self, plan: bytes | memoryview) -> dict[str, int] | None:
        """Counts and sizes in bytes that only an engine on a GPU reports; None where it cannot be loaded. Blocks."""
        try:
            return engine_facts(self.deserialize(plan, "the plan"))
        except ModelRefused:
            return None

    def targets(self) -> Mapping[str, Any]:
        """The compute capabilities that plans can be built for, such as "8.6", and the library's value for each."""
        if "compute_capabilities" not in self.features:
            return {}
        members = self.module.ComputeCapability.__members__
        return {f"{name[2:-1]}.{name[-1]}": member for name, member in members.items() if name.startswith("SM")}

    def datatype(self, tensor: str, dtype: Any) -> DataType:
        """The protocol's data type for the library's. Raises ModelRefused naming the tensor where there is none."""
        if dtype.name not in _DATATYPES:
            raise ModelRefused(f"tensor {tensor!r} has type {dtype.name}, which the protocol does not have")
        return DATATYPES[_DATATYPES[dtype.name]]


def find_tensorrt(libraries: Sequence[str] = tuple(LIBRARIES)) -> TensorRT:
    """Import the first of these libraries that is installed. Blocks for about a second. Raises ModelRefused with what was
    tried.
    """
    tried = []
    for library in libraries:
        for name in LIBRARIES[library]:
            try:
                return _describe(library, importlib.import_module(name))
            except Exception as error:  # A broken library may raise any. Python also imports an empty folder of that name.
                tried.append(f"{name}: {error}")
    command = f"{install_command('cpu,rtx')} (or cpu,tensorrt)"
    raise ModelRefused(f"no TensorRT is installed; run {command} ({'; '.join(tried)})")


@contextmanager
def collect_messages() -> Iterator[list[Message]]:
    """A list to which the library's messages that this thread causes are appended. Outside of such a block they are logged."""
    messages: list[Message] = []
    token = _MESSAGES.set(messages)
    try:
        yield messages
    finally:
        _MESSAGES.reset(token)


def first_error(messages: Sequence[Message]) -> str:
    """The first error among messages, cleaned; those after it are mostly consequences."""
    errors = (message.text for message in messages if message.severity.endswith("ERROR"))
    return clean_message(next(errors, "the library gave no reason"))


def clean_message(text: str) -> str:
    """An error without the function, source file and condition that only the library's authors need."""
    text = " ".join(text.split())
    if asserted := re.search(r'&& "(.+)"', text):
        return asserted[1]
    text = re.sub(r"^I\w+::\w+: Error Code \d+: ", "", text)
    text = re.sub(r"\s*\bIn \w+ at \S+:\d+ ?", "", text)
    return text.replace("((", "(").replace("))", ")")


def engine_facts(engine: Any) -> dict[str, int]:
    """Counts and sizes in bytes that only an engine on a GPU reports."""
    names = {
        "layers": "num_layers",
        "auxiliary_streams": "num_aux_streams",
        "device_memory": "device_memory_size_v2",
        "streamable_weights": "streamable_weights_size",
    }
    return {name: int(getattr(engine, attribute)) for name, attribute in names.items() if hasattr(engine, attribute)}


def _describe(library: str, module: Any) -> TensorRT:
    found = {feature for feature, path in FEATURES.items() if _has(module, path)}
    if "runtime_config" not in found and _has(module, "ExecutionContextAllocationStrategy"):
        found.add("allocation_strategy")  # `create_execution_context` takes it in place of a configuration.
    return TensorRT(module, library, module.__version__, frozenset(found), _logger(module))


def _has(module: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


def _logger(module: Any) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            on_message(severity.name, text)

    return Logger()


def on_message(severity: str, text: str) -> None:
    """Append a message to the thread's list, or log it. Called by the library, from any of its threads."""
    if severity not in _LEVELS or "differs from one already registered" in text:
        return  # There are thousands of verbose messages, and it is known that a second logger is ignored.
    messages = _MESSAGES.get()
    if messages is None:
        log.log(_LEVELS[severity], "%s", text)
    else:
        messages.append(Message(severity, text))
