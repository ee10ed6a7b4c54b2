"""The device, and the models to measure on it: of a repository, loaded as the server loads them, or one file."""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from engines import (
    Engine,
    EngineError,
    Executor,
    ModelRefused,
    Room,
    Signature,
    Tensor,
    TensorMismatch,
    TensorSpec,
    Work,
    load_engine,
)
from engines.signature import Shape, align, dims_text
from greenlane.models import check_name, configured
from partitions import Device, Partition, Unsupported
from partitions.cuda.nvml import Nvml, open_nvml
from partitions.health import on_bus
from server.device.ahead import open_builds
from server.device.loaded_model import LoadedModel
from server.device.model_loader import ModelLoader, open_model_loader
from server.repository.model_settings import default_settings

from .options import Options

SLOTS = 4
"""Requests that have memory of their own and are sent in turn: more than are in flight."""


class Slots:
    """Shared memory with the inputs of SLOTS requests and room for their outputs, page-locked for the device until `close`."""

    def __init__(self, device: Device, signature: Signature, shapes: Sequence[Shape]) -> None:
        sizes = signature.check(shapes)
        data = [_data(spec, shape) for spec, shape in zip(signature.inputs, shapes, strict=True)]
        offsets = [0]
        for each in data:
            offsets.append(align(offsets[-1] + len(each)))
        one = max(align(offsets[-1] + signature.output_bytes(sizes)), 64)
        self._pages = mmap.mmap(-1, SLOTS * one)
        start: int = np.frombuffer(self._pages, np.uint8, 1).ctypes.data
        self._pinned = device.pin(start, SLOTS * one)
        self.requests: list[tuple[list[Tensor], Room]] = []
        for slot in range(SLOTS):
            base = slot * one
            for offset, each in zip(offsets, data, strict=False):
                self._pages[base + offset : base + offset + len(each)] = each
            tensors = [
                Tensor(shape, start + base + offset, len(each))
                for shape, offset, each in zip(shapes, offsets, data, strict=False)
            ]
            self.requests.append((tensors, Room(start + base + offsets[-1], one - offsets[-1])))

    def close(self) -> None:
        """Unlock the memory. Nothing may be in flight."""
        self._pinned.close()


@dataclass(slots=True)
class Source:
    """Requests of one model on an executor, from slots in turn. One thread at a time."""

    executor: Executor
    slots: Slots
    turn: int = 0
    last: Work | None = None

    def enqueue(self) -> Work:
        """Put the next request on the partition's stream."""
        self.turn = (self.turn + 1) % SLOTS
        inputs, room = self.slots.requests[self.turn]
        self.last = self.executor.enqueue(inputs, room)
        return self.last

    def drain(self) -> None:
        """Wait until nothing is in flight, also after an error. Blocks."""
        if self.last:
            with suppress(EngineError):
                self.last.wait()


