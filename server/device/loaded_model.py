"""A model between its files and its executors: what was read, what was bound, and what it can be read from again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from engines import Engine, Executor
from engines.memory import added

from ..link.messages import ModelKey, Shape
from ..repository.model_repository import ModelFile
from ..repository.model_settings import ResolvedSettings
from ..tenants.catalog import IndexEntry, ModelVersion
from ..workers.placement import close_all

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
