"""The one place that finds TensorRT: which library it is, its version, what it can do, and what it said when it failed.

There are two libraries under four names, and features come and go between their versions, so what is used is asked for
by name and never inferred from a version. Nothing is imported before `find_tensorrt`.

While any of its objects lives, the library keeps the first logger it was given and ignores later ones. So who hears a
message is decided by the thread that caused it, not by the logger: see `listening`.
"""

import importlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import RLock
from types import MappingProxyType
from typing import Any, NamedTuple

from ..datatypes import DATATYPES, DataType
from ..errors import ModelRefused
from .shared_lock import SharedLock

log = logging.getLogger("greenlane.tensorrt")

LIBRARIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"), "tensorrt": ("tensorrt", "tensorrt_bindings")}
)
"""Each library and the modules it may be installed as, in the order they are tried."""

_TITLES = {"tensorrt_rtx": "TensorRT-RTX", "tensorrt": "TensorRT"}

# Each feature and the class, or the class and its attribute, that is there where the library has it.
_FEATURES = {
    "runtime_config": "IRuntimeConfig",
    "allocation_strategy": "IRuntimeConfig.set_execution_context_allocation_strategy",
    "cuda_graph_strategy": "IRuntimeConfig.cuda_graph_strategy",
    "dynamic_shapes_kernel_specialization_strategy": "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "cache_path": "IRuntimeConfig.create_runtime_cache",
    "weight_streaming_budget": "ICudaEngine.weight_streaming_budget_v2",
    "compute_capabilities": "IBuilderConfig.num_compute_capabilities",
    "profile_stream": "IOptimizationProfile.profile_stream",
    "engine_validity": "Runtime.get_engine_validity",
    "stream_capturable": "IExecutionContext.is_stream_capturable",
}

_DATATYPES = {"FLOAT": "FP32", "HALF": "FP16"} | {name: name for name in ("BF16", "INT8", "INT32", "INT64", "BOOL", "UINT8")}

_LEVELS = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING, "INFO": logging.INFO}


class Message(NamedTuple):
    """Something the library said: INTERNAL_ERROR, ERROR, WARNING or INFO, and its words."""

    severity: str
    text: str


LIBRARY_USE = SharedLock()
"""For calls that may be long: the library is one for the process, and so is its internal mutex.

Shared by what lets go of the interpreter while it holds that mutex (loading, making contexts, compiling). Alone for what
keeps the interpreter while it waits for the mutex: beside a thread that holds the mutex and logs, for which it needs the
interpreter, neither would ever go on.
"""

EXECUTING = RLock()
"""Held while an execution compiles or is captured, until its graph is instantiated: one at a time in the process.

Two tenants of one engine that captured graphs at the same time crashed TensorRT-RTX 1.6.1 in `execute_async_v3`, in 3 of 3
runs on an H100 (2026-11-22), and in none of 3 one after the other. Graphs that are launched, and executions of shapes that
are compiled, do not take it.
"""

_LISTENER: ContextVar[list[Message] | None] = ContextVar("greenlane_tensorrt_listener", default=None)


