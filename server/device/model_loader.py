"""Loads models from the repository onto a partition: engines are loaded once and shared, executors are bound.

Everything here blocks; never call it on the event loop.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from types import MappingProxyType

from engines import (
    Builds,
    Engine,
    EngineError,
    Executor,
    ModelRefused,
    RuntimeSettings,
    Signature,
    Tensor,
    chain,
    load_engine,
    unsupported,
)
from engines.base import wait_within
from engines.settings import Sample
from engines.verification.rows import stop_padding
from partitions import Device, DeviceLost, Partition
from partitions.base import Loads, UnpacedLoads

from ..config.schema import Config, ModelOptions
from ..config.server import ServerConfig
from ..config.tables import dotted
from ..config.tenant import TenantConfig
from ..link.messages import Shape
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
    step_labels,
    step_warnings,
)
from ..repository.model_config import ModelConfig, apply, batching, stated_shapes
from ..repository.model_repository import Listing, ModelFile, Repository
from ..repository.model_settings import ResolvedSettings, StatedSettings, Unsupported, default_settings, resolve_settings
from ..scheduling.batching import largest_batch
from ..tenants.catalog import IndexEntry, ModelVersion
from ..text.folder import NoEncoder
from ..workers.pace import Pace
from .ahead import Making, making_of
from .engine_pool import EnginePool
from .joining import UNSEEN, Rows, look
from .loaded_model import NOTHING, LoadedModel, PreparedModel, PreparedVersion, Source, Stamp, fit

log = logging.getLogger("greenlane.models")

DEFAULTS = RuntimeSettings()
MAX_BODY: int = ServerConfig.model_fields["max_body"].default

Read = Callable[[Path, int | None, RuntimeSettings], Engine]
"""Loads the engine of a model file; the number is the largest batch if it has to be built first."""


LONG_PAUSES = 1.0
"""Seconds from which the log says that a load has left pauses."""
NO_OPTIONS: Mapping[str, ModelOptions] = MappingProxyType({})
"""No [models.NAME] is another one than that of the configuration."""


class ModelLoader:
    """Loads the models of a repository, and has their engines. Every method may be called from any thread.

    `base` are the default settings; `unsupported` returns which settings cannot be honoured, and why. Warm-up inputs are at
    most `max_body` bytes, as no request has more. `loads` are the device's. `making` is how models are made ahead, if they are.
    """

    def __init__(
        self,
        repository: Repository,
        read: Read,
        base: RuntimeSettings = DEFAULTS,
        unsupported: Callable[[Path, Mapping[str, object]], Mapping[str, str]] = lambda *_: {},
        max_body: int = MAX_BODY,
        loads: Loads | None = None,
        making: Making | None = None,
    ) -> None:
        self.making = making
        self._repository = repository
        self._read = read
        self._base = base
        self._unsupported = unsupported
        self._max_body = max_body
        self.on_lost: Callable[[DeviceLost], None] = lambda _: None
        """Called, on the thread that loads, when the device is lost meanwhile: no model can be served here any more."""
        self._device_loads = loads or UnpacedLoads()
        self._loads = count(1)
        self._engines = EnginePool()
        self._logged: dict[str, frozenset[str]] = {}
        self._logging = Lock()

    def __repr__(self) -> str:
        engines = len(self._engines)
        return f"<ModelLoader {self._repository!r}, {engines} engine{'s' * (engines != 1)}>"

    def number_beyond(self, load: int) -> None:
        """Give loads from now on numbers above this one, so that their keys are none that another process gave."""
        self._loads = count(max(load + 1, next(self._loads)))

    def names(self) -> list[str]:
        """The model directories of the repository, sorted; none, with a logged error, if it cannot be read."""
        try:
            return self._repository.names()
        except OSError as error:
            log.error("the model repository cannot be read, so it counts as empty: %s", error)
            return []

    def unreadable(self) -> str:
        """Why the repository cannot be read; "" if it can. Blocks."""
        try:
            self._repository.names()
        except OSError as error:
            return str(error)
        return ""

    def has(self, name: str) -> bool:
        """Whether the repository has a model of this name. Raises OSError if it cannot be read."""
        return name in self._repository.names()

    def steps(self, name: str, override: str | None = None) -> tuple[str, ...]:
        """The models that an ensemble uses, each once; none if the model is no ensemble or cannot be read."""
        if override is not None and PLATFORM not in override and "\\" not in override:
            return ()  # No ensemble; so a large configuration is parsed only once, by `prepare`.
        return _steps(self._repository.read(name, override))

    def in_order(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """These names with their steps, each behind these, as those have to be loaded before an ensemble. An ensemble is not a
        step.
        """
        uses, ordered = {name: self.steps(name) for name in names}, dict[str, tuple[str, ...]]()
        for name, steps in uses.items():
            ordered |= {each: uses[each] for each in (*(step for step in steps if uses.get(step) == ()), name)}
        return ordered

    def make_ahead(self, name: str, override: str | None, partition: Partition) -> object:
        """Have children make what loading a model and binding it to such a partition would wait for. Blocks, for minutes.

        Keep the result until then. What fails is found again, and reported, when the model is loaded.
        """
        assert self.making
        made: list[object] = []
        for file in self._repository.read(name, override).files:
            resolved = self._resolve(file, LoadedModel(name, [], [], {}))
            if not (file.config.steps or resolved.problems):
                try:
                    made.append(self.making.make(file.path, file.config.max_batch or None, resolved.settings, partition))
                except EngineError as error:
                    log.debug("model %s version %s: %s", name, file.version, error)
                except Exception:
                    log.exception("unexpected error while making model %s version %s ahead", name, file.version)
        return made

    def attempt(
        self, name: str, partition: Partition, among: Mapping[str, LoadedModel] = NOTHING, tenant: TenantConfig | None = None
    ) -> LoadedModel:
        """Prepare and bind a model without logging its problems. `among` is as in `prepare`, `tenant` as in `bind`."""
        loaded = self._bind(self.prepare(name, among=among), partition, tenant)
        self.let_go(loaded.engines.values())
        return loaded

    def use_options(self, options: Mapping[str, ModelOptions]) -> None:
        """Load these models with these options from now on."""
        self._repository = self._repository.with_options(options)

    def prepare(
        self,
        name: str,
        override: str | None = None,
        among: Mapping[str, LoadedModel] = NOTHING,
        options: Mapping[str, ModelOptions] = NO_OPTIONS,
        pace: Pace | None = None,
    ) -> PreparedModel:
        """Read every version that the model's policy selects, which needs no partition but takes as long as builds do.

        Failures become problems of the result. `override` is a model configuration as JSON that replaces the file beside the
        model. `among` are the tenant's other models, of which ensembles are made; their engines must not be freed meanwhile.
        `options` are used in place of the current ones, by model. What is read waits for the tenant's share of PCIe, `pace`.
        """
        repository = self._repository.with_options(options) if options else self._repository
        listing = repository.read(name, override)
        problems = [IndexEntry(name, problem.version, "UNAVAILABLE", problem.reason) for problem in listing.problems]
        steps = _steps(listing)
        prepared = PreparedModel(LoadedModel(name, [], problems, {}, list(listing.warnings), steps=steps, override=override))
        for file in listing.files:
            resolved = self._resolve(file, prepared.loaded)
            if not resolved.problems:
                with self._recording(file, prepared.loaded):
                    if steps:
                        engine, labelled = self._chain(file, resolved, among, prepared.loaded)
                        prepared.versions.append(PreparedVersion(labelled, resolved, engine, ()))
                    else:
                        stamp = _stamp(file)
                        prepared.versions.append(PreparedVersion(file, resolved, self._engine(file, resolved, pace), stamp))
        return prepared

    def bind(
        self,
        prepared: PreparedModel,
        partition: Partition,
        tenant: TenantConfig | None = None,
        whole: bool = False,
        kept: bool = False,
        background: bool = False,
    ) -> LoadedModel:
        """Bind a model that `prepare` returned to a partition, and log its problems. Call it once for each such model.

        A version whose smallest request does not fit the memory of the `tenant` is a problem, and is not bound: its warm-up
        would take that memory, too.
        `whole`: if one version fails, none is served. `kept` is as in `LoadedModel.messages`. `background`: it may take its
        time, as tenants are served meanwhile. The engines of the result are not freed before `let_go`, called when its
        executors are in a worker, or closed.
        """
        before, began = self._device_loads.waited(), time.monotonic()
        with self._device_loads.background() if background else nullcontext():
            loaded = self._bind(prepared, partition, tenant, whole)
        if background and self._device_loads.waited() - before > LONG_PAUSES:
            text = "model %s: %.0f s to have its kernels loaded, with pauses for what is served (models.paced_loads)"
            log.info(text, loaded.name, time.monotonic() - began)
        self._log(loaded, kept)
        return loaded

    def file_bytes(self, name: str, override: str | None = None) -> int:
        """The size of the files that would be read for a model, 0 for an ensemble. Blocks."""
        files = self._repository.read(name, override).files
        return sum(_stamp(file)[-1] for file in files if not file.config.steps)

    def refuse(self, prepared: PreparedModel, problem: IndexEntry, kept: bool = False) -> LoadedModel:
        """As `bind`, for a model that is not to be bound, for this reason."""
        for version in prepared.versions:
            self._engines.let_go(version.engine)
        prepared.loaded.problems.append(problem)
        self._log(prepared.loaded, kept)
        return prepared.loaded

    def bring_back(self, source: Source, partition: Partition, pace: Pace | None = None) -> Executor:
        """Read and bind a version again that was loaded before. Blocks. Raises ModelRefused, also if its file is another.
        `pace` is as for `prepare`.

        Its engine is not freed before `let_go`, called when the executor is in a worker, or closed.
        """
        file, resolved = source.file, source.resolved
        again = "load the model again"
        try:
            if _stamp(file) != source.stamp:
                raise ModelRefused(f"its file has changed since it was loaded; {again}")
            engine = self._engine(file, resolved, pace)
        except OSError as error:
            raise ModelRefused(f"its file cannot be read: {error.strerror}; {again}") from error
        except EngineError as error:
            raise ModelRefused(_without_path(str(error), file)) from error
        try:
            return engine.bind(partition)
        except BaseException as error:
            self._engines.let_go(engine)
            if isinstance(error, DeviceLost):
                self.on_lost(error)
            if isinstance(error, EngineError):
                raise ModelRefused(_without_path(str(error), file)) from error
            raise

    def let_go(self, engines: Iterable[Engine]) -> None:
        """Executors of these engines, which were bound here, are in a worker now, or closed."""
        for engine in engines:
            self._engines.let_go(engine)

    def free(self, engine: Engine, in_use: Iterable[Executor]) -> None:
        """Free the engine of a model that was paged out or unloaded, unless it is used otherwise. Blocks."""
        self._engines.discard(engine, [executor.engine for executor in in_use])

    def release_unused(self, in_use: Iterable[Executor], quiet: bool) -> bool:
        """Free an unused engine if one should be freed now; see `EnginePool.release`. Blocks."""
        return self._engines.release([executor.engine for executor in in_use], quiet)

    def close(self) -> None:
        """Free every engine; no executor may be left. Blocks."""
        self._engines.close()

    def _bind(
        self, prepared: PreparedModel, partition: Partition, tenant: TenantConfig | None, whole: bool = False
    ) -> LoadedModel:
        """The engines of the result are held, one hold for each version."""
        loaded = prepared.loaded
        for version in prepared.versions:
            before = len(loaded.engines)
            try:
                if not (whole and loaded.problems):
                    with self._recording(version.file, loaded):
                        self._bind_version(version, partition, tenant, loaded, prepared.learnt)
            finally:
                if len(loaded.engines) == before:
                    self._engines.let_go(version.engine)
        if not (whole and loaded.problems):
            return loaded
        discarded = loaded.discard()
        self.let_go(loaded.engines.values())
        return discarded

    @contextmanager
    def _recording(self, file: ModelFile, loaded: LoadedModel) -> Iterator[None]:
        """Record errors as problems of this version."""
        version = str(file.version)
        try:
            yield
        except Exception as error:
            if isinstance(error, DeviceLost):
                self.on_lost(error)
            elif not isinstance(error, EngineError):
                log.exception("unexpected error while loading model %s version %s", file.name, version)
            # Clients see this; it must not name the repository's path.
            reason = _without_path(str(error), file)
            if file.config.steps:  # Errors of its steps may name their files.
                reason = reason.replace(f"{file.path.parent.parent}/", "")
            loaded.problems.append(
                IndexEntry(file.name, version, "UNAVAILABLE", reason + _where_configured(reason, file.config.settings))
            )

    def _resolve(self, file: ModelFile, loaded: LoadedModel) -> ResolvedSettings:
        """How it is to run; what is in the way of that goes to the problems, what is ignored to the warnings, each once."""
        try:
            lacking: Unsupported = partial(self._unsupported, file.path)
            resolved = resolve_settings(file.config.settings, self._base, _of_steps(lacking) if file.config.steps else lacking)
        except EngineError as error:
            resolved = ResolvedSettings(self._base, problems=(str(error),))
        found = [IndexEntry(file.name, "", "UNAVAILABLE", problem) for problem in resolved.problems]
        loaded.problems.extend(entry for entry in found if entry not in loaded.problems)
        loaded.warnings.extend(warning for warning in resolved.warnings if warning not in loaded.warnings)
        padding, optional = (
            bool(file.config.max_batch),
            tuple(sorted(each.name for each in file.config.inputs if each.optional)),
        )
        usual = stated_shapes(file.config, self._max_body)
        known = resolved.settings.merge(batch_padding=padding, optional_inputs=optional, usual_shapes=usual)
        return replace(resolved, settings=known)

    def _log(self, loaded: LoadedModel, kept: bool) -> None:
        """Log each line once although every tenant loads the model, until a load has another result."""
        lines = loaded.messages(kept)
        with self._logging:
            before, self._logged[loaded.name] = self._logged.get(loaded.name, frozenset()), frozenset(lines)
        for line in lines:
            if line not in before:
                log.warning("%s", line, extra={"caller": f"model {loaded.name}"})

    def _bind_version(
        self,
        version: PreparedVersion,
        partition: Partition,
        tenant: TenantConfig | None,
        loaded: LoadedModel,
        learnt: list[tuple[Shape, ...]],
    ) -> None:
        file, resolved, engine, stamp = version
        number, signature = str(file.version), apply(file.config, engine.signature)
        self._check_warm_up(file, resolved.settings, signature)
        outer = file.functions.outer(signature) if file.functions else signature
        functions = file.functions.definition(signature) if file.functions else None
        too_large = fit(outer, tenant) if tenant else ""
        executor = engine.bind(partition)
        if file.text and not file.config.steps:
            loaded.warnings.extend(_try_texts(file, outer, executor, resolved.settings.trial_limit))
        how, why_not = (None, None) if signature.in_parts else batching(file.config, signature)
        try:
            if learnt and (make_ready := getattr(executor, "make_ready", None)) is not None:
                make_ready(learnt)
            rows = self._rows(version, executor, partition, signature, joined=how is not None)
        except BaseException:
            executor.close()
            raise
        if not_joined := rows.why_not(resolved.settings.verify == "required"):
            how, why_not = None, not_joined
            stop_padding(executor)
            resolved = replace(resolved, settings=resolved.settings.merge(batch_padding=False))
        execution = {**executor.describe(), **({"rows": rows.described()} if rows is not UNSEEN else {})}
        notes = [note for note in (why_not, too_large) if note]
        notes += [*_required(file.config, signature), *_notes(execution)]
        loaded.warnings.extend(f"model {file.name} {number}: {note}" for note in notes)
        platform = PLATFORM if file.config.steps else engine.platform
        folder = file.filename.partition("/")[0]
        on_gpu = partition.host_cores is None
        config = describe(file.name, file.config, outer, platform, folder, how, execution, on_gpu)
        config = as_triton(config) if file.config.steps else config
        key = f"{file.name}/{number}#{next(self._loads)}"
        labels, queues = Labels(file.labels), file.config.queues
        served = ModelVersion(file.name, number, key, outer, platform, config, how, labels, queues, functions, file.text)
        loaded.served.append(served)
        loaded.executors[key] = executor
        loaded.engines[key] = engine
        loaded.sources[key] = Source(file, resolved, stamp)

    def _rows(
        self, version: PreparedVersion, executor: Executor, partition: Partition, signature: Signature, joined: bool
    ) -> Rows:
        """What is found of the model's rows where requests would be joined, or the library would add rows."""
        file, settings = version.file, version.resolved.settings
        pads = version.engine.by_shape and settings.pads(signature) and largest_batch(signature) > 1
        if settings.verify == "off" or not (joined or pads):
            return UNSEEN
        return look(executor, partition, signature, settings, file.path if file.path.suffix == ".onnx" else None)

    def _check_warm_up(self, file: ModelFile, settings: RuntimeSettings, signature: Signature) -> None:
        """Raise ModelRefused for warm-up inputs that are larger than any possible request."""
        samples, most = settings.warm_up if isinstance(settings.warm_up, tuple) else (), largest_batch(signature)
        for sample in samples:
            where = file.config.settings["warm_up"].where
            if most and isinstance(sample, int) and sample > most:
                raise ModelRefused(f"{where}: {sample} is above the model's largest batch, which is {most}")
            if (nbytes := _nbytes(sample, signature)) > self._max_body:
                text = f"inputs of {nbytes} bytes, but the server takes bodies of up to {self._max_body}"
                raise ModelRefused(f"{where}: {text}; leave it out, or raise server.max_body")

    def _engine(self, file: ModelFile, resolved: ResolvedSettings, pace: Pace | None) -> Engine:
        """The engine of the current file with these settings, held until `EnginePool.let_go`.

        One that has to be read first waits for the tenant's share of PCIe, as if its weights were as large as its file.
        """
        settings, max_batch, stamp = resolved.settings, file.config.max_batch or None, _stamp(file)

        def read() -> Engine:
            if pace is not None:
                pace.pay(stamp[-1])
            return self._read(file.path, max_batch, settings)

        return self._engines.hold((file.path, max_batch, settings, *stamp), read)

    def _chain(
        self, file: ModelFile, resolved: ResolvedSettings, among: Mapping[str, LoadedModel], loaded: LoadedModel
    ) -> tuple[Engine, ModelFile]:
        """The engine of an ensemble, from the tenant's current models, held until `EnginePool.let_go`; and its file with the
        labels of its steps for outputs without labels of their own.
        """
        steps = file.config.steps
        parts = [self._step_model(step, among) for step in steps]
        links = chain_steps(steps, parts, file.config.max_batch or 0)
        loaded.warnings.extend(f"model {file.name} {file.version}: {note}" for note in step_warnings(steps, parts))
        outputs = tuple(tensor.name for tensor in file.config.outputs)
        labelled = replace(file, labels={**step_labels(steps, parts, outputs), **file.labels})
        key = (PLATFORM, identity(links), outputs, resolved.settings)
        engines = [part.engine for part in parts]
        return self._engines.hold(key, lambda: chain(links, outputs, resolved.settings), engines), labelled

    def _step_model(self, step: EnsembleStep, among: Mapping[str, LoadedModel]) -> StepModel:
        """The tenant's model that serves a step. Raises ModelRefused."""
        model = among.get(step.model)
        if model is None:
            known = self.names()
            if step.model in known and self.steps(step.model):  # It may be loaded later.
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


