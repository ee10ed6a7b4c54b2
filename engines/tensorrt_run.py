"""One engine's inferences on one green context: copies, engine and copies, as one graph from the third of a shape on.

An executor has one execution context, whose inferences run one after another on the partition's stream. How many are in
flight is up to the ring of tables and events. The host touches the context only to run a shape for the first time or to
capture it, and then waits until nothing of it is in flight; a graph that is launched again does not touch it.
Completion is an event that a thread waits for while it spins, without the GIL: a blocking event wakes 60 us late.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import memmove
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Buffer, Event, LegacyPinnedMemoryResource
from cuda.core._utils.cuda_utils import handle_return

from partitions import DeviceLost, PartitionError
from partitions.cuda import CudaPartition
from partitions.faults import translated

from .base import NO_ROOM, Room, Tensor
from .copies import LENGTH, Copier
from .errors import ExecutionFailed
from .memory import view
from .signature import Shape, align
from .tensorrt_api import first_error, listening

if TYPE_CHECKING:
    from .tensorrt import TensorRTEngine

log = logging.getLogger("greenlane.engines")

MOST_GRAPHS = 32
"""Shapes of one executor that are remembered, the least recently used forgotten."""

_THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_MEMORY_TYPE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_SUCCESS = driver.CUresult.CUDA_SUCCESS


class Prepared:
    """Shapes that an executor has run before: the outputs' shapes, and the graph once it was captured."""

    __slots__ = ("graph", "outputs")

    def __init__(self, outputs: tuple[Shape, ...]) -> None:
        self.outputs = outputs
        self.graph: Any = None

    def __repr__(self) -> str:
        return f"<Prepared {list(self.outputs)}{', captured' if self.graph else ''}>"

    def close(self) -> None:
        """Destroy the graph, which must not be in flight."""
        graph, self.graph = self.graph, None
        if graph is not None:
            handle_return(driver.cuGraphExecDestroy(graph))


