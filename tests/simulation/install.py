"""Installs the simulation for imports, and imports the real partitions.cuda, engines.cuda and engines.tensorrt on top of it."""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from . import core, driver, nvml, program_cache
from .errors import CUDAError
from .gpu import Gpu

OURS = tuple(
    f"partitions.cuda.{name}"
    for name in ("device", "driver", "green_contexts", "kernels", "memory_level", "sm_probe", "strain")
)
OURS += tuple(
    f"engines.cuda.{module}"
    for module in (
        "address_cache",
        "capture",
        "copies",
        "recipes",
        "resources",
        "sharing",
        "staging",
        "stream_order",
        "work",
    )
)
OURS += tuple(
    f"engines.tensorrt.{module}"
    for module in (
        "load",
        "chain",
        "context",
        "engine",
        "instance",
        "lifetime",
        "plan",
        "executor",
        "shapes",
    )
)
TENSORRT = ("tensorrt_rtx", "tensorrt_rtx_bindings", "tensorrt", "tensorrt_bindings")


@contextmanager
def installed(gpu: Gpu, library: ModuleType | None = None) -> Iterator[Any]:
    """While the block runs, this is the machine's only GPU; gives the module partitions.cuda.device as imported there.

    `library`, if given, is its only TensorRT: the result of `tensorrt.library`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", nvml.loader(gpu))
        for name, module in _modules(gpu).items():
            patch.setitem(sys.modules, name, module)
        for name in TENSORRT if library else ():
            patch.setitem(sys.modules, name, library if name == library.__name__ else None)
        for name in OURS:
            patch.setitem(sys.modules, name, ModuleType(name))
            del sys.modules[name]
        yield importlib.import_module("partitions.cuda.device")


def public(module: ModuleType) -> dict[str, Any]:
    """The classes and constants that a module of the simulation defines itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if name.startswith("CU_") or (isinstance(value, type) and value.__module__ == module.__name__)
    }


def bound(module: ModuleType, gpu: Gpu) -> dict[str, Any]:
    """The same, with classes that are created directly bound to the GPU."""
    return {name: _bound(value, gpu) for name, value in public(module).items()}


def _modules(gpu: Gpu) -> dict[str, ModuleType]:
    functions = driver.Driver(gpu)
    calls = {name: getattr(functions, name) for name in dir(functions) if name.startswith("cu")}
    bindings = make_module("cuda.bindings.driver", {**public(driver), **calls})
    errors = make_module("cuda.core._utils.cuda_utils", {"CUDAError": CUDAError, "handle_return": driver.handle_return})
    found = [
        make_module("cuda", {}),
        make_module("cuda.bindings", {"driver": bindings}),
        bindings,
        make_module("cuda.core", {**bound(core, gpu), "launch": core.Launch(gpu)}),
        make_module("cuda.core._utils", {"cuda_utils": errors}),
        make_module("cuda.core.utils", public(program_cache)),
        errors,
    ]
    return {module.__name__: module for module in found}


def _bound(value: Any, gpu: Gpu) -> Any:
    return type(value.__name__, (value,), {"_gpu": gpu}) if "_gpu" in vars(value).get("__annotations__", {}) else value


def make_module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    return module
