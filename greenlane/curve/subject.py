"""The device, and the models to measure on it: of a repository, loaded as the server loads them, or one file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager

from engines import Engine, ModelRefused, Signature, load_engine
from engines.signature import Shape
from greenlane.models import check_name, configured
from partitions import Device, Partition
from server.config.schema import Config
from server.device.cache_paths import open_builds
from server.device.loaded_model import LoadedModel
from server.device.model_loader import ModelLoader, open_model_loader
from server.repository.model_settings import default_settings

from .options import Options
from .requests import Slots, Source, shapes_of

DEFAULT_BATCH = 8
"""Rows that a file is built for on a GPU, as in the server."""

Shapes = Mapping[str, Shape]


class Subject:
    """Models bound to one partition after another, with requests of `batch` rows in memory that is used for all of them."""

    def __init__(self, device: Device, batch: int, shapes: Shapes) -> None:
        self.device = device
        self._batch = batch
        self._shapes = shapes
        self._slots: dict[str, Slots] = {}

    def close(self) -> None:
        """Unlock the requests' memory."""
        for slots in self._slots.values():
            slots.close()

    def bind(self, partition: Partition, stack: ExitStack) -> Sequence[Source]:
        """Bind the models to a partition; `stack` gets what closes them. Raises ModelRefused."""
        raise NotImplementedError

    def slots(self, name: str, signature: Signature, asked: Callable[[str], Shapes]) -> Slots:
        """The requests of a model, made at the first call. Raises ModelRefused."""
        if signature.in_parts:
            raise ModelRefused(f"model {name} answers in parts, which cannot be measured; measure the model that it runs")
        if name not in self._slots:
            self._slots[name] = Slots(self.device, signature, shapes_of(name, signature, self._batch, asked(name)))
        return self._slots[name]


class FileSubject(Subject):
    """An engine of a file by itself."""

    def __init__(self, device: Device, engine: Engine, name: str, batch: int, shapes: Shapes) -> None:
        super().__init__(device, batch, shapes)
        self._engine = engine
        self._name = name

    def bind(self, partition: Partition, stack: ExitStack) -> Sequence[Source]:
        slots = self.slots(self._name, self._engine.signature, lambda _: self._shapes)
        executor = self._engine.bind(partition)
        stack.callback(executor.close)
        return [Source(executor, slots)]


class RepositorySubject(Subject):
    """Models of the repository, at their highest versions."""

    def __init__(
        self, device: Device, loader: ModelLoader, names: Sequence[str], batch: int, shapes: Shapes, several: bool = False
    ) -> None:
        super().__init__(device, batch, shapes)
        self._loader = loader
        self._names = tuple(names)
        self._several = several

    def bind(self, partition: Partition, stack: ExitStack) -> Sequence[Source]:
        """Loads them too, and the steps of ensembles."""
        wanted = dict.fromkeys(self._names)
        for name in self._names:
            wanted |= dict.fromkeys(self._loader.steps(name))
        bound: dict[str, LoadedModel] = {}
        for name in self._loader.in_order(wanted):
            loaded = bound[name] = self._loader.attempt(name, partition, among=bound)
            for executor in loaded.executors.values():
                stack.callback(executor.close)
        return [self._source(bound[name]) for name in self._names]

    def _source(self, loaded: LoadedModel) -> Source:
        if not loaded.served:
            raise ModelRefused(f"model {loaded.name} cannot be served: {loaded.why()}")
        served = max(loaded.served, key=lambda each: int(each.version))
        slots = self.slots(loaded.name, served.signature, lambda name: self._asked(name, served.signature))
        return Source(loaded.executors[served.key], slots)

    def _asked(self, model: str, signature: Signature) -> Shapes:
        """The shapes given for a model: those that name it, and those that name none.

        Of several models, the latter are for inputs of that name whose sizes vary.
        """
        named = {key.removeprefix(f"{model}/"): shape for key, shape in self._shapes.items() if key.startswith(f"{model}/")}
        varies = {spec.name for spec in signature.inputs if any(isinstance(dim, str) for dim in spec.dims[1:])}
        rest = {key: shape for key, shape in self._shapes.items() if key in varies or not self._several}
        return {key: shape for key, shape in rest.items() if not key.startswith(f"{model}/")} | named


@contextmanager
def opened(options: Options) -> Iterator[tuple[Config, Device, Subject]]:
    """The configuration, the device and what to measure of one MODEL. Raises ConfigError, PartitionError, ModelRefused."""
    assert options.model is not None
    with ExitStack() as stack:
        path, config, device = stack.enter_context(configured(options.model, options.config))
        if path:
            batch = max(options.batch, DEFAULT_BATCH)
            settings, builds = default_settings(config.device), open_builds(config.models)
            engine = stack.enter_context(closing(load_engine(path, device, settings, batch, builds)))
            found: Subject = FileSubject(device, engine, path.name, options.batch, options.shapes)
        else:
            loader = stack.enter_context(closing(open_model_loader(config, device, builds=open_builds(config.models))))
            check_name(options.model, loader, config.source)
            found = RepositorySubject(device, loader, [options.model], options.batch, options.shapes)
        yield config, device, stack.enter_context(closing(found))
