"""From files to models that are ready on a partition: engines are loaded once and shared, executors are bound.

Everything here blocks and belongs on a thread of its own, never on the event loop.
"""

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import NamedTuple

from engines import (
    Builds,
    Engine,
    EngineError,
    Executor,
    ModelRefused,
    RuntimeSettings,
    Signature,
    chain,
    load_engine,
    unsupported,
)
from engines.settings import Sample
from partitions import Device, Partition

from ..config.schema import Config, ServerConfig
from ..link.messages import ModelKey
from ..protocol.classification import Labels
from ..repository.description import describe
from ..repository.ensemble import (
    NO_OWN_SETTINGS,
    PLATFORM,
    SETTINGS,
    EnsembleStep,
    StepModel,
    as_triton,
    chain_steps,
    identity,
    step_warnings,
)
from ..repository.model_config import ModelConfig, apply, batching
from ..repository.model_repository import Listing, ModelFile, Repository
from ..repository.model_settings import ResolvedSettings, StatedSettings, Unsupported, default_settings, resolve_settings
from ..scheduling.batching import largest_batch
from ..tenants.catalog import IndexEntry, ServedModel
from .engine_pool import EnginePool
from .instances import bind_instances

log = logging.getLogger("greenlane.models")

DEFAULTS = RuntimeSettings()
MAX_BODY: int = ServerConfig.model_fields["max_body"].default
_MOST_REASONS = 3
"""How many reasons an answer gives for a load that failed."""

Read = Callable[[Path, int | None, RuntimeSettings], Engine]
"""Makes an engine of a model's file, for batches of up to so many rows where it has to be built first."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What became of one model on one partition."""

    name: str
    served: list[ServedModel]
    problems: list[IndexEntry]
    executors: dict[ModelKey, Executor]
    warnings: list[str] = field(default_factory=list)
    engines: dict[ModelKey, Engine] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    """The models that it runs, where it is an ensemble: without one of them it is not served."""
    override: str | None = None
    """The configuration that it was loaded with, where that is not the file's."""

    def messages(self, kept: bool = False) -> tuple[str, ...]:
        """What people should hear about it, a line each; `kept` is whether what was served before goes on being served."""
        what = "could not be loaded, and what was served before goes on" if kept else "is unavailable"
        return *self.warnings, *(f"model {_which(problem)} {what}: {problem.reason}" for problem in self.problems)

    def why(self) -> str:
        """The first of its problems, with the versions they are of, and how many there are besides."""
        reasons = [_reason(problem) for problem in self.problems]
        others = len(reasons) - _MOST_REASONS
        return "; ".join(reasons[:_MOST_REASONS]) + (f"; and {others} more" if others > 0 else "")

    def stopped(self, reason: str) -> "LoadedModel":
        """The same ensemble, served no more for this reason, until its steps are loaded again."""
        problems = [IndexEntry(self.name, "", "UNAVAILABLE", reason)]
        return LoadedModel(self.name, [], problems, {}, steps=self.steps, override=self.override)

    def give_up(self) -> "LoadedModel":
        """The same with nothing to serve: its executors are closed. Blocks."""
        for executor in self.executors.values():
            executor.close()
        return replace(self, served=[], executors={}, engines={})


NOTHING: Mapping[str, LoadedModel] = MappingProxyType({})