def _try_texts(file: ModelFile, signature: Signature, executor: Executor, seconds: int | None) -> list[str]:
    """Run the longest text that requests may have, for so many seconds, where only the model knows whether it takes that: lines
    for the log.

    Above `_MOST_TRIED` tokens the number of positions in the model's config.json is believed, as a run takes long. Raises
    ModelRefused; the executor is closed then.
    """
    from ..text.encoder import Encoder

    folder = file.text
    assert folder
    try:
        encoder = Encoder(signature, file.text_options, folder)
    except NoEncoder as error:
        return [f"model {file.name} {file.version} does not take texts: {error}"]
    notes = [f"model {file.name} {file.version}: {note}" for note in encoder.notes]
    if file.functions or not encoder.is_free or _MOST_TRIED < encoder.most <= folder.positions:
        return notes
    longest = encoder.longest()
    inputs = [Tensor.of(array) for array in longest.arrays]
    try:
        wait_within(executor.enqueue(inputs), seconds)
    except EngineError as error:
        executor.close()
        raise ModelRefused(
            f"a text of {encoder.most} tokens, the longest that requests may have, fails: {error}; set max_tokens of the table "
            f"text in [{dotted(('models', file.name))}] to the most that the model takes"
        ) from error
    return notes


_MOST_TRIED = 1024
_NESTED = "is an ensemble, which cannot be a step; name its steps instead"


