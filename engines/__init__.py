"""Models: engines that are loaded once, and executors that are bound to partitions. Knows neither tenants nor HTTP."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from partitions import Device, Partition
from partitions.installing import install_command

from . import wire
from .base import Engine, Executor, Preparing, Recipe, Room, Streaming, Tensor, Work
from .chain import chain
from .datatypes import DATATYPES, DataType
from .errors import Cancelled, EngineError, ExecutionFailed, ModelRefused, OutputsTooLarge, TensorMismatch
from .memo import Memo
from .model_files.cache_folder import CacheFolder
from .settings import ONNX_RUNTIMES, Loop, RuntimeSettings, unsupported_by, unsupported_on_cpu
from .signature import Signature, TensorSpec
from .stepwise import LoopEngine, StepwiseEngine, parts
from .streams import on_stream
from .tensorrt.api import LIBRARIES, find_tensorrt
from .tensorrt.building.builds import Builds
from .wiring import Step

__all__ = [
    "DATATYPES",
    "Builds",
    "CacheFolder",
    "Cancelled",
    "DataType",
    "Engine",
    "EngineError",
    "ExecutionFailed",
    "Executor",
    "Loop",
    "Memo",
    "ModelRefused",
    "OutputsTooLarge",
    "Preparing",
    "Recipe",
    "Room",
    "RuntimeSettings",
    "Signature",
    "Step",
    "StepwiseEngine",
    "Streaming",
    "Tensor",
    "TensorMismatch",
    "TensorSpec",
    "Work",
    "chain",
    "has_tensorrt",
    "load_engine",
    "make_ahead",
    "makes_ahead",
    "on_stream",
    "parts",
    "preload",
    "unsupported",
    "wire",
]


def load_engine(
    path: Path | str,
    device: Device | None = None,
    settings: RuntimeSettings | None = None,
    max_batch: int | None = None,
    builds: Builds | None = None,
) -> Engine:
    """Load a model file for a device, by default the CPU. Blocks. Raises ModelRefused.

    - `.onnx` runs on ONNX Runtime on a CPU. On a GPU it is built for TensorRT, once and in a child process, for batches of up
      to `max_batch` rows, or of the default of `engines.build`. `builds` says where plans are kept, by default in the model's
      folder, and raises Cancelled once it is closed.
    - `.plan` is what `engines.build` makes, or a bare TensorRT plan, and needs a GPU.

    A setting that the library does not have is a UserWarning. Refused are a kernel cache and a budget for weights that would
    have no effect, profiles for a model that is not built here, and `required` graphs where there are none.
    """
    path = Path(path)
    engine = _library(path, device).load(path, device, settings or RuntimeSettings(), max_batch, builds)
    return _looped(path, engine, settings.loop) if settings and settings.loop else engine


def make_ahead(
    path: Path, device: Device, settings: RuntimeSettings, max_batch: int | None, builds: Builds, partition: Partition
) -> object:
    """Have other processes make what `load_engine` with the same arguments would wait for, and binding it to such a partition.

    Blocks, perhaps for minutes; loads nothing. Several threads may do this at once. Keep the result until the model is bound.
    Raises ModelRefused and Cancelled, as `load_engine` would.
    """
    make = _library(path, device).make_ahead
    return make(path, device, settings, max_batch, builds, partition) if make else None


def makes_ahead(device: Device) -> bool:
    """Whether `make_ahead` has anything to make for models on this device."""
    return any(library.make_ahead for library in _able(device))


def unsupported(path: Path, device: Device | None, asked: Mapping[str, object]) -> dict[str, str]:
    """Which of these settings, fields of RuntimeSettings, the library of this file on this device does not have, and why.

    For an ensemble's folder, or a file that the device does not serve, that is the first library of the device. What depends
    on the model, such as how many profiles it has, is not checked. May import TensorRT, so it may block. Raises ModelRefused
    where that is missing.
    """
    able = _able(device)
    found = [library for library in able if path.suffix in library.files] or able
    return found[0].unsupported(asked) if found else {}


def has_tensorrt() -> bool:
    """Whether TensorRT or TensorRT-RTX is installed. Imports nothing."""
    return any(find_spec(name) for names in LIBRARIES.values() for name in names)


def preload() -> None:
    """Import what serves from a GPU, if it is installed, so that processes that are forked from this one have it.

    Blocks for a fraction of a second, or for seconds where the library is read from a disk. Starts no thread and uses no GPU:
    after a process has used CUDA, CUDA does not work in its forked children.
    """
    with suppress(Exception):  # What is missing or broken is said where a model is loaded, and cores are served without it.
        from .tensorrt import load  # noqa: F401

        find_tensorrt()


def _looped(path: Path, engine: Engine, loop: Loop) -> Engine:
    try:
        return LoopEngine(engine, loop)
    except ModelRefused as error:
        engine.close()
        raise ModelRefused(f"{path}: {error}") from error


class _Library(NamedTuple):
    """An engine library: the suffixes of its files, the kinds of devices that it serves them from, and what it is asked.

    The functions import its package, and nothing else does. `make_ahead` is None where a model has nothing to wait for.
    """

    files: tuple[str, ...]
    devices: tuple[str, ...]
    load: Callable[[Path, Any, RuntimeSettings, int | None, Builds | None], Engine]
    unsupported: Callable[[Mapping[str, object]], dict[str, str]]
    make_ahead: Callable[[Path, Any, RuntimeSettings, int | None, Builds, Any], object] | None = None


def _able(device: Device | None) -> list[_Library]:
    """The libraries that serve from this device."""
    return [library for library in _LIBRARIES if (device.kind if device else "cpu") in library.devices]


def _library(path: Path, device: Device | None) -> _Library:
    """The library that serves this file from this device. Raises ModelRefused."""
    for library in _able(device):
        if path.suffix in library.files:
            return library
    kinds = [kind for library in _LIBRARIES if path.suffix in library.files for kind in library.devices]
    if not kinds:
        expected = " or ".join(dict.fromkeys(suffix for library in _LIBRARIES for suffix in library.files))
        raise ModelRefused(f"{path}: no engine reads {path.suffix or 'files without a suffix'}; expected {expected}")
    if device is None or device.kind == "cpu":
        raise ModelRefused(f"{path}: a plan needs a GPU, and this is a CPU; serve the ONNX file it was built from")
    served = f"{path.suffix} from a device of kind {device.kind!r}"
    raise ModelRefused(f"{path}: no engine serves {served}; expected {' or '.join(kinds)}")


def _load_onnx(
    path: Path, device: Device | None, settings: RuntimeSettings, max_batch: int | None, builds: Builds | None
) -> Engine:
    try:
        effective = settings.effective("ONNX Runtime", ONNX_RUNTIMES)
    except ModelRefused as error:
        raise ModelRefused(f"{path}: {error}") from error
    if effective.graphs == "required":
        raise ModelRefused(f"{path}: graphs are required, but ONNX Runtime on a CPU has none; leave graphs 'on'")
    if effective.build_profiles:
        raise ModelRefused(f"{path}: build_profiles are for TensorRT, and ONNX Runtime runs any shape; leave them out")
    try:
        from .onnxruntime.engine import load_onnx
    except ImportError as error:
        raise ModelRefused(f"{path}: ONNX Runtime is not installed; run {install_command('cpu')} ({error})") from error
    return load_onnx(path, settings)


def _load_tensorrt(path: Path, device: Any, settings: RuntimeSettings, max_batch: int | None, builds: Builds | None) -> Engine:
    try:
        from .tensorrt.load import load_tensorrt
    except ImportError as error:
        needed = f"{install_command('cpu,rtx')} (or cpu,tensorrt)"
        raise ModelRefused(f"{path}: serving from a GPU needs {needed} ({error})") from error
    return load_tensorrt(path, device, settings, max_batch, builds)


def _make_ahead_of_tensorrt(*arguments: Any) -> object:
    from .tensorrt.load import make_ahead

    return make_ahead(*arguments)


def _unsupported_by_tensorrt(asked: Mapping[str, object]) -> dict[str, str]:
    api = find_tensorrt()
    return unsupported_by(str(api), api.features, asked)


_LIBRARIES = (
    _Library((".onnx", ".plan"), ("cuda",), _load_tensorrt, _unsupported_by_tensorrt, _make_ahead_of_tensorrt),
    _Library((".onnx",), ("cpu",), _load_onnx, unsupported_on_cpu),
)