@dataclass(frozen=True)
class TensorRT:
    """A library that was found. `library` is `tensorrt_rtx` or `tensorrt`, `logger` what its objects are made with."""

    module: Any = field(repr=False)
    library: str
    version: str
    features: frozenset[str]
    logger: Any = field(repr=False)

    def __str__(self) -> str:
        return f"{_TITLES[self.library]} {self.version}"

    def deserialize(self, plan: bytes | memoryview, where: str) -> Any:
        """The engine of a plan. Needs a GPU; blocks, perhaps for seconds. Raises ModelRefused with what the library said."""
        with listening() as heard, LIBRARY_USE.shared():
            engine = self.module.Runtime(self.logger).deserialize_cuda_engine(plan)
        if engine is None:
            raise ModelRefused(f"{where}: {self} cannot load it: {first_error(heard)}")
        return engine

    def validity(self, plan: bytes | memoryview) -> tuple[str, tuple[str, ...]]:
        """The library's verdict, VALID, SUBOPTIMAL, INVALID or UNKNOWN, and its reasons; without a GPU, INVALID for none."""
        if "engine_validity" not in self.features:
            return "UNKNOWN", ()
        with listening():
            verdict, bits = self.module.Runtime(self.logger).get_engine_validity(plan)
        reasons = self.module.EngineInvalidityDiagnostics.__members__
        return verdict.name, tuple(name for name, reason in reasons.items() if int(reason) & bits)

    def facts(self, plan: bytes | memoryview) -> dict[str, int] | None:
        """What only an engine on a GPU can say of itself, counts and sizes in bytes; None where it cannot be loaded. Blocks."""
        try:
            return engine_facts(self.deserialize(plan, "the plan"))
        except ModelRefused:
            return None

    def targets(self) -> Mapping[str, Any]:
        """The compute capabilities that plans can be built for, such as "8.6", and what the library calls them."""
        if "compute_capabilities" not in self.features:
            return {}
        members = self.module.ComputeCapability.__members__
        return {f"{name[2:-1]}.{name[-1]}": member for name, member in members.items() if name.startswith("SM")}

    def datatype(self, tensor: str, dtype: Any) -> DataType:
        """The protocol's data type for the library's. Raises ModelRefused naming the tensor where there is none."""
        if dtype.name not in _DATATYPES:
            raise ModelRefused(f"tensor {tensor!r} has type {dtype.name}, which the protocol has no name for")
        return DATATYPES[_DATATYPES[dtype.name]]


def find_tensorrt(libraries: Sequence[str] = tuple(LIBRARIES)) -> TensorRT:
    """Import the first of these libraries that is installed. Blocks, about a second. Raises ModelRefused naming those tried."""
    tried = []
    for library in libraries:
        for name in LIBRARIES[library]:
            try:
                return _describe(library, importlib.import_module(name))
            except (ImportError, OSError) as error:
                tried.append(f"{name}: {error}")
    raise ModelRefused(f"no TensorRT is installed; run scripts/install cpu,rtx (or cpu,tensorrt) ({'; '.join(tried)})")


@contextmanager
def listening() -> Iterator[list[Message]]:
    """A list of what the library says because of this thread, as it says it; what no one listens to is logged."""
    heard: list[Message] = []
    token = _LISTENER.set(heard)
    try:
        yield heard
    finally:
        _LISTENER.reset(token)


def first_error(heard: Sequence[Message]) -> str:
    """The first error among messages, without the places in the library's source; those after it are mostly its noise."""
    errors = (message.text for message in heard if message.severity.endswith("ERROR"))
    return tidy(next(errors, "the library gave no reason"))


def tidy(text: str) -> str:
    """An error without what only the library's authors need: the function, its source file and the condition that failed."""
    text = " ".join(text.split())
    if asserted := re.search(r'&& "(.+)"', text):
        return asserted[1]
    text = re.sub(r"^I\w+::\w+: Error Code \d+: ", "", text)
    text = re.sub(r"\s*\bIn \w+ at \S+:\d+ ?", "", text)
    return text.replace("((", "(").replace("))", ")")


def engine_facts(engine: Any) -> dict[str, int]:
    """What only an engine on a GPU can say: counts, and sizes in bytes."""
    names = {
        "layers": "num_layers",
        "auxiliary_streams": "num_aux_streams",
        "device_memory": "device_memory_size_v2",
        "streamable_weights": "streamable_weights_size",
    }
    return {name: int(getattr(engine, attribute)) for name, attribute in names.items() if hasattr(engine, attribute)}


def _describe(library: str, module: Any) -> TensorRT:
    found = frozenset(feature for feature, path in _FEATURES.items() if _has(module, path))
    return TensorRT(module, library, module.__version__, found, _logger(module))


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
            hear(severity.name, text)

    return Logger()


def hear(severity: str, text: str) -> None:
    """Pass one message on to who listens, or to the log. Called by the library, from any of its threads."""
    if severity not in _LEVELS or "differs from one already registered" in text:
        return  # Verbose messages are thousands; and that a second logger is ignored is what `listening` is for.
    heard = _LISTENER.get()
    if heard is None:
        log.log(_LEVELS[severity], "%s", text)
    else:
        heard.append(Message(severity, text))