def _without_path(text: str, file: ModelFile) -> str:
    """A text for clients, with the model's name in place of its path."""
    return text.replace(str(file.path), f"{file.name}/{file.version}/{file.filename}".rstrip("/"))


def _stamp(file: ModelFile) -> Stamp:
    """Raises OSError."""
    found = os.stat(file.path)
    return found.st_ino, found.st_mtime_ns, found.st_size


def open_model_loader(
    config: Config,
    device: Device | None,
    read: Read | None = None,
    builds: Builds | None = None,
    tenants: Collection[str] | None = None,
) -> ModelLoader:
    """The loader for a configuration and a device, used by the server and by the check.

    `read` replaces the libraries that load engines; `builds` builds ONNX files for them. `tenants` are those of this process,
    by default all. On a CPU outputs whose size the data decides may take the largest memory of these: what is over a tenant's
    own is refused after the run. There a warm-up may take as long as the longest inference of these.
    """
    base = default_settings(config.device)
    here = config.tenants if tenants is None else tenants
    served = [config.tenants[name].memory for name in here]
    if served and (device is None or device.kind == "cpu"):
        base = base.merge(memory_limit=max(served), trial_limit=_trial_limit(config, here))
    return ModelLoader(
        Repository(config.models.repository, config.models.options, config.source, config.models.python),
        read or (lambda path, max_batch, settings: load_engine(path, device, settings, max_batch, builds)),
        base,
        lambda path, asked: unsupported(path, device, asked),
        config.server.max_body,
        device.loads if device else None,
        making_of(device, builds, len(here) / max(1, len(config.tenants))) if device and builds and not read else None,
    )


