"""A model between its files and its executors: what was read, what was bound, and what it can be read from again.

And all of them by tenant (`LoadedModels`), with the server's state that follows; nothing there awaits or blocks.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from engines import Engine, Executor, ModelRefused, Signature, TensorSpec
from engines.memory import added
from engines.signature import align

from ..config.tables import dotted
from ..config.tenant import TenantConfig
from ..control.descriptions import Execution
from ..link.blocks import largest_block
from ..link.messages import ModelKey, Shape
from ..repository.model_repository import ModelFile
from ..repository.model_settings import ResolvedSettings
from ..tenants.catalog import UNLOADED, IndexEntry, ModelVersion
from ..tenants.frontend import State
from ..workers.placement import close_all
from ..workers.worker import Worker

_MAX_REASONS = 3
"""The most reasons that the answer to a failed load gives."""


Stamp = tuple[int, ...]
"""Tells whether a file is still the same: its inode, modification time and size."""


class Source(NamedTuple):
    """What a version that was loaded can be read from again."""

    file: ModelFile
    resolved: ResolvedSettings
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The result of loading one model onto one partition."""

    name: str
    served: list[ModelVersion]
    problems: list[IndexEntry]
    executors: dict[ModelKey, Executor]
    warnings: list[str] = field(default_factory=list)
    engines: dict[ModelKey, Engine] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    """The models that an ensemble uses; without one of them it is not served."""
    override: str | None = None
    """The configuration that it was loaded with, if not the file's."""
    sources: dict[ModelKey, Source] = field(default_factory=dict)

    def messages(self, kept: bool = False) -> tuple[str, ...]:
        """Lines for the log; `kept`: the versions that were served before stay."""
        what = "could not be loaded, the versions loaded before stay" if kept else "is unavailable"
        return *self.warnings, *(f"model {_label(problem)} {what}: {problem.reason}" for problem in self.problems)

    def why(self) -> str:
        """Its first problems with their versions, and how many more there are."""
        reasons = [_reason(problem) for problem in self.problems]
        others = len(reasons) - _MAX_REASONS
        return "; ".join(reasons[:_MAX_REASONS]) + (f"; and {others} more" if others > 0 else "")

    def stopped(self, reason: str) -> "LoadedModel":
        """This ensemble, unavailable for this reason until its steps are loaded again."""
        problems = [IndexEntry(self.name, "", "UNAVAILABLE", reason)]
        return LoadedModel(self.name, [], problems, {}, steps=self.steps, override=self.override)

    def discard(self) -> "LoadedModel":
        """Close its executors and return the result without served versions. Blocks."""
        close_all(self.executors.values())
        return replace(self, served=[], executors={}, engines={}, sources={})


NOTHING: Mapping[str, LoadedModel] = MappingProxyType({})


class PreparedVersion(NamedTuple):
    """A version that was read: its file, settings and engine, which `ModelLoader.bind` returns to the pool.

    `stamp` is what the file was when it was read; () for an ensemble.
    """

    file: ModelFile
    resolved: ResolvedSettings
    engine: Engine
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that was read but not bound yet: the problems so far, and the versions to bind.

    `learnt` are sets of input shapes that those in use are ready for: the new ones are to be, too, before they take over.
    """

    loaded: LoadedModel
    versions: list[PreparedVersion] = field(default_factory=list)
    learnt: list[tuple[Shape, ...]] = field(default_factory=list)


def learnt_shapes(executors: Iterable[Executor]) -> list[tuple[Shape, ...]]:
    """The sets of input shapes that these executors are ready for, by what they say of themselves. Any thread."""
    found: dict[tuple[Shape, ...], None] = {}
    for executor in executors:
        shapes: Any = executor.describe().get("shapes", ())
        found |= dict.fromkeys(tuple(map(tuple, each)) for each in shapes)
    return list(found)


def expected(prepared: PreparedModel) -> dict[str, int]:
    """What a model that was read takes of the device's memory, and is expected to take once it is bound, by kind.

    An ensemble's engines are those of its steps, and count there.
    """
    engines = [] if prepared.loaded.steps else [version.engine.memory for version in prepared.versions]
    each = [version.engine.executor_memory for version in prepared.versions]
    return added([*engines, *each])


def _label(entry: IndexEntry) -> str:
    return f"{entry.name} {entry.version}".rstrip()


def _reason(entry: IndexEntry) -> str:
    """The reason, with the version unless the reason begins with the version's path."""
    named = not entry.version or entry.reason.startswith(f"{entry.name}/{entry.version}")
    return entry.reason if named else f"version {entry.version}: {entry.reason}"


