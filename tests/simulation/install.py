"""Puts the simulation where `import cuda.core` finds it, and imports the real partitions.cuda on top of it."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from . import core, driver
from .gpu import CUDAError, Gpu

OURS = ("partitions.cuda", "partitions.faults", "partitions.green", "partitions.smid")


@contextmanager
def installed(gpu: Gpu) -> Iterator[Any]:
    """While the block runs, this is the machine's only GPU; gives the module partitions.cuda as imported there."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in _modules(gpu).items():
            patch.setitem(sys.modules, name, module)
        for name in OURS:
            patch.setitem(sys.modules, name, ModuleType(name))
            del sys.modules[name]
        yield importlib.import_module("partitions.cuda")


def public(module: ModuleType) -> dict[str, Any]:
    """The classes and constants that a module of the simulation defines itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if name.startswith("CU_") or (isinstance(value, type) and value.__module__ == module.__name__)
    }


def _modules(gpu: Gpu) -> dict[str, ModuleType]:
    functions = driver.Driver(gpu)
    calls = {name: getattr(functions, name) for name in dir(functions) if name.startswith("cu")}
    bindings = _module("cuda.bindings.driver", {**public(driver), **calls})
    classes = {name: _bound(value, gpu) for name, value in public(core).items()}
    errors = _module("cuda.core._utils.cuda_utils", {"CUDAError": CUDAError, "handle_return": driver.handle_return})
    found = [
        _module("cuda", {}),
        _module("cuda.bindings", {"driver": bindings}),
        bindings,
        _module("cuda.core", {**classes, "launch": core.Launch(gpu)}),
        _module("cuda.core._utils", {"cuda_utils": errors}),
        errors,
    ]
    return {module.__name__: module for module in found}


def _bound(value: Any, gpu: Gpu) -> Any:
    """A class that is not made by another one learns its GPU here."""
    return type(value.__name__, (value,), {"_gpu": gpu}) if "_gpu" in vars(value).get("__annotations__", {}) else value


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module