class TensorRTExecutor:
    """An execution context on a partition; see `engines.base.Executor` for the contract.

    `enqueue` waits for work in flight in three cases: the first two inferences of a shape, and a full ring.
    """

    def __init__(
        self,
        engine: "TensorRTEngine",
        partition: CudaPartition,
        context: Any,
        buffers: Sequence[Buffer],
        copier: Copier,
        events: Sequence[Event],
    ) -> None:
        self.engine = engine
        self._stream = partition.stream
        self._handle = partition.handle
        self._context = context
        self._buffers = list(buffers)
        self._addresses = [int(buffer.handle) for buffer in buffers]
        self._copier = copier
        self._events = list(events)
        self._staging: dict[int, Buffer] = {}
        self._prepared: OrderedDict[tuple[Shape, ...], Prepared] = OrderedDict()
        self._shapes: tuple[Shape, ...] | None = None
        self._sequence = 0
        self._captures = 0
        self._capturable = True
        self._staged = False
        self._closed = False

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<TensorRTExecutor {self.engine.path.name}, {self._sequence} runs, {self._captures} captures{state}>"

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> "TensorRTWork":
        place = self._sequence % LENGTH
        with _failing(f"running {self.engine.path.name}"):
            self._events[place].sync()  # What used this table before has ended long ago, unless the ring is full.
            prepared = self._prepare(tuple([tensor.shape for tensor in inputs]))
            sources = [self._source(place, index, tensor) for index, tensor in enumerate(inputs)]
            outputs, staged = self._destinations(place, prepared, room)
            self._copier.write(self._sequence, self._spans(sources, inputs, outputs))
            self._submit(prepared)
            self._stream.record(self._events[place])
        return TensorRTWork(self._events[place], outputs, staged)

    def warm_up(self, shapes: Sequence[Shape]) -> None:
        """Run these shapes until a graph of them was launched. Zeros go in. Blocks. Raises ExecutionFailed."""
        blanks = [np.zeros(spec.nbytes(shape), np.uint8) for spec, shape in zip(self._specs[0], shapes, strict=True)]
        inputs = [Tensor(shape, blank.ctypes.data, blank.nbytes, blank) for shape, blank in zip(shapes, blanks, strict=True)]
        for _ in range(3):
            self.enqueue(inputs).wait()

    def close(self) -> None:
        """Wait for the stream, then free graphs, context and memory, in this order."""
        if self._closed:
            return
        self._closed = True
        self._stream.sync()
        for prepared in self._prepared.values():
            prepared.close()
        self._context = None
        for thing in (self._copier, *self._buffers, *self._staging.values(), *self._events):
            thing.close()

    @property
    def _specs(self) -> tuple[Any, Any]:
        return self.engine.signature.inputs, self.engine.signature.outputs

    def _prepare(self, shapes: tuple[Shape, ...]) -> Prepared:
        found = self._prepared.get(shapes)
        if found is None:
            self._set_shapes(shapes)
            found = self._prepared[shapes] = Prepared(self._output_shapes())
            self._forget()
        elif found.graph is None and self._capturable:
            self._set_shapes(shapes)
            self._capture(found)
        elif found.graph is None:
            self._set_shapes(shapes)
        self._prepared.move_to_end(shapes)
        return found

    def _forget(self) -> None:
        if len(self._prepared) > MOST_GRAPHS:
            _, oldest = self._prepared.popitem(last=False)
            self._stream.sync()
            oldest.close()

    def _set_shapes(self, shapes: tuple[Shape, ...]) -> None:
        """Tell the context, of which nothing may be in flight."""
        if shapes == self._shapes:
            return
        self._stream.sync()
        self._shapes = None
        for spec, shape in zip(self._specs[0], shapes, strict=True):
            with listening() as heard:
                if not self._context.set_input_shape(spec.name, shape):
                    raise ExecutionFailed(f"input {spec.name!r} of shape {list(shape)}: {first_error(heard)}")
        if unknown := self._context.infer_shapes():
            raise ExecutionFailed(f"no shape is known for {', '.join(unknown)}")
        self._shapes = shapes

    def _output_shapes(self) -> tuple[Shape, ...]:
        return tuple(tuple(self._context.get_tensor_shape(spec.name)) for spec in self._specs[1])

    def _capture(self, prepared: Prepared) -> None:
        """Record one inference as a graph; if that cannot be, run without from now on and say so once."""
        self._stream.sync()
        handle_return(driver.cuStreamBeginCapture(self._handle, _THREAD_LOCAL))
        try:
            done = self._launch()
        finally:
            error, graph = driver.cuStreamEndCapture(self._handle)
        if done and error == _SUCCESS:
            prepared.graph = handle_return(driver.cuGraphInstantiate(graph, 0))
            self._captures += 1
        else:
            self._capturable = False
            log.warning("%s: cannot be captured as a graph (%s), so each inference costs more", self.engine.path, error)
        if int(graph):
            handle_return(driver.cuGraphDestroy(graph))

    def _submit(self, prepared: Prepared) -> None:
        """Both ways count the inference, on the device by its last copy and here: the two have to agree on the table."""
        if prepared.graph is not None:
            handle_return(driver.cuGraphLaunch(prepared.graph, self._handle))
            self._sequence += 1
            return
        with listening() as heard:
            done = self._launch()
        self._sequence += 1
        if not done:
            self._stream.sync()
            raise ExecutionFailed(first_error(heard))

    def _launch(self) -> bool:
        """Everything of one inference onto the stream, or into the graph that is being captured; False if it was refused."""
        self._copier.bring_in(self._stream)
        done = bool(self._context.execute_async_v3(self._handle))
        self._copier.take_out(self._stream)
        return done

    def _source(self, place: int, index: int, tensor: Tensor) -> int:
        """An address from which the GPU can read this input: its own, or its copy in pinned memory."""
        if not tensor.nbytes or _is_reachable(tensor.address):
            return tensor.address
        if not self._staged:
            self._staged = True
            log.info("%s: inputs or outputs are staged through the host, as their memory is not pinned", self.engine.path.name)
        at = int(self._stage(place).handle) + self._offsets[index]
        memmove(at, tensor.address, tensor.nbytes)
        return at

    def _destinations(self, place: int, prepared: Prepared, room: Room) -> tuple[list[Tensor], bool]:
        """Where the outputs go: the room, or pinned memory if they do not fit there or the GPU cannot reach it."""
        outputs, end = self._lay_out(prepared, room.address)
        if end - room.address <= room.nbytes and _is_reachable(room.address):
            return outputs, False
        first = len(self._specs[0])
        outputs, _ = self._lay_out(prepared, int(self._stage(place).handle) + self._offsets[first])
        return outputs, True

    def _lay_out(self, prepared: Prepared, address: int) -> tuple[list[Tensor], int]:
        tensors = []
        for spec, shape in zip(self._specs[1], prepared.outputs, strict=True):
            nbytes = spec.nbytes(shape)
            tensors.append(Tensor(shape, address, nbytes))
            address = align(address + nbytes)
        return tensors, address

    def _spans(self, sources: Sequence[int], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[tuple[int, int, int]]:
        count = len(inputs)
        into = [(at, to, t.nbytes) for at, to, t in zip(sources, self._addresses, inputs, strict=False)]
        return into + [(at, t.address, t.nbytes) for at, t in zip(self._addresses[count:], outputs, strict=True)]

    @property
    def _offsets(self) -> list[int]:
        """Where each tensor stands in a staging buffer."""
        offsets, end = [], 0
        for buffer in self._buffers:
            offsets.append(end)
            end = align(end + buffer.size)
        return offsets

    def _stage(self, place: int) -> Buffer:
        if place not in self._staging:
            size = sum(align(buffer.size) for buffer in self._buffers)
            self._staging[place] = LegacyPinnedMemoryResource().allocate(size)
        return self._staging[place]


class TensorRTWork:
    """One inference on a partition's stream; see `engines.base.Work`. What is on a GPU's stream cannot be cancelled."""

    __slots__ = ("_event", "_outputs", "_staged")

    def __init__(self, event: Event, outputs: list[Tensor], staged: bool) -> None:
        self._event = event
        self._outputs = outputs
        self._staged = staged

    def __repr__(self) -> str:
        return f"<TensorRTWork {'done' if self._event.is_done else 'in flight'}>"

    def wait(self) -> tuple[Tensor, ...]:
        with _failing("waiting for the GPU"):
            self._event.sync()
        return tuple(map(_own, self._outputs)) if self._staged else tuple(self._outputs)

    def cancel(self) -> None:
        """Nothing: a graph that was launched runs to its end."""


def _own(tensor: Tensor) -> Tensor:
    """A copy of an output that lies in memory which the next inference will write to."""
    copy = np.frombuffer(view(tensor.address, tensor.nbytes), np.uint8).copy()
    return Tensor(tensor.shape, copy.ctypes.data, tensor.nbytes, copy)


def _is_reachable(address: int) -> bool:
    """Whether the GPU can use this address: pinned host memory, or its own."""
    return bool(driver.cuPointerGetAttribute(_MEMORY_TYPE, address)[0] == _SUCCESS)


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """CUDA's errors as ExecutionFailed, but for those after which nothing works: DeviceLost."""
    try:
        with translated(what):
            yield
    except DeviceLost:
        raise
    except PartitionError as error:
        raise ExecutionFailed(str(error)) from error
