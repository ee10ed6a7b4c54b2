"""What model: engines loaded once, and executors bound to partitions. Knows no tenants and no HTTP."""

from pathlib import Path

from . import wire
from .base import Engine, Executor, Room, Tensor, Work
from .datatypes import DATATYPES, DataType
from .errors import Cancelled, EngineError, ExecutionFailed, ModelRefused, TensorMismatch
from .signature import Signature, TensorSpec

__all__ = [
    "DATATYPES",
    "Cancelled",
    "DataType",
    "Engine",
    "EngineError",
    "ExecutionFailed",
    "Executor",
    "ModelRefused",
    "Room",
    "Signature",
    "Tensor",
    "TensorMismatch",
    "TensorSpec",
    "Work",
    "load_engine",
    "wire",
]


def load_engine(path: Path | str) -> Engine:
    """Load a model file; its suffix says with what: `.onnx` with ONNX Runtime. Blocks. Raises ModelRefused."""
    path = Path(path)
    if path.suffix == ".onnx":
        return _load_onnx(path)
    raise ModelRefused(f"{path}: no engine reads {path.suffix or 'files without a suffix'}; this version reads .onnx")


def _load_onnx(path: Path) -> Engine:
    """The one place where ONNX Runtime is imported, and only when there is a model for it."""
    try:
        from .onnx import load_onnx
    except ImportError as error:
        raise ModelRefused(f"{path}: ONNX Runtime is not installed; install greenlane[cpu] ({error})") from error
    return load_onnx(path)