def shapes_of(name: str, signature: Signature, batch: int, given: Mapping[str, Shape]) -> list[Shape]:
    """The shape of each input of a request of `batch` rows; `given` are those of some inputs, by name.

    Raises ModelRefused for a batch that the model does not take, or that the shapes do not have, for sizes that vary and were
    not given, for an input that it does not have, and for a shape that it does not take.
    """
    known = [spec.name for spec in signature.inputs]
    if unknown := [each for each in given if each not in known]:
        raise ModelRefused(f"--shape {unknown[0]}: model {name} has no such input; it has {', '.join(known) or 'none'}")
    if signature.max_batch and batch > signature.max_batch:
        raise ModelRefused(f"--batch {batch}: model {name} takes up to {signature.max_batch} rows in one run (its max_batch)")
    if batch > 1 and not any(spec.dims and isinstance(spec.dims[0], str) for spec in signature.inputs):
        there = ", ".join(f"{spec.name} {dims_text(spec.dims)}" for spec in signature.inputs) or "none"
        raise ModelRefused(f"--batch {batch}: model {name} takes no batches; its inputs are {there}")
    if vary := [spec for spec in signature.inputs if spec.name not in given and _varies(spec)]:
        which = " and of ".join(f"{spec.name} {dims_text(spec.dims)}" for spec in vary)
        words = " ".join(f"--shape {spec.name}:{_example(spec, batch)}" for spec in vary)
        inputs = "inputs" if len(vary) > 1 else "input"
        raise ModelRefused(f"model {name}: sizes of its {inputs} {which} vary; say which to measure, as in {words}")
    shapes = [given.get(spec.name) or _shape(spec, batch) for spec in signature.inputs]
    try:
        signature.check(shapes)
    except TensorMismatch as error:
        raise ModelRefused(f"model {name}: {error}") from error
    rows = {
        shape[0] for spec, shape in zip(signature.inputs, shapes, strict=True) if spec.dims and isinstance(spec.dims[0], str)
    }
    if batch > 1 and batch not in rows:
        raise ModelRefused(
            f"--batch {batch}: the shapes given for model {name} have other rows: {', '.join(map(str, sorted(rows)))}"
        )
    return shapes


_ANY_SIZE = 64
"""The size in the example of --shape, for a dimension that may have any."""


def _varies(spec: TensorSpec) -> bool:
    """Whether more than the number of its rows varies, and there is no default."""
    return spec.default is None and any(isinstance(dim, str) for dim in spec.dims[1:])


def _example(spec: TensorSpec, batch: int) -> str:
    rest = [dim if isinstance(dim, int) else _ANY_SIZE for dim in spec.dims[1:]]
    return "x".join(map(str, [spec.dims[0] if isinstance(spec.dims[0], int) else batch, *rest]))


def _shape(spec: TensorSpec, batch: int) -> Shape:
    if spec.default is not None:
        return spec.default.shape
    return tuple(batch if isinstance(dim, str) else dim for dim in spec.dims)


def _data(spec: TensorSpec, shape: Shape) -> bytes:
    """Numbers from 0 to 1 for floats, by a fixed seed; else zeros, which are right for any index; empty strings for BYTES."""
    if spec.default is not None and shape == spec.default.shape:
        return spec.default.data
    count = math.prod(shape)
    if not spec.datatype.size:
        return bytes(4 * count)
    if spec.datatype.name in ("FP16", "FP32", "FP64"):
        return np.random.default_rng(0).random(count).astype(spec.datatype.numpy).tobytes()
    return bytes(count * spec.datatype.size)


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


def counters(device: Device) -> Nvml:
    """What counts the bytes that a device moves. Raises Unsupported."""
    nvml = open_nvml(device.address) if on_bus(device.address) else None
    if nvml is None or nvml.traffic() is None:
        raise Unsupported(f"--bandwidth: {device.describe()} has no counters of what it moves; whole GPUs from Hopper on have")
    return nvml


@contextmanager
def opened(options: Options) -> Iterator[tuple[Device, Nvml | None, Subject]]:
    """The device, its counters if they are asked for, and what to measure of one MODEL.

    Raises ConfigError, PartitionError, ModelRefused.
    """
    assert options.model is not None
    with ExitStack() as stack:
        path, config, device = stack.enter_context(configured(options.model, options.config))
        counts = counters(device) if options.bandwidth else None
        if path:
            batch = max(options.batch, DEFAULT_BATCH)
            settings, builds = default_settings(config.device), open_builds(config.models)
            engine = stack.enter_context(closing(load_engine(path, device, settings, batch, builds)))
            found: Subject = FileSubject(device, engine, path.name, options.batch, options.shapes)
        else:
            loader = stack.enter_context(closing(open_model_loader(config, device, builds=open_builds(config.models))))
            check_name(options.model, loader, config.source)
            found = RepositorySubject(device, loader, [options.model], options.batch, options.shapes)
        yield device, counts, stack.enter_context(closing(found))
