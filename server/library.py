"""From files to models that are ready on a partition: engines are loaded once and shared, executors are bound.

Everything here blocks and belongs on a thread of its own, never on the event loop.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from engines import Engine, EngineError, Executor, ModelRefused, RuntimeSettings, Signature, load_engine, unsupported
from engines.settings import Sample
from partitions import Device, Partition

from .batches import most_rows
from .catalog import Entry, Served
from .config import Config, ServerConfig
from .instances import bind_in_turn
from .modelconfig import apply, batching, describe
from .modelsettings import Settled, Unsupported, settle, usual
from .repository import ModelFile, Repository
from .ticket import ModelKey

log = logging.getLogger("greenlane.models")

DEFAULTS = RuntimeSettings()
MAX_BODY = ServerConfig().max_body

Read = Callable[[Path, int | None, RuntimeSettings], Engine]
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


class Library:
    """The repository, and the engines that somebody still holds. Every method may be called from any thread.

    `base` is how a model runs of which nothing is said, `unsupported` what of its settings cannot be honoured and why.
    Nothing is warmed up with inputs of more bytes than `max_body`, as no request brings them.
    """

    def __init__(
        self,
        repository: Repository,
        read: Read,
        base: RuntimeSettings = DEFAULTS,
        unsupported: Unsupported = lambda _: {},
        max_body: int = MAX_BODY,
    ) -> None:
        self._repository = repository
        self._read = read
        self._base = base
        self._unsupported = unsupported
        self._max_body = max_body
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
        loaded = self.attempt(name, partition, override)
        self._tell(loaded)
        return loaded

    def attempt(self, name: str, partition: Partition, override: str | None = None) -> Loaded:
        """As `load`, but what goes wrong is left to the caller to tell."""
        listing = self._repository.read(name, override)
        problems = [Entry(name, problem.version, "UNAVAILABLE", problem.reason) for problem in listing.problems]
        loaded = Loaded(name, [], problems, {}, [listing.warning] if listing.warning else [])
        for file in listing.files:
            settled = self._settle(file, loaded)
            if not settled.problems:
                self._load_version(file, settled, partition, loaded)
        return loaded

    def _settle(self, file: ModelFile, loaded: Loaded) -> Settled:
        """How it is to run; what is in the way of that goes to the problems, what is ignored to the warnings, each once."""
        try:
            settled = settle(file.config.settings, self._base, self._unsupported)
        except EngineError as error:
            settled = Settled(self._base, problems=(str(error),))
        found = [Entry(file.name, "", "UNAVAILABLE", problem) for problem in settled.problems]
        loaded.problems.extend(entry for entry in found if entry not in loaded.problems)
        loaded.warnings.extend(warning for warning in settled.warnings if warning not in loaded.warnings)
        return replace(settled, settings=settled.settings.merge(batch_padding=bool(file.config.max_batch)))

    def _tell(self, loaded: Loaded) -> None:
        """Each line once, though every tenant loads the model, until a load goes otherwise."""
        told = loaded.told()
        with self._telling:
            before, self._told[loaded.name] = self._told.get(loaded.name, ()), told
        for line in told:
            if line not in before:
                log.warning("%s", line)

    def _load_version(self, file: ModelFile, settled: Settled, partition: Partition, loaded: Loaded) -> None:
        version = str(file.version)
        try:
            engine = self._engine(file.path, file.config.max_batch or None, settled.settings)
            signature = apply(file.config, engine.signature)
            self._check_warm_up(file, settled.settings, signature)
            executor = bind_in_turn(engine, partition, settled.instances)
        except Exception as error:
            if not isinstance(error, EngineError):
                log.exception("model %s %s: the library went wrong", file.name, version)
            # Clients read this, and where the repository lies is not theirs to know.
            reason = str(error).replace(str(file.path), f"{file.name}/{version}/{file.path.name}")
            loaded.problems.append(Entry(file.name, version, "UNAVAILABLE", reason))
            return
        how, why_not = batching(file.config, signature)
        execution = executor.describe()
        notes = [why_not] if why_not else []
        notes += _notes(execution)
        loaded.warnings.extend(f"model {file.name} {version}: {note}" for note in notes)
        config = describe(file.name, file.config.versions, signature, engine.platform, how, execution)
        key = f"{file.name}/{version}#{next(self._loads)}"
        served = Served(file.name, version, key, signature, engine.platform, config, how)
        loaded.served.append(served)
        loaded.executors[key] = executor

    def _check_warm_up(self, file: ModelFile, settings: RuntimeSettings, signature: Signature) -> None:
        """Raise ModelRefused for something to be ready for that is larger than any request there may be."""
        samples, most = settings.warm_up if isinstance(settings.warm_up, tuple) else (), most_rows(signature)
        for sample in samples:
            where = file.config.settings["warm_up"].where
            if most and isinstance(sample, int) and sample > most:
                raise ModelRefused(f"{where}: {sample} is above the model's largest batch, which is {most}")
            if (nbytes := _nbytes(sample, signature)) > self._max_body:
                text = f"inputs of {nbytes} bytes, but the server takes bodies of up to {self._max_body}"
                raise ModelRefused(f"{where}: {text}; leave it out, or raise server.max_body")

    def _engine(self, path: Path, max_batch: int | None, settings: RuntimeSettings) -> Engine:
        """The engine of a file as it is now, for these settings; two tenants that load the same at once may both read it."""
        found = os.stat(path)
        key = (path, max_batch, settings, found.st_ino, found.st_mtime_ns, found.st_size)
        if (engine := self._engines.get(key)) is None:
            engine = self._engines[key] = self._read(path, max_batch, settings)
        return engine


def open_library(config: Config, device: Device | None, read: Read | None = None) -> Library:
    """The models of a configuration, for this device, as they are served and as they are checked.

    `read` makes engines in place of the libraries that serve from the device.
    """
    return Library(
        Repository(config.models.repository, config.models.options, config.source),
        read or (lambda path, max_batch, settings: load_engine(path, device, settings, max_batch)),
        usual(config.device),
        partial(unsupported, device),
        config.server.max_body,
    )


def _nbytes(sample: Sample, signature: Signature) -> int:
    """Bytes of the inputs of a sample, at least: what it does not say counts as 1."""
    total = 0
    for spec in signature.inputs:
        shape = tuple(dim if isinstance(dim, int) else 1 for dim in spec.dims)
        if not isinstance(sample, int):
            shape = dict(sample).get(spec.name, shape)
        elif spec.dims and isinstance(spec.dims[0], str):
            shape = (sample, *shape[1:])
        total += spec.nbytes(shape) or math.prod(shape)
    return total


def _notes(execution: Mapping[str, object]) -> list[str]:
    found = execution.get("notes")
    return [str(note) for note in found] if isinstance(found, list) else []


def _which(entry: Entry) -> str:
    return f"{entry.name} {entry.version}".rstrip()
