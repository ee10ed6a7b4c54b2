"""One engine's inferences on one green context: copies, engine and copies, as one graph from the third of a shape on.

An executor has one execution context, whose inferences run one after another on the partition's stream. How many are in
flight is up to the ring of tables and events. The host touches the context only to run a shape for the first time or to
capture it, and then waits until nothing of it is in flight; a graph that is launched again does not touch it. Where nothing
can be captured, a context with graphs of the library's own takes over, if it has any, with the copies around it.
Completion is an event that a thread waits for while it spins, without the GIL: a blocking event wakes 60 us late.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.core import Buffer, Event, Stream

from partitions import PartitionError
from partitions.cuda import CudaPartition, SideStream
from partitions.faults import CUDAError

from .base import NO_ROOM, Room, Tensor, check_tensors
from .callers import selected
from .copies import LENGTH, Copies, Span, by_sms
from .errors import EngineError, ExecutionFailed
from .ordering import Ordering
from .signature import Shape, align
from .tensorrt_capture import capture
from .tensorrt_context import Context, Contexts
from .tensorrt_graphs import Way, fall_back, refusal
from .tensorrt_routes import Prepared, Route, Routes
from .tensorrt_staging import Staging
from .tensorrt_work import Ended, Mark, TensorRTWork, failing, failure

if TYPE_CHECKING:
    from .tensorrt_engine import TensorRTEngine

log = logging.getLogger("greenlane.engines")

MOST_GRAPHS = 32
"""Shapes of one executor that are remembered, the least recently used forgotten."""


@dataclass(frozen=True, slots=True)
class Equipment:
    """What an executor owns from the start. `buffers` are on the device, for inputs, then outputs; `copies` by whether the
    SMs do them; `rest` is to be closed when its contexts are gone.
    """

    contexts: Contexts
    context: Context
    buffers: Sequence[Buffer]
    copies: Mapping[bool, Copies]
    events: Sequence[Event]
    ordering: Ordering
    rest: Sequence[Any]


class TensorRTExecutor:
    """An execution context on a partition; see `engines.base.Executor` for the contract. A second thread waits its turn.

    `enqueue` waits for work in flight in three cases: the first two inferences of a shape, and a full ring.
    """

    def __init__(self, engine: "TensorRTEngine", partition: CudaPartition, way: Way, equipment: Equipment) -> None:
        self.engine = engine
        self._partition = partition
        self._stream = partition.stream
        self._way = way
        self._contexts = equipment.contexts
        self._context = equipment.context
        self._copies = equipment.copies
        self._events = equipment.events
        self._ordering = equipment.ordering
        self._owned = (*equipment.copies.values(), *equipment.buffers, *equipment.rest)
        self._addresses = [int(buffer.handle) for buffer in equipment.buffers]
        self._staging = Staging(
            engine.notice, partition.device.index, [buffer.size for buffer in equipment.buffers], len(engine.signature.inputs)
        )
        self._prepared: OrderedDict[tuple[Shape, ...], Prepared] = OrderedDict()
        self._routes = Routes(partition.device)
        self._runs = 0
        self._ended = Ended()
        self._captures = 0
        self._closed = False
        self._turn = Lock()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<TensorRTExecutor {self.engine.path.name}, {self._runs} runs, {self._captures} captures{state}>"

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> TensorRTWork:
        with self._turn:
            if self._closed:
                raise ExecutionFailed(f"{self!r} takes nothing more; bind the engine again")
            try:
                if (handle := selected()) is None:
                    return self._enqueue(inputs, room, self._stream)
                with self._ordering.around(handle) as stream:
                    return self._enqueue(inputs, room, stream)
            except (CUDAError, PartitionError) as error:
                raise failure(error, f"running {self.engine.path.name}") from error

    def warm_up(self, sets: Iterable[Sequence[Shape]]) -> None:
        """Run these sets of shapes until a graph of each was launched. Zeros go in. Blocks. Raises ExecutionFailed."""
        self._staging.silent = True
        for shapes in sets:
            blanks = [np.zeros(spec.nbytes(shape), np.uint8) for spec, shape in zip(self._inputs, shapes, strict=True)]
            inputs = [Tensor(shape, a.ctypes.data, a.nbytes, a) for shape, a in zip(shapes, blanks, strict=True)]
            for _ in range(3):
                self.enqueue(inputs).wait()
        self._staging.silent = False

    def close(self) -> None:
        """Wait for the stream, then free graphs, context and memory, in this order, whatever fails. Any thread.

        Kernels that were compiled meanwhile are saved once the context is gone. Raises ExecutionFailed, DeviceLost.
        """
        with self._turn:
            if not self._closed:
                self._closed = True
                self._free()

    def _free(self) -> None:
        with failing(f"closing {self!r}"), ExitStack() as left:
            for thing in (self._ordering, *self._events, *reversed(self._owned), self._staging, self._context):
                left.callback(thing.close)
            for prepared in self._prepared.values():
                left.callback(prepared.close)
            self._partition.device.make_current()
            self._stream.sync()

    def _enqueue(self, inputs: Sequence[Tensor], room: Room, stream: Stream) -> TensorRTWork:
        place = self._runs % LENGTH
        event = self._events[place]
        if self._runs - self._ended.count >= LENGTH:  # What used this place before was not seen to have ended.
            event.sync()
        self._staging.reclaim(place)
        route = self._routes.find(inputs, room) or self._open(place, inputs, room, stream)
        prepared = route.prepared
        try:
            prepared.copies.write(route.table)
            self._submit(prepared, stream)
            stream.record(event)
        except BaseException:
            self._recover(prepared, stream)
            raise
        self._prepared.move_to_end(prepared.shapes)
        mark = Mark(event, self._runs, self._ended)
        return self._staging.lend(place, mark, route.outputs) if route.staged else TensorRTWork(mark, route.outputs)

    def _open(self, place: int, inputs: Sequence[Tensor], room: Room, stream: Stream) -> Route:
        """The way from these inputs to this room, through pinned memory where it has to be; remembered where it has not."""
        check_tensors(self.engine.signature, inputs)
        prepared = self._prepare(tuple([tensor.shape for tensor in inputs]))
        try:
            sources = [self._staging.source(place, index, tensor) for index, tensor in enumerate(inputs)]
            outputs, staged = self._destinations(place, prepared, room)
            table = prepared.copies.table(self._spans(sources, inputs, outputs))
        except BaseException:
            self._recover(prepared, stream)
            raise
        route = Route(prepared, table, outputs, staged)
        self._routes.keep(inputs, room, route)
        return route

    @property
    def _inputs(self) -> Any:
        return self.engine.signature.inputs

    def _prepare(self, shapes: tuple[Shape, ...]) -> Prepared:
        found = self._prepared.get(shapes)
        if found is None:
            found = self._begin(shapes)
        elif found.graph is None:
            self._set_shapes(shapes)
            if self._way.capture:
                found = self._capture(shapes, found)
        return found

    def _begin(self, shapes: tuple[Shape, ...]) -> Prepared:
        """Shapes that are new, or that another profile or context has to learn. Nothing is in flight."""
        self.engine.signature.check(shapes)
        self._set_shapes(shapes)
        outputs = self._context.output_shapes()
        nbytes = sum(spec.nbytes(shape) for spec, shape in zip(self.engine.specs, (*shapes, *outputs), strict=True))
        copies = self._copies[by_sms(self.engine.settings.copies, nbytes)]
        found = self._prepared[shapes] = Prepared(shapes, outputs, copies)
        if len(self._prepared) > MOST_GRAPHS:
            self._prepared.popitem(last=False)[1].close()
        return found

    def _set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        """Tell the context, once nothing of it is in flight, and first which profile it needs for them."""
        if shapes == self._context.shapes:
            return
        self._stream.sync()
        engine = self.engine
        profile = engine.profile_for(shapes, self._context.profile)
        if profile != self._context.profile:
            self._forget()
            self._context.switch(profile)
        engine.warn_of_tuning(self._partition, profile)
        self._context.set_shapes(shapes)

    def _forget(self) -> None:
        """Every graph, as the profile or the context that it was captured of goes. Nothing is in flight."""
        while self._prepared:
            self._prepared.popitem()[1].close()

    def _capture(self, shapes: tuple[Shape, ...], found: Prepared) -> Prepared:
        """With a graph of one inference; if that cannot be, run without from now on, and say so once."""
        self._stream.sync()
        try:
            with failing("capturing"):
                found.graph = capture(self._partition, lambda side: self._record(side, found.copies))
        except ExecutionFailed as error:
            self._give_up(str(error))  # Whoever keeps the error itself keeps the context.
        else:
            self._captures += 1
        return self._prepared.get(shapes) or self._begin(shapes)

    def _record(self, side: SideStream, copies: Copies) -> str:
        if not copies.captured:
            return self._context.execute(side.stream)
        copies.bring_in(side.stream)
        refused = self._context.execute(side.stream)
        copies.take_out(side.stream)
        return refused

    def _give_up(self, why: str) -> None:
        """No graphs of ours any more, but perhaps the library's own. Raises ExecutionFailed where graphs are required."""
        if refused := refusal(self.engine.settings, why):
            raise ExecutionFailed(f"running {self.engine.path.name}: {refused}")
        self._way = fall_back(self.engine.situation, why)
        log.warning("%s: %s", self.engine.path, self._way.notice)
        if self._way.native:
            self._renew()

    def _renew(self) -> None:
        """A context with graphs of its own in place of this one, or this one if there is none to be had."""
        try:
            with failing("making a context with graphs of its own"):
                fresh = self._contexts.open(native=True, profile=self._context.profile)
        except EngineError as error:
            log.warning("%s: %s; each inference costs more", self.engine.path, str(error))
            return
        fresh.set_addresses(self._addresses)
        self._forget()
        self._context.close()
        self._context = fresh

    def _submit(self, prepared: Prepared, stream: Stream) -> None:
        """The copies count the inference on the device, and here: once the last of them was submitted, in whichever way."""
        copies, graph, refused = prepared.copies, prepared.graph, ""
        around = graph is None or not copies.captured
        if around:
            copies.bring_in(stream)
        if graph is None:
            refused = self._context.execute(stream)
        else:
            graph.launch(stream)
        if around:
            copies.take_out(stream)
        copies.count()
        self._runs += 1
        if refused:
            raise ExecutionFailed(f"running {self.engine.path.name}: {refused}")

    def _recover(self, prepared: Prepared, stream: Stream) -> None:
        """Wait for what was submitted of a failed inference, whose memory is the caller's again; its shape counts as new."""
        if prepared.graph is None:
            del self._prepared[prepared.shapes]
        stream.sync()

    def _destinations(self, place: int, prepared: Prepared, room: Room) -> tuple[tuple[Tensor, ...], bool]:
        """Where the outputs go: the room, or pinned memory if they do not fit there or the GPU cannot reach it."""
        outputs, end = self._lay_out(prepared, room.address)
        if end - room.address <= room.nbytes and self._staging.reaches(room.address):
            return outputs, False
        return self._lay_out(prepared, self._staging.room(place).address)[0], True

    def _lay_out(self, prepared: Prepared, address: int) -> tuple[tuple[Tensor, ...], int]:
        tensors, end = [], address
        for spec, shape in zip(self.engine.signature.outputs, prepared.outputs, strict=True):
            tensors.append(Tensor(shape, align(end), spec.nbytes(shape)))
            end = align(end) + tensors[-1].nbytes
        return tuple(tensors), end

    def _spans(self, sources: Sequence[int], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Span]:
        count = len(inputs)
        into = [(at, to, t.nbytes) for at, to, t in zip(sources, self._addresses, inputs, strict=False)]
        return into + [(at, t.address, t.nbytes) for at, t in zip(self._addresses[count:], outputs, strict=True)]
