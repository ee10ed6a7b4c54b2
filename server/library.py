"""From files to models that are ready on a partition: engines are loaded once and shared, executors are bound.

Everything here blocks and belongs on a thread of its own, never on the event loop.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from engines import Engine, EngineError, Executor
from partitions import Partition

from .catalog import Entry, Served
from .modelconfig import apply, batching, describe
from .repository import ModelFile, Repository
from .ticket import ModelKey

log = logging.getLogger("greenlane.models")

Read = Callable[[Path, int | None], Engine]
"""Makes an engine of a model's file, for batches of up to so many rows where it has to be built first."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of one model on one partition."""

    name: str
    served: list[Served]
    problems: list[Entry]
    executors: dict[ModelKey, Executor]
    warnings: list[str] = field(default_factory=list)

    def told(self) -> tuple[str, ...]:
        """What people should hear about it, a line each."""
        return *self.warnings, *(f"model {_which(problem)} is unavailable: {problem.reason}" for problem in self.problems)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that was read and is bound to no partition yet: what went wrong so far, and its versions' engines."""

    loaded: Loaded
    engines: list[tuple[ModelFile, Engine]] = field(default_factory=list)


class Library:
    """The repository, and the engines that somebody still holds. Every method may be called from any thread."""

    def __init__(self, repository: Repository, read: Read) -> None:
        self._repository = repository
        self._read = read
        self._loads = count(1)
        self._engines: WeakValueDictionary[tuple[object, ...], Engine] = WeakValueDictionary()
        self._told: dict[str, tuple[str, ...]] = {}
        self._telling = Lock()

    def __repr__(self) -> str:
        engines = len(self._engines)
        return f"<Library {self._repository!r}, {engines} engine{'s' * (engines != 1)}>"

    def names(self) -> list[str]:
        """Every model directory of the repository, sorted; none where it cannot be read, which the log tells."""
        try:
            return self._repository.names()
        except OSError as error:
            log.error("the model repository cannot be read, so it counts as empty: %s", error)
            return []

    def load(self, name: str, partition: Partition, override: str | None = None) -> Loaded:
        """Load every version of a model that its policy selects and bind it to the partition; what fails is a problem.

        `override` is a model configuration as JSON, in place of the file beside the model. What goes wrong is logged.
        """
        return self.bind(self.prepare(name, override), partition)

    def attempt(self, name: str, partition: Partition, override: str | None = None) -> Loaded:
        """As `load`, but what goes wrong is left to the caller to tell."""
        return self._bind(self.prepare(name, override), partition)

    def prepare(self, name: str, override: str | None = None) -> Prepared:
        """The part of `load` that needs no partition, and takes as long as builds do."""
        listing = self._repository.read(name, override)
        problems = [Entry(name, problem.version, "UNAVAILABLE", problem.reason) for problem in listing.problems]
        prepared = Prepared(Loaded(name, [], problems, {}, [listing.warning] if listing.warning else []))
        for file in listing.files:
            with _noting(file, prepared.loaded):
                prepared.engines.append((file, self._engine(file.path, file.config.max_batch or None)))
        return prepared

    def bind(self, prepared: Prepared, partition: Partition) -> Loaded:
        """The rest of `load`."""
        loaded = self._bind(prepared, partition)
        self._tell(loaded)
        return loaded

    def _bind(self, prepared: Prepared, partition: Partition) -> Loaded:
        for file, engine in prepared.engines:
            with _noting(file, prepared.loaded):
                self._bind_version(file, engine, partition, prepared.loaded)
        return prepared.loaded

    def _tell(self, loaded: Loaded) -> None:
        """Each line once, though every tenant loads the model, until a load goes otherwise."""
        told = loaded.told()
        with self._telling:
            before, self._told[loaded.name] = self._told.get(loaded.name, ()), told
        for line in told:
            if line not in before:
                log.warning("%s", line)

    def _bind_version(self, file: ModelFile, engine: Engine, partition: Partition, loaded: Loaded) -> None:
        version, signature = str(file.version), apply(file.config, engine.signature)
        executor = engine.bind(partition)
        how, why_not = batching(file.config, signature)
        if why_not:
            loaded.warnings.append(f"model {file.name} {version}: {why_not}")
        config = describe(file.name, file.config.versions, signature, engine.platform, how)
        key = f"{file.name}/{version}#{next(self._loads)}"
        served = Served(file.name, version, key, signature, engine.platform, config, how)
        loaded.served.append(served)
        loaded.executors[key] = executor

    def _engine(self, path: Path, max_batch: int | None) -> Engine:
        """The engine of a file as it is now; two tenants that load the same at once may both read it."""
        found = os.stat(path)
        key = (path, max_batch, found.st_ino, found.st_mtime_ns, found.st_size)
        if (engine := self._engines.get(key)) is None:
            engine = self._engines[key] = self._read(path, max_batch)
        return engine


@contextmanager
def _noting(file: ModelFile, loaded: Loaded) -> Iterator[None]:
    """What fails is a problem of this version."""
    version = str(file.version)
    try:
        yield
    except Exception as error:
        if not isinstance(error, EngineError):
            log.exception("model %s %s: the library went wrong", file.name, version)
        # Clients read this, and where the repository lies is not theirs to know.
        reason = str(error).replace(str(file.path), f"{file.name}/{version}/{file.path.name}")
        loaded.problems.append(Entry(file.name, version, "UNAVAILABLE", reason))


def _which(entry: Entry) -> str:
    return f"{entry.name} {entry.version}".rstrip()
