"""The real TensorRT-RTX builder, which needs no GPU, for the simulated library: its plans compute the ONNX they were built
from.
"""

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

from tests.engines.manifest import find_manifest, takes

from .gpu import Gpu

NAMES = ("ILogger", "IProgressMonitor", "IBuilderConfig", "IOptimizationProfile", "BuilderFlag", "ComputeCapability")


def building(gpu: Gpu, real: Any) -> dict[str, Any]:
    """The `others` for `tensorrt.library`; `real` is the module of the library."""
    parsed: list[bytes] = []

    class OnnxParser:
        def __init__(self, network: Any, logger: Any) -> None:
            self._real = real.OnnxParser(_real(network), logger)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def parse(self, model: bytes, path: str | None = None) -> bool:
            parsed.append(model)
            return bool(self._real.parse(model, path))

    class Builder:
        def __init__(self, logger: Any) -> None:
            self._real = real.Builder(logger)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def build_serialized_network(self, network: Any, config: Any) -> Any:
            gpu.use_runtime()
            gpu.building += 1
            try:
                plan = self._real.build_serialized_network(network, config)
            finally:
                gpu.building -= 1
            gpu.plans[bytes(memoryview(plan))] = parsed[-1]
            return plan

    return {"Builder": Builder, "OnnxParser": OnnxParser, **{name: getattr(real, name) for name in NAMES}}


def building_as(gpu: Gpu, real: Any, library: str, version: str) -> dict[str, Any]:
    """The same, with only the members of another library's builder, by its manifest, and callable in the same ways.

    Members that it has and `real` lacks are stored and have no effect. So this tests which names are used, not what they do;
    but what it has timed can be kept, as that of `real` cannot.
    """
    classes = find_manifest(library, version)["classes"]
    whole = building(gpu, real)

    class Builder(whole["Builder"]):  # type: ignore[misc]
        def create_builder_config(self) -> Any:
            return IBuilderConfig(self._real.create_builder_config())

        def build_serialized_network(self, network: Any, config: IBuilderConfig) -> Any:
            plan = super().build_serialized_network(network, config.wrapped)
            config.timings.entries.add(sha256(gpu.plans[bytes(memoryview(plan))]).hexdigest())
            return plan

    whole["Builder"] = Builder

    def made(name: str) -> Callable[..., Any]:
        return lambda *args: RestrictedObject(whole[name](*args), name, classes)

    found = {name: made(name) for name in ("Builder", "OnnxParser")}
    found |= {
        name: type(name, (), dict.fromkeys(_members(classes[name]))) for name in ("IBuilderConfig", "IOptimizationProfile")
    }
    flags = {name: flag for name, flag in real.BuilderFlag.__members__.items() if name in classes["BuilderFlag"]["values"]}
    kept = {"ILogger": real.ILogger, "IProgressMonitor": real.IProgressMonitor}
    return {**found, **kept, "BuilderFlag": SimpleNamespace(__members__=flags)}


class ITimingCache:
    """What was timed: here, the digests of models. Damaged, it is empty."""

    def __init__(self, blob: bytes) -> None:
        try:
            self.entries = set(json.loads(blob or b"[]"))
        except ValueError:
            self.entries = set()

    def combine(self, other: "ITimingCache", ignore_mismatch: bool) -> bool:
        self.entries |= other.entries
        return True

    def serialize(self) -> bytes:
        return json.dumps(sorted(self.entries)).encode()


class IBuilderConfig:
    """The real one, but for its timings."""

    def __init__(self, real: Any) -> None:
        vars(self).update(wrapped=real, timings=ITimingCache(b""))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        vars(self)["timings"] = cache
        return True

    def get_timing_cache(self) -> ITimingCache:
        return self.timings


class RestrictedObject:
    """An object of the real library with only the members that the class of this name has by a manifest."""

    def __init__(self, real: Any, kind: str, classes: Mapping[str, Any]) -> None:
        vars(self).update(_real=real, _kind=kind, _classes=classes, _kept={})

    def __getattr__(self, name: str) -> Any:
        if name not in _members(self._classes[self._kind]):
            raise AttributeError(f"{self._kind} has no {name} in this version")
        if name in self._kept:
            return self._kept[name]
        value = getattr(self._real, name)
        return self._checked(name, value) if name in self._classes[self._kind]["methods"] else self._restrict(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._classes[self._kind]["properties"].get(name) != "read and set":
            raise AttributeError(f"{self._kind} has no {name} that can be set in this version")
        if hasattr(self._real, name):
            setattr(self._real, name, value)
        else:
            self._kept[name] = value

    def _checked(self, name: str, method: Any) -> Callable[..., Any]:
        overloads = self._classes[self._kind]["methods"][name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(takes(overload, len(args), kwargs) for overload in overloads):
                raise TypeError(f"{self._kind}.{name} takes {overloads}, but was given {len(args)} and {list(kwargs)}")
            return self._restrict(method(*map(_real, args), **{key: _real(each) for key, each in kwargs.items()}))

        return call

    def _restrict(self, value: Any) -> Any:
        """Restrict a result too, unless it is bytes, a number or a shape."""
        kind = type(value).__name__
        plain = kind not in self._classes or kind in ("Dims", "IHostMemory") or hasattr(type(value), "__members__")
        return value if plain else RestrictedObject(value, kind, self._classes)


def _real(value: Any) -> Any:
    return value._real if isinstance(value, RestrictedObject) else value


def _members(kind: Mapping[str, Any]) -> set[str]:
    return {*kind["methods"], *kind["properties"]} - {"__init__"}
