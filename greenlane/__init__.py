"""Greenlane as a library: partitions of a device, engines bound to them, and the server's application.

The names below are the public ones. Each is imported from its package when it is first used, so that `import greenlane`
loads neither ONNX Runtime, CUDA nor the web framework:

    import greenlane

    device = greenlane.open_device("cpu")
    with greenlane.load_engine("model.onnx", device) as engine: ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines import (
        Builds,
        Cancelled,
        DataType,
        Engine,
        EngineError,
        ExecutionFailed,
        Executor,
        ModelRefused,
        RuntimeSettings,
        Signature,
        Tensor,
        TensorMismatch,
        TensorSpec,
        has_tensorrt,
        load_engine,
        on_stream,
    )
    from partitions import (
        Device,
        DeviceLost,
        DeviceUnavailable,
        DoesNotFit,
        Misplaced,
        Move,
        Partition,
        PartitionError,
        PartitionManager,
        open_cpu,
        open_device,
    )
    from server.app import Application
    from server.config.file import load as load_config
    from server.config.schema import Config
    from server.config.tables import ConfigError

    __version__: str

__all__ = [
    "Application",
    "Builds",
    "Cancelled",
    "Config",
    "ConfigError",
    "DataType",
    "Device",
    "DeviceLost",
    "DeviceUnavailable",
    "DoesNotFit",
    "Engine",
    "EngineError",
    "ExecutionFailed",
    "Executor",
    "Misplaced",
    "ModelRefused",
    "Move",
    "Partition",
    "PartitionError",
    "PartitionManager",
    "RuntimeSettings",
    "Signature",
    "Tensor",
    "TensorMismatch",
    "TensorSpec",
    "__version__",
    "has_tensorrt",
    "load_config",
    "load_engine",
    "on_stream",
    "open_cpu",
    "open_device",
]

_OF_PARTITIONS = (
    *("Device", "DeviceLost", "DeviceUnavailable", "DoesNotFit", "Misplaced", "Move", "Partition", "PartitionError"),
    *("PartitionManager", "open_cpu", "open_device"),
)
_OF_SERVER = {
    "Application": ("server.app", "Application"),
    "Config": ("server.config.schema", "Config"),
    "ConfigError": ("server.config.tables", "ConfigError"),
    "load_config": ("server.config.file", "load"),
}


def __getattr__(name: str) -> Any:
    """Import a public name. Raises ImportError where another package hides the one that it comes from."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("greenlane")
    else:
        from .own import require_own_packages

        require_own_packages()
        module, attribute = _OF_SERVER.get(name, ("partitions" if name in _OF_PARTITIONS else "engines", name))
        value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
