"""One engine's inferences on one green context: copies, engine and copies, as one graph from the third of a shape on.

An executor has one execution context, whose inferences run one after another on the partition's stream. How many are in
flight is up to the ring of tables and events. The host touches the context only to run a shape for the first time or to
capture it, and then waits until nothing of it is in flight; a graph that is launched again does not touch it.
Completion is an event that a thread waits for while it spins, without the GIL: a blocking event wakes 60 us late.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import memmove
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import ref

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
        self._device = partition.device
        self._stream = partition.stream
        self._handle = partition.handle
        self._context = context
        self._buffers = list(buffers)
        self._addresses = [int(buffer.handle) for buffer in buffers]
        self._copier = copier
        self._events = list(events)
        self._staging: dict[int, Buffer] = {}
        self._staged: dict[int, ref[StagedWork]] = {}
        self._prepared: OrderedDict[tuple[Shape, ...], Prepared] = OrderedDict()
        self._shapes: tuple[Shape, ...] | None = None
        self._sequence = 0
        self._captures = 0
        self._capturable = True
        self._said = True  # until it is warm: those inputs are not the caller's
        self._closed = False

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<TensorRTExecutor {self.engine.path.name}, {self._sequence} runs, {self._captures} captures{state}>"

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> "TensorRTWork":
        place = self._sequence % LENGTH
        event = self._events[place]
        with _failing(f"running {self.engine.path.name}"):
            event.sync()  # What used this table before has ended long ago, unless the ring is full.
            if (before := self._staged.pop(place, None)) and (work := before()):
                work.collect()
            shapes = tuple([tensor.shape for tensor in inputs])
            prepared = self._prepare(shapes)
            sources = [self._source(place, index, tensor) for index, tensor in enumerate(inputs)]
            outputs, staged = self._destinations(place, prepared, room)
            self._copier.write(self._sequence, self._spans(sources, inputs, outputs))
            try:
                self._submit(prepared)
                self._stream.record(event)
            except BaseException:
                self._recover(shapes, prepared)
                raise
        return self._lend(place, outputs) if staged else TensorRTWork(event, outputs)

    def warm_up(self, shapes: Sequence[Shape]) -> None:
        """Run these shapes until a graph of them was launched. Zeros go in. Blocks. Raises ExecutionFailed."""
        blanks = [np.zeros(spec.nbytes(shape), np.uint8) for spec, shape in zip(self._specs[0], shapes, strict=True)]
        inputs = [Tensor(shape, blank.ctypes.data, blank.nbytes, blank) for shape, blank in zip(shapes, blanks, strict=True)]
        for _ in range(3):
            self.enqueue(inputs).wait()
        self._said = False

    def close(self) -> None:
        """Wait for the stream, then free graphs, context and memory, in this order, whatever fails. Any thread.

        Raises ExecutionFailed, DeviceLost.
        """
        if self._closed:
            return
        self._closed = True
        with _failing(f"closing {self!r}"), ExitStack() as left:
            for thing in (*self._events, *self._staging.values(), *self._buffers, self._copier):
                left.callback(thing.close)
            left.callback(self._drop)
            for prepared in self._prepared.values():
                left.callback(prepared.close)
            self._device.make_current()
            self._stream.sync()

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
        """Nothing is in flight: the shape that makes this one too many has been set."""
        if len(self._prepared) > MOST_GRAPHS:
            self._prepared.popitem(last=False)[1].close()

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
        if unknown := self._unknown():
            raise ExecutionFailed(f"no shape is known for {', '.join(unknown)}")
        self._shapes = shapes

    def _unknown(self) -> list[str]:
        try:
            return list(self._context.infer_shapes())
        except RuntimeError as error:
            raise ExecutionFailed(f"running {self.engine.path.name}: {error}") from error

    def _output_shapes(self) -> tuple[Shape, ...]:
        return tuple(tuple(self._context.get_tensor_shape(spec.name)) for spec in self._specs[1])

    def _capture(self, prepared: Prepared) -> None:
        """Make a graph of one inference; if that cannot be, run without from now on and say so once."""
        self._stream.sync()
        try:
            with _failing("capturing"):
                prepared.graph = self._record()
            self._captures += 1
        except ExecutionFailed as error:
            self._capturable = False
            text = "%s: cannot be captured as a graph (%s), so each inference costs more"
            log.warning(text, self.engine.path, str(error))  # Whoever keeps the error keeps the context.

    def _record(self) -> Any:
        """An executable graph. Raises CUDAError, ExecutionFailed, with the capture ended."""
        handle_return(driver.cuStreamBeginCapture(self._handle, _THREAD_LOCAL))
        with ExitStack() as after:
            try:
                with listening() as heard:
                    done = self._launch()
            finally:
                ended = driver.cuStreamEndCapture(self._handle)
                if ended[1] is not None:
                    after.callback(driver.cuGraphDestroy, ended[1])
            if not done:
                raise ExecutionFailed(first_error(heard))
            return handle_return(driver.cuGraphInstantiate(handle_return(ended), 0))

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
            raise ExecutionFailed(f"running {self.engine.path.name}: {first_error(heard)}")

    def _recover(self, shapes: tuple[Shape, ...], prepared: Prepared) -> None:
        """Wait for what was submitted of a failed inference, whose memory is the caller's again; its shape counts as new."""
        if prepared.graph is None:
            del self._prepared[shapes]
        self._stream.sync()

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
        tensors, end = [], address
        for spec, shape in zip(self._specs[1], prepared.outputs, strict=True):
            tensors.append(Tensor(shape, align(end), spec.nbytes(shape)))
            end = align(end) + tensors[-1].nbytes
        return tensors, end

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
        if not self._said:
            self._said = True
            log.info("%s: inputs or outputs are staged through the host, as their memory is not pinned", self.engine.path.name)
        if place not in self._staging:
            size = sum(align(buffer.size) for buffer in self._buffers)
            self._staging[place] = LegacyPinnedMemoryResource().allocate(size)
        return self._staging[place]

    def _lend(self, place: int, outputs: list[Tensor]) -> "StagedWork":
        work = StagedWork(self._events[place], outputs)
        self._staged[place] = ref(work)
        return work

    def _drop(self) -> None:
        self._context = None


class TensorRTWork:
    """One inference on a partition's stream; see `engines.base.Work`. What is on a GPU's stream cannot be cancelled."""

    __slots__ = ("_event", "_outputs")

    def __init__(self, event: Event, outputs: list[Tensor]) -> None:
        self._event = event
        self._outputs = outputs

    def __repr__(self) -> str:
        return f"<TensorRTWork {'done' if self._event.is_done else 'in flight'}>"

    def wait(self) -> tuple[Tensor, ...]:
        with _failing("waiting for the GPU"):
            self._event.sync()
        return tuple(self._outputs)

    def cancel(self) -> None:
        """Nothing: a graph that was launched runs to its end."""


class StagedWork(TensorRTWork):
    """One whose outputs lie where a later inference's will, until they are collected."""

    __slots__ = ("__weakref__", "_collected", "_collecting")

    def __init__(self, event: Event, outputs: list[Tensor]) -> None:
        super().__init__(event, outputs)
        self._collected = False
        self._collecting = Lock()

    def wait(self) -> tuple[Tensor, ...]:
        if not self._collected:
            super().wait()
        return self.collect()

    def collect(self) -> tuple[Tensor, ...]:
        """Copies of the outputs, made once it has ended and before its place in the ring is used again."""
        with self._collecting:
            if not self._collected:
                self._outputs = [_own(tensor) for tensor in self._outputs]
                self._collected = True
            return tuple(self._outputs)


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