class PreparedVersion(NamedTuple):
    """A version of a model that was read: its file, how it is to run, and its engine, which `ModelLoader.bind` lets go of."""

    file: ModelFile
    settled: ResolvedSettings
    engine: Engine


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that was read and is bound to no partition yet: what went wrong so far, and the versions to bind."""

    loaded: LoadedModel
    versions: list[PreparedVersion] = field(default_factory=list)


class ModelLoader:
    """The repository, and the engines of its models. Every method may be called from any thread.

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
        self._engines = EnginePool()
        self._told: dict[str, frozenset[str]] = {}
        self._telling = Lock()

    def __repr__(self) -> str:
        engines = len(self._engines)
        return f"<ModelLoader {self._repository!r}, {engines} engine{'s' * (engines != 1)}>"

    def names(self) -> list[str]:
        """Every model directory of the repository, sorted; none where it cannot be read, which the log tells."""
        try:
            return self._repository.names()
        except OSError as error:
            log.error("the model repository cannot be read, so it counts as empty: %s", error)
            return []

    def steps(self, name: str, override: str | None = None) -> tuple[str, ...]:
        """The models that an ensemble runs, each once; none of a model that is no ensemble, or cannot be read."""
        if override is not None and PLATFORM not in override and "\\" not in override:
            return ()  # It says nothing of an ensemble, so that a tenant's large configuration is read once, by `prepare`.
        return _steps(self._repository.read(name, override))

    def in_order(self, names: Iterable[str]) -> list[str]:
        """The same names, those of ensembles after all others, as their steps have to be loaded before them."""
        return sorted(names, key=lambda name: bool(self.steps(name)))

    def load(self, name: str, partition: Partition, override: str | None = None) -> LoadedModel:
        """Load every version of a model that its policy selects and bind it to the partition; what fails is a problem.

        `override` is a model configuration as JSON, in place of the file beside the model. What goes wrong is logged.
        """
        return self.bind(self.prepare(name, override), partition)

    def attempt(
        self, name: str, partition: Partition, override: str | None = None, among: Mapping[str, LoadedModel] = NOTHING
    ) -> LoadedModel:
        """As `load`, but what goes wrong is left to the caller to tell. `among` is as in `prepare`."""
        return self._bind(self.prepare(name, override, among), partition)

    def prepare(self, name: str, override: str | None = None, among: Mapping[str, LoadedModel] = NOTHING) -> PreparedModel:
        """The part of `load` that needs no partition, and takes as long as builds do.

        `among` are the tenant's other models, of which ensembles are made; their engines may not be released meanwhile.
        """
        listing = self._repository.read(name, override)
        problems = [IndexEntry(name, problem.version, "UNAVAILABLE", problem.reason) for problem in listing.problems]
        steps = _steps(listing)
        prepared = PreparedModel(LoadedModel(name, [], problems, {}, list(listing.warnings), steps=steps, override=override))
        for file in listing.files:
            settled = self._settle(file, prepared.loaded)
            if not settled.problems:
                with _noting(file, prepared.loaded):
                    engine = self._chain(file, settled, among, prepared.loaded) if steps else self._engine(file, settled)
                    prepared.versions.append(PreparedVersion(file, settled, engine))
        return prepared

    def bind(self, prepared: PreparedModel, partition: Partition, whole: bool = False, kept: bool = False) -> LoadedModel:
        """The rest of `load`, once for what `prepare` gave.

        `whole` is for all or nothing: where one version fails, nothing is served. `kept` is as in `LoadedModel.told`.
        """
        loaded = self._bind(prepared, partition, whole)
        self._tell(loaded, kept)
        return loaded

    def release_unused(self, in_use: Iterable[Executor], quiet: bool) -> bool:
        """Free an engine that no executor has, if it is time; see `EnginePool.release`. Blocks."""
        return self._engines.release([executor.engine for executor in in_use], quiet)

    def close(self) -> None:
        """Free every engine; no executor may be left. Blocks."""
        self._engines.close()

    def _bind(self, prepared: PreparedModel, partition: Partition, whole: bool = False) -> LoadedModel:
        loaded = prepared.loaded
        for version in prepared.versions:
            try:
                if not (whole and loaded.problems):
                    with _noting(version.file, loaded):
                        self._bind_version(version, partition, loaded)
            finally:
                self._engines.let_go(version.engine)
        return loaded.give_up() if whole and loaded.problems else loaded

    def _settle(self, file: ModelFile, loaded: LoadedModel) -> ResolvedSettings:
        """How it is to run; what is in the way of that goes to the problems, what is ignored to the warnings, each once."""
        try:
            lacking = _of_steps(self._unsupported) if file.config.steps else self._unsupported
            settled = resolve_settings(file.config.settings, self._base, lacking)
        except EngineError as error:
            settled = ResolvedSettings(self._base, problems=(str(error),))
        found = [IndexEntry(file.name, "", "UNAVAILABLE", problem) for problem in settled.problems]
        loaded.problems.extend(entry for entry in found if entry not in loaded.problems)
        loaded.warnings.extend(warning for warning in settled.warnings if warning not in loaded.warnings)
        padding, optional = (
            bool(file.config.max_batch),
            tuple(sorted(each.name for each in file.config.inputs if each.optional)),
        )
        return replace(settled, settings=settled.settings.merge(batch_padding=padding, optional_inputs=optional))

    def _tell(self, loaded: LoadedModel, kept: bool) -> None:
        """Each line once, though every tenant loads the model, until a load goes otherwise."""
        told = loaded.messages(kept)
        with self._telling:
            before, self._told[loaded.name] = self._told.get(loaded.name, frozenset()), frozenset(told)
        for line in told:
            if line not in before:
                log.warning("%s", line)

    def _bind_version(self, version: PreparedVersion, partition: Partition, loaded: LoadedModel) -> None:
        file, settled, engine = version
        number, signature = str(file.version), apply(file.config, engine.signature)
        self._check_warm_up(file, settled.settings, signature)
        executor = bind_instances(engine, partition, settled.instances)
        how, why_not = batching(file.config, signature)
        execution = executor.describe()
        notes = [why_not] if why_not else []
        notes += [*_required(file.config, signature), *_notes(execution)]
        loaded.warnings.extend(f"model {file.name} {number}: {note}" for note in notes)
        platform = PLATFORM if file.config.steps else engine.platform
        folder = file.filename.partition("/")[0]
        config = describe(file.name, file.config, signature, platform, folder, how, execution, settled.instances)
        config = as_triton(config) if file.config.steps else config
        key = f"{file.name}/{number}#{next(self._loads)}"
        labels, queues = Labels(file.labels), file.config.queues
        served = ServedModel(file.name, number, key, signature, platform, config, how, labels, queues)
        loaded.served.append(served)
        loaded.executors[key] = executor
        loaded.engines[key] = engine

    def _check_warm_up(self, file: ModelFile, settings: RuntimeSettings, signature: Signature) -> None:
        """Raise ModelRefused for something to be ready for that is larger than any request there may be."""
        samples, most = settings.warm_up if isinstance(settings.warm_up, tuple) else (), largest_batch(signature)
        for sample in samples:
            where = file.config.settings["warm_up"].where
            if most and isinstance(sample, int) and sample > most:
                raise ModelRefused(f"{where}: {sample} is above the model's largest batch, which is {most}")
            if (nbytes := _nbytes(sample, signature)) > self._max_body:
                text = f"inputs of {nbytes} bytes, but the server takes bodies of up to {self._max_body}"
                raise ModelRefused(f"{where}: {text}; leave it out, or raise server.max_body")

    def _engine(self, file: ModelFile, settled: ResolvedSettings) -> Engine:
        """The engine of a file as it is now, for these settings, held until it is let go of."""
        settings, max_batch, found = settled.settings, file.config.max_batch or None, os.stat(file.path)
        key = (file.path, max_batch, settings, found.st_ino, found.st_mtime_ns, found.st_size)
        return self._engines.hold(key, lambda: self._read(file.path, max_batch, settings))

    def _chain(
        self, file: ModelFile, settled: ResolvedSettings, among: Mapping[str, LoadedModel], loaded: LoadedModel
    ) -> Engine:
        """The engine of an ensemble, of the engines that the tenant's models have now, held until it is let go of."""
        steps = file.config.steps
        parts = [self._part(step, among) for step in steps]
        links = chain_steps(steps, parts, file.config.max_batch or 0)
        loaded.warnings.extend(f"model {file.name} {file.version}: {note}" for note in step_warnings(steps, parts))
        outputs = tuple(tensor.name for tensor in file.config.outputs)
        key = (PLATFORM, identity(links), outputs, settled.settings)
        return self._engines.hold(key, lambda: chain(links, outputs, settled.settings), [part.engine for part in parts])

    def _part(self, step: EnsembleStep, among: Mapping[str, LoadedModel]) -> StepModel:
        """The tenant's model that serves a step. Raises ModelRefused."""
        model = among.get(step.model)
        if model is None:
            known = self.names()
            if step.model in known and self.steps(step.model):  # It is loaded after others, if it is the tenant's.
                raise ModelRefused(f"{step.where} {_NESTED}")
            hint = "is not a model of this tenant's" if step.model in known else "is not in the repository"
            raise ModelRefused(f"{step.where} {hint}")
        if model.steps:
            raise ModelRefused(f"{step.where} {_NESTED}")
        if not model.served:
            raise ModelRefused(f"{step.where} is unavailable: {model.why() or 'it is not loaded'}")
        versions = {int(served.version): served for served in model.served}
        if step.version and step.version not in versions:
            there = ", ".join(map(str, sorted(versions)))
            raise ModelRefused(f"{step.where} has no version {step.version} that is served; there is {there}")
        served = versions[step.version or max(versions)]
        return StepModel(served, model.engines[served.key])


