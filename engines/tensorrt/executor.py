"""One engine's inferences on one green context: copies, engine and copies, as one graph for each set of input shapes.

Inferences run one after another on the partition's stream. How many are in flight is up to the ring of tables and events.
A graph that is launched does not touch the execution context it was captured from. Where nothing can be captured, contexts
with graphs of the library's own take over, if it has any, with the copies around them.
Completion is an event that a thread waits for while it spins, without the GIL: a blocking event wakes 60 us late.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from cuda.core import Event, Stream

from partitions import Partition, PartitionError
from partitions.cuda.device import AdoptedPartition, CudaPartition, SideStream
from partitions.cuda.driver import CUDAError

from ..base import NO_ROOM, Room, Tensor, check_tensors
from ..errors import ExecutionFailed, ModelRefused
from ..settings import overridden
from ..signature import Shape, align
from ..streams import selected
from .address_cache import Route, Routes
from .copies import LENGTH, Span
from .graph_mode import captures_instead
from .instance import Instance
from .lifetime import Held
from .shapes import Fit, Override, Prepared, ReadyShapes
from .staging import Staging
from .stream_order import Ordering, open_ordering
from .work import Ended, JoinedWork, Mark, TensorRTWork, failing, failure

if TYPE_CHECKING:
    from .engine import TensorRTEngine


class Equipment(NamedTuple):
    """What an executor owns on its partition: auxiliary streams, an event for each place in its ring, and its ordering."""

    extra: Sequence[SideStream]
    events: Sequence[Event]
    ordering: Ordering


class TensorRTExecutor:
    """An instance on a partition; see `engines.base.Executor` for the contract. A second thread waits its turn.

    One that is not closed is released when it is collected, which no work of it in flight allows: see `Held`.

    `enqueue` waits in these cases: the first inference of a set of shapes, for which kernels are compiled and a graph is
    captured, unless `preparing` had it ready; a full ring; and where nothing is captured (`graphs` off, streamed weights,
    lazy kernels with dynamic inputs), every change of shapes, for the work in flight. Where the size of an output depends on
    data the library waits, in every inference, for what decides it; such outputs are never in the room.
    """

    def __init__(self, engine: "TensorRTEngine", partition: CudaPartition, instance: Instance, equipment: Equipment) -> None:
        self.engine = engine
        self.instance = instance
        self._loaded = engine.loaded
        self._partition = partition
        self._stream = partition.stream
        self._own = partition.handle if isinstance(partition, AdoptedPartition) else None  # The caller may capture it.
        self._events = equipment.events
        self._ordering = equipment.ordering
        self._extra = equipment.extra
        self._staging = Staging(engine.loaded.notice, partition.device.index, instance.sizes, len(engine.signature.inputs))
        self._routes = Routes(partition.device)
        self._turn = RLock()
        self._shapes = ReadyShapes(engine.loaded, partition, instance, equipment.extra, self._turn)
        self._depth = LENGTH // 2 if instance.unsized else LENGTH  # Those take two tables of the ring each.
        self._runs = self._staged = self._padded = 0
        self._overrides: list[tuple[ReadyShapes, Routes]] = []
        self._ended = Ended()
        things = (equipment.ordering, *equipment.events, *equipment.extra, self._staging)
        self._held = Held(f"<TensorRTExecutor {engine.path.name}>", engine.pool, instance, partition, things, self._shapes)
        engine.pool.add(self._held)
        weakref.finalize(self, self._held.collected)

    def __repr__(self) -> str:
        state = ", closed" if self._held.closed else ""
        captures = self._shapes.statistics().captures
        return f"<TensorRTExecutor {self.engine.path.name}, {self._runs} runs, {captures} captures{state}>"

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> TensorRTWork | JoinedWork:
        with self._turn:
            self._check_open()
            try:
                handle = selected()
                if handle is None:
                    handle = self._own
                if handle is not None and handle == self._own and self._ordering.is_capturing(handle):
                    with self._ordering.at_home():
                        return self._join(inputs, room)
                if handle is None:
                    if self._ordering.is_primary_current:
                        return self._enqueue(inputs, room, self._stream)
                    with self._ordering.at_home():
                        return self._enqueue(inputs, room, self._stream)
                with self._ordering.around(handle) as stream:
                    return self._enqueue(inputs, room, stream)
            except (CUDAError, PartitionError) as error:
                raise failure(error, f"running {self.engine.path.name}") from error

    def preparing(self, shapes: Sequence[Shape]) -> "Future[None] | None":
        with self._turn:
            self._check_open()
            return self._shapes.preparing(tuple(shapes))

    def rebind(self, partition: Partition) -> "TensorRTExecutor":
        with self._turn:
            self._check_open()
            if self._overrides:
                raise ExecutionFailed(f"{self!r} does not move while its settings are overridden; end that first")
        return self.engine.rebind(self, partition)

    def adopt(self, other: "TensorRTExecutor") -> None:
        """Have graphs here for every set of shapes that the other has. On an attached thread. Blocks for some 10 ms each.

        Raises ExecutionFailed, DeviceLost.
        """
        with failing(f"moving {other!r}"):
            self._shapes.adopt(other._shapes)
            self._shapes.warming = False

    def warm_up(self, sets: Iterable[Sequence[Shape]]) -> None:
        """Make these sets of shapes ready, and run each once. Zeros go in. Blocks. Raises ExecutionFailed."""
        self._staging.silent = True
        for shapes in sets:
            specs = self.engine.signature.inputs
            blanks = [np.zeros(spec.nbytes(shape), np.uint8) for spec, shape in zip(specs, shapes, strict=True)]
            self.enqueue([Tensor(shape, a.ctypes.data, a.nbytes, a) for shape, a in zip(shapes, blanks, strict=True)]).wait()
        self._staging.silent = self._shapes.warming = False

    @contextmanager
    def overriding(self, **changes: Any) -> Iterator[None]:
        """As `Executor.overriding`. Within it nothing of what the executor had ready is used, or lost."""
        with self._turn:
            self._check_open()
            settings = overridden(self._shapes.settings, changes)
            if settings.copies != "engine" and True not in self.instance.copies:
                raise ModelRefused(
                    f"{self.engine.path}: copies {settings.copies!r} need what it was not loaded with; load it so"
                )
            capture = captures_instead(settings, self._loaded.situation, self.instance.way, self.instance.unsized)
            override = Override(settings, capture)
            shapes = ReadyShapes(self._loaded, self._partition, self.instance, self._extra, self._turn, override)
            shapes.warming = False
            before, self._shapes, self._routes = (self._shapes, self._routes), shapes, Routes(self._partition.device)
            self._overrides.append(before)
        try:
            yield
        finally:
            self._restore(before)

    def _restore(self, before: tuple[ReadyShapes, Routes]) -> None:
        """Have ready again what was so before an override, and destroy what that had, once; blocks."""
        self._shapes.finish()
        with self._turn:
            if before in self._overrides:
                left, (self._shapes, self._routes) = self._shapes, self._overrides.pop()
                with failing(f"restoring {self!r}"), self._partition.device.current(), ExitStack() as after:
                    after.callback(left.close)
                    self._stream.sync()

    def close(self) -> None:
        """Wait for the stream, then destroy graphs and events and give the instance back, whatever fails. Any thread.

        Raises ExecutionFailed, DeviceLost.
        """
        while self._overrides:
            self._restore(self._overrides[-1])
        self._shapes.finish()
        with self._turn:
            self._held.release()
        self.engine.pool.release_left()

    def describe(self) -> Mapping[str, object]:
        """How it runs, as JSON values; see `engines.base.Executor`."""
        settings, way, shapes = self._shapes.settings, self.instance.way, self._shapes.statistics()
        kernels = self.instance.kernels()
        return {
            "graphs": "native" if way.native else "captured" if self._shapes.captures else "none",
            "why": way.notice,
            "notes": [way.notice] if way.notice else [],
            "counts": {
                "captures": shapes.captures,
                "compilations": shapes.compiled,
                "fallbacks": shapes.fallbacks,
                "padded": self._padded,
                "staged": self._staged,
            },
            "copies": settings.copies,
            "shapes": [[list(shape) for shape in names] for names in self._shapes.names()],
            "profiles": len(self.instance.contexts),
            "kernels": {"found": kernels.found, "saved": kernels.saved, "refused": kernels.refused},
        }

    def _check_open(self) -> None:
        if self._held.closed:
            raise ExecutionFailed(f"{self!r} takes nothing more; bind the engine again")

    def _enqueue(self, inputs: Sequence[Tensor], room: Room, stream: Stream) -> TensorRTWork:
        place = self._runs % self._depth
        event = self._events[place]
        if self._runs - self._ended.count >= self._depth:  # What used this place before was not seen to have ended.
            event.sync()
        self._staging.reclaim(place)
        if self.instance.unsized:
            return self._enqueue_unsized(place, inputs, stream)
        route = self._routes.find(inputs, room) or self._open(place, inputs, room, stream)
        prepared = route.prepared
        try:
            prepared.copies.write(route.table)
            self._submit(prepared, stream)
            stream.record(event)
        except BaseException:
            self._recover(prepared, stream)
            raise
        self._shapes.used(prepared)
        self._padded += route.padded
        mark = Mark(event, self._runs, self._ended, self)
        if not route.staged:
            return TensorRTWork(mark, route.outputs)
        self._staged += 1
        return self._staging.lend(place, mark, route.outputs)

    def _enqueue_unsized(self, place: int, inputs: Sequence[Tensor], stream: Stream) -> TensorRTWork:
        """Copies in, engine, then copies out of the sizes that the engine has said by then: two turns of the copies.

        The outputs are always staged: memory for them cannot be chosen before their sizes are known.
        """
        check_tensors(self.engine.signature, inputs)
        prepared = self._shapes.prepare(tuple([tensor.shape for tensor in inputs]), stream).prepared
        try:
            sources = [self._staging.source(place, index, tensor) for index, tensor in enumerate(inputs)]
            outputs = self._run_unsized(place, prepared, self._spans(sources, inputs, ()), stream)
            stream.record(self._events[place])
        except BaseException:
            self._recover(prepared, stream)
            raise
        self._runs += 1
        self._staged += 1
        self._shapes.used(prepared)
        return self._staging.lend(place, Mark(self._events[place], self._runs, self._ended, self), outputs)

    def _run_unsized(self, place: int, prepared: Prepared, into: list[Span], stream: Stream) -> tuple[Tensor, ...]:
        copies, outputs, none = prepared.copies, len(self.engine.signature.outputs), (0, 0, 0)
        copies.write(copies.table([*into, *[none] * outputs]))
        copies.bring_in(stream)
        refused = self._shapes.run(prepared, stream)
        copies.take_out(stream)
        copies.count()
        self._loaded.check_execution(refused)
        tensors, _ = self._lay_out(prepared.context.answered(), self._staging.room(place, quiet=True).address)
        copies.write(copies.table([*[none] * len(into), *self._spans((), (), tensors)]))
        copies.bring_in(stream)
        copies.take_out(stream)
        copies.count()
        return tensors

    def _join(self, inputs: Sequence[Tensor], room: Room) -> JoinedWork:
        """Put an inference into the graph that the caller captures from the stream that was adopted: see `engines.streams`."""
        check_tensors(self.engine.signature, inputs)
        shapes = tuple([tensor.shape for tensor in inputs])
        self._loaded.signature.check(shapes)
        fit = None if self.instance.unsized else self._shapes.find(shapes)
        if fit is None or fit.prepared.graph is None:
            without = self.instance.way.notice or "graphs of ours are off"
            why = "run these shapes once before the capture, to be compiled for" if self._shapes.captures else without
            raise ExecutionFailed(f"{self.engine.path.name} cannot be part of a graph that is being captured: {why}")
        outputs, end = self._lay_out(fit.outputs, room.address)
        specs = self.engine.signature.inputs
        lacking = [spec.name for spec, tensor in zip(specs, inputs, strict=True) if not self._is_there(tensor)]
        if lacking or end - room.address > room.nbytes or not self._staging.reaches(room.address):
            what = f"input {lacking[0]!r} lies" if lacking else f"the {end - room.address} bytes of its outputs would lie"
            raise ExecutionFailed(
                f"{what} where the GPU cannot reach; give a graph that is captured pinned memory, or the GPU's"
            )
        self._shapes.join(fit.prepared, self._spans([tensor.address for tensor in inputs], inputs, outputs), self._stream)
        return JoinedWork(outputs)

    def _is_there(self, tensor: Tensor) -> bool:
        return not tensor.nbytes or self._staging.reaches(tensor.address)

    def _open(self, place: int, inputs: Sequence[Tensor], room: Room, stream: Stream) -> Route:
        """The way from these inputs to this room, through pinned memory where it has to be; remembered where it has not."""
        check_tensors(self.engine.signature, inputs)
        fit = self._shapes.prepare(tuple([tensor.shape for tensor in inputs]), stream)
        try:
            sources = [self._staging.source(place, index, tensor) for index, tensor in enumerate(inputs)]
            outputs, staged = self._destinations(place, fit, room)
            table = fit.prepared.copies.table(self._spans(sources, inputs, outputs))
        except BaseException:
            self._recover(fit.prepared, stream)
            raise
        route = Route(fit.prepared, table, outputs, staged, fit.outputs is not fit.prepared.outputs)
        self._routes.keep(inputs, room, route)
        return route

    def _submit(self, prepared: Prepared, stream: Stream) -> None:
        """The copies count the inference on the device, and here: once the last of them was submitted, in whichever way."""
        copies, graph, refused = prepared.copies, prepared.graph, ""
        around = graph is None or not copies.captured
        if around:
            copies.bring_in(stream)
        if graph is None:
            refused = self._shapes.run(prepared, stream)
        else:
            graph.launch(stream)
        if around:
            copies.take_out(stream)
        copies.count()
        self._runs += 1
        self._loaded.check_execution(refused)

    def _recover(self, prepared: Prepared, stream: Stream) -> None:
        """Wait for what was submitted of a failed inference, whose memory is the caller's again; its shape counts as new."""
        if prepared.graph is None:
            self._shapes.forget(prepared)
        stream.sync()

    def _destinations(self, place: int, fit: Fit, room: Room) -> tuple[tuple[Tensor, ...], bool]:
        """Where the outputs go: the room, or pinned memory if they do not fit there or the GPU cannot reach it."""
        outputs, end = self._lay_out(fit.outputs, room.address)
        if end - room.address <= room.nbytes and self._staging.reaches(room.address):
            return outputs, False
        return self._lay_out(fit.outputs, self._staging.room(place).address)[0], True

    def _lay_out(self, shapes: Sequence[Shape], address: int) -> tuple[tuple[Tensor, ...], int]:
        tensors, end = [], address
        for spec, shape in zip(self.engine.signature.outputs, shapes, strict=True):
            tensors.append(Tensor(shape, align(end), spec.nbytes(shape)))
            end = align(end) + tensors[-1].nbytes
        return tuple(tensors), end

    def _spans(self, sources: Sequence[int], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Span]:
        count, addresses = len(self.engine.signature.inputs), self.instance.addresses
        into = [(at, to, t.nbytes) for at, to, t in zip(sources, addresses, inputs, strict=False)]
        return into + [(at, t.address, t.nbytes) for at, t in zip(addresses[count:], outputs, strict=False)]


def equip(partition: CudaPartition, extra: int, made: ExitStack) -> Equipment:
    """What an executor needs on a partition; `made` undoes it. On an attached thread. Raises PartitionError, CUDAError."""
    device: Any = partition.device.make_current()
    streams = []
    for _ in range(extra):
        streams.append(partition.make_stream())
        made.callback(streams[-1].close)
    events = []
    for _ in range(LENGTH):
        events.append(device.create_event())
        made.callback(events[-1].close)
    ordering = open_ordering(device, partition)
    made.callback(ordering.close)
    return Equipment(streams, events, ordering)
