"""Models: engines that are loaded once, and executors that are bound to partitions. Knows neither tenants nor HTTP."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from partitions import Device, Partition
from partitions.installing import install_command

from . import wire
from .base import Engine, Executor, Preparing, Recipe, Room, Streaming, Tensor, Work
from .chain import chain
from .datatypes import DATATYPES, DataType
from .errors import Cancelled, EngineError, ExecutionFailed, ModelRefused, OutputsTooLarge, TensorMismatch
from .loop import LoopEngine
from .memo import Memo
from .model_files.cache_folder import CacheFolder
from .settings import ONNX_RUNTIMES, Loop, RuntimeSettings, unsupported_by, unsupported_on_cpu
from .signature import Signature, TensorSpec
from .stepwise import StepwiseEngine, parts
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
    "on_stream",
    "parts",
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
    if path.suffix not in (".onnx", ".plan"):
        raise ModelRefused(f"{path}: no engine reads {path.suffix or 'files without a suffix'}; expected .onnx or .plan")
    if device is not None and device.kind == "cuda":
        engine = _load_tensorrt(path, device, settings, max_batch, builds)
    elif path.suffix == ".plan":
        raise ModelRefused(f"{path}: a plan needs a GPU, and this is a CPU; serve the ONNX file it was built from")
    else:
        engine = _load_onnx(path, settings)
    return _looped(path, engine, settings.loop) if settings and settings.loop else engine


def make_ahead(
    path: Path, device: Device, settings: RuntimeSettings, max_batch: int | None, builds: Builds, partition: Partition
) -> object:
    """Have other processes make what `load_engine` with the same arguments would wait for, and binding it to such a partition.

    Blocks, perhaps for minutes; loads nothing. Several threads may do this at once. Keep the result until the model is bound.
    On a CPU there is nothing to make. Raises ModelRefused and Cancelled, as `load_engine` would.
    """
    if device.kind != "cuda":
        return None
    from .tensorrt import load

    cuda: Any = device, partition
    return load.make_ahead(path, cuda[0], settings, max_batch, builds, cuda[1])


def unsupported(device: Device | None, asked: Mapping[str, object]) -> dict[str, str]:
    """Which of these settings, fields of RuntimeSettings, the library that serves from this device does not have, and why.

    What depends on the model, such as how many profiles it has, is not checked. May import TensorRT, so it may block. Raises
    ModelRefused where that is missing.
    """
    if device is not None and device.kind == "cuda":
        api = find_tensorrt()
        return unsupported_by(str(api), api.features, asked)
    return unsupported_on_cpu(asked)


def has_tensorrt() -> bool:
    """Whether TensorRT or TensorRT-RTX is installed. Imports nothing."""
    return any(find_spec(name) for names in LIBRARIES.values() for name in names)


def _looped(path: Path, engine: Engine, loop: Loop) -> Engine:
    try:
        return LoopEngine(engine, loop)
    except ModelRefused as error:
        engine.close()
        raise ModelRefused(f"{path}: {error}") from error


def _load_onnx(path: Path, settings: RuntimeSettings | None) -> Engine:
    """The only place that imports ONNX Runtime, when a model needs it."""
    try:
        effective = (settings or RuntimeSettings()).effective("ONNX Runtime", ONNX_RUNTIMES)
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
    return load_onnx(path, settings or RuntimeSettings())


def _load_tensorrt(
    path: Path, device: Device, settings: RuntimeSettings | None, max_batch: int | None, builds: Builds | None
) -> Engine:
    """The only place that imports TensorRT's package, when a GPU needs it."""
    try:
        from .tensorrt.load import load_tensorrt
    except ImportError as error:
        needed = f"{install_command('cpu,rtx')} (or cpu,tensorrt)"
        raise ModelRefused(f"{path}: serving from a GPU needs {needed} ({error})") from error
    cuda: Any = device  # A device of this kind is a CudaDevice.
    return load_tensorrt(path, cuda, settings or RuntimeSettings(), max_batch, builds)