class LoadedModels:
    """Each tenant's models that were tried, by name, including those that failed or were unloaded.

    Changed on the event loop only. The executors are not here but in the tenant's current worker.
    """

    def __init__(self, tenants: Iterable[str], strict: bool) -> None:
        self._strict = strict
        self._models: dict[str, dict[str, LoadedModel]] = {name: {} for name in tenants}

    def add(self, tenant: str) -> None:
        """A tenant without models has come."""
        self._models[tenant] = {}

    def remove(self, tenant: str) -> None:
        """This tenant has gone."""
        self._models.pop(tenant, None)

    def of(self, tenant: str) -> Mapping[str, LoadedModel]:
        """A live view of a tenant's models by name. Any thread may read it."""
        return self._models[tenant]

    def put(self, tenant: str, loaded: LoadedModel) -> LoadedModel | None:
        """Replace a tenant's model. Returns the one before, if there was one."""
        models = self._models[tenant]
        before = models.get(loaded.name)
        models[loaded.name] = replace(loaded, executors={})
        return before

    def forget(self, tenant: str, name: str) -> LoadedModel | None:
        """Know nothing of this model any more. Returns it, if it was known."""
        return self._models[tenant].pop(name, None)

    def serves(self, tenant: str, name: str) -> bool:
        """Whether at least one version of a tenant's model is served."""
        loaded = self._models[tenant].get(name)
        return bool(loaded and loaded.served)

    def ensembles(self, tenant: str, models: Collection[str]) -> list[LoadedModel]:
        """The ensembles that use one of these models as a step, served or not."""
        return [loaded for loaded in self._models[tenant].values() if not set(loaded.steps).isdisjoint(models)]

    def state(self) -> State:
        """The state once all models were tried: serving, or incomplete if all of all tenants failed, with `strict_readiness` if
        one did.
        """
        loaded = [each for models in self._models.values() for each in models.values()]
        failed = any(problem.reason != UNLOADED for each in loaded for problem in each.problems)
        return "incomplete" if failed and (self._strict or not any(each.served for each in loaded)) else "serving"

    def executions(self, workers: Mapping[str, Worker]) -> list[Execution]:
        """How each model runs on these workers now; see `engines.Executor.describe`."""
        found = []
        for tenant, worker in workers.items():
            for served in (served for loaded in self._models[tenant].values() for served in loaded.served):
                if executor := worker.executors.get(served.key):
                    found.append(Execution(tenant, served.name, served.version, executor.describe()))
        return found

    def shown(self, tenant: str) -> str:
        """A tenant's served models with their versions, for the log."""
        return " and ".join(versions(loaded) for loaded in self._models[tenant].values() if loaded.served) or "nothing"


def versions(loaded: LoadedModel) -> str:
    """A model and its served versions, for the log."""
    return f"{loaded.name} {', '.join(served.version for served in loaded.served)}"


def fit(signature: Signature, tenant: TenantConfig) -> str:
    """A warning, or "", of a model whose largest request may not fit. Raises ModelRefused if its smallest one does not."""
    most, key = largest_block(tenant.memory), dotted(("tenants", tenant.name, "memory"))
    least, largest = needed(signature, largest=False), needed(signature, largest=True)
    limit = f"{key} of {tenant.memory} lets one take {most}"
    if least is not None and sum(least) > most:
        raise ModelRefused(f"its smallest request takes {_sum(least)}, but {limit}; raise it")
    if largest is not None and sum(largest) > most:
        return f"its largest request takes {_sum(largest)}, but {limit}: larger ones are answered 413"
    return ""


def needed(signature: Signature, largest: bool) -> tuple[int, int] | None:
    """Bytes of the inputs and of the outputs of the largest request that the signature allows, or of the smallest.

    Tensors of BYTES and outputs whose size depends on data count as 0. A dimension without a lower limit has at least size 1.
    None for the largest request if a dimension has no upper limit.
    """
    sizes: dict[str, int] = {}
    shapes = []
    for spec in signature.inputs:
        shape = []
        for axis, dim in enumerate(spec.dims):
            size = dim if isinstance(dim, int) else _size(signature, spec, axis, largest)
            if size is None:
                return None
            if isinstance(dim, str) and dim:
                size = sizes[dim] = min(sizes.get(dim, size), size) if largest else max(sizes.get(dim, size), size)
            shape.append(size)
        shapes.append(tuple(shape))
    inputs = sum(align(spec.nbytes(shape)) for spec, shape in zip(signature.inputs, shapes, strict=True))
    return inputs, signature.output_bytes(sizes)


def _size(signature: Signature, spec: TensorSpec, axis: int, largest: bool) -> int | None:
    """The largest or smallest size of a variable dimension; None if the largest is asked for and there is no upper limit."""
    limits = spec.limits[axis] if axis < len(spec.limits) else None
    if not largest:
        return limits[0] if limits else 1
    batch = signature.max_batch if axis == 0 else 0
    mosts = [most for most in (limits and limits[1], batch) if most]
    return min(mosts, default=None)


def _sum(needs: tuple[int, int]) -> str:
    inputs, outputs = needs
    return f"{inputs + outputs} bytes of memory (inputs {inputs} + outputs {outputs})"