_NESTED = "is an ensemble, which cannot be a step; name its steps instead"


@contextmanager
def _noting(file: ModelFile, loaded: LoadedModel) -> Iterator[None]:
    """What fails is a problem of this version."""
    version = str(file.version)
    try:
        yield
    except Exception as error:
        if not isinstance(error, EngineError):
            log.exception("model %s %s: the library went wrong", file.name, version)
        # Clients read this, and where the repository lies is not theirs to know.
        reason = str(error).replace(str(file.path), f"{file.name}/{version}/{file.filename}".rstrip("/"))
        if file.config.steps:  # Whose errors may name their files.
            reason = reason.replace(f"{file.path.parent.parent}/", "")
        loaded.problems.append(IndexEntry(file.name, version, "UNAVAILABLE", reason + _said(reason, file.config.settings)))


def open_model_loader(
    config: Config, device: Device | None, read: Read | None = None, builds: Builds | None = None
) -> ModelLoader:
    """The models of a configuration, for this device, as they are served and as they are checked.

    `read` makes engines in place of the libraries that serve from the device; `builds` is what builds ONNX files for these.
    """
    return ModelLoader(
        Repository(config.models.repository, config.models.options, config.source),
        read or (lambda path, max_batch, settings: load_engine(path, device, settings, max_batch, builds)),
        default_settings(config.device),
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


def _said(reason: str, settings: StatedSettings) -> str:
    """Where a setting was said that an error is about, which knows it by its name within the program."""
    ours = {field: said.where for field, said in settings.items() if "_" in field and not said.is_tritons}
    found = [where for field, where in ours.items() if field in reason and field not in where]
    return f" ({', '.join(found)})" if found else ""


def _steps(listing: Listing) -> tuple[str, ...]:
    return tuple(dict.fromkeys(step.model for file in listing.files for step in file.config.steps))


def _of_steps(unsupported: Unsupported) -> Unsupported:
    """What an ensemble cannot honour: what its steps were loaded with besides."""
    return lambda asked: {**unsupported(asked), **{field: NO_OWN_SETTINGS for field in asked if field not in SETTINGS}}


def _required(config: ModelConfig, signature: Signature) -> Iterator[str]:
    """What to say of inputs that are configured as optional and are not."""
    optional = [each.name for each in config.inputs if each.optional]
    for spec in signature.inputs:
        if spec.name in optional and spec.default is None:
            yield f"input {spec.name!r} is optional in {config.source}, but the model has nothing to take in its place: send it"


def _notes(execution: Mapping[str, object]) -> list[str]:
    found = execution.get("notes")
    return [str(note) for note in found] if isinstance(found, list) else []


def _which(entry: IndexEntry) -> str:
    return f"{entry.name} {entry.version}".rstrip()


def _reason(entry: IndexEntry) -> str:
    """With the version where the reason does not name it by its path."""
    named = not entry.version or entry.reason.startswith(f"{entry.name}/{entry.version}")
    return entry.reason if named else f"version {entry.version}: {entry.reason}"