def _trial_limit(config: Config, tenants: Iterable[str]) -> int | None:
    limits = [config.execution_limit(name)[0] for name in tenants]
    return math.ceil(max(limits)) if all(limits) else None


def _nbytes(sample: Sample, signature: Signature) -> int:
    """Bytes of a sample's inputs at least: unspecified dimensions count as 1."""
    total = 0
    for spec in signature.inputs:
        shape = tuple(dim if isinstance(dim, int) else 1 for dim in spec.dims)
        if not isinstance(sample, int):
            shape = dict(sample).get(spec.name, shape)
        elif spec.dims and isinstance(spec.dims[0], str):
            shape = (sample, *shape[1:])
        total += spec.nbytes(shape) or math.prod(shape)
    return total


def _where_configured(reason: str, settings: StatedSettings) -> str:
    """Where the setting was configured that an error names by its internal name."""
    ours = {field: said.where for field, said in settings.items() if "_" in field and not said.is_tritons}
    found = [where for field, where in ours.items() if field in reason and field not in where]
    return f" ({', '.join(found)})" if found else ""


def _steps(listing: Listing) -> tuple[str, ...]:
    return tuple(dict.fromkeys(step.model for file in listing.files for step in file.config.steps))


def _of_steps(unsupported: Unsupported) -> Unsupported:
    """The settings that an ensemble cannot honour, because its steps have their own."""
    return lambda asked: {**unsupported(asked), **{field: NO_OWN_SETTINGS for field in asked if field not in SETTINGS}}


def _required(config: ModelConfig, signature: Signature) -> Iterator[str]:
    """Warnings about inputs that are configured as optional but have no default."""
    optional = [each.name for each in config.inputs if each.optional]
    for spec in signature.inputs:
        if spec.name in optional and spec.default is None:
            yield f"input {spec.name!r} is optional in {config.source}, but the model has nothing to take in its place: send it"


def _notes(execution: Mapping[str, object]) -> list[str]:
    found = execution.get("notes")
    return [str(note) for note in found] if isinstance(found, list) else []
