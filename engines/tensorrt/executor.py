"""Runs one engine's inferences on one partition: copies, engine and copies, as one CUDA graph for each set of input shapes.

Inferences run one after another on the partition's stream. The ring of copy tables and events limits how many are in flight.
Launching a graph does not touch the execution context it was captured from. Where nothing can be captured, the engine is
submitted call by call, with the library's own graphs if it has any, and the copies before and after it.

`Work.wait` spins on an event without the GIL: a blocking event wakes 60 us late.
"""

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, Protocol

import numpy as np
from cuda.bindings import driver
from cuda.core import Event, Stream

from partitions import Partition, PartitionError
from partitions.cuda.device import AdoptedPartition, CudaPartition
from partitions.cuda.driver import CUDAError, handle_return
from partitions.cuda.driver_memory import Taken
from partitions.cuda.kernel_loads import KERNEL_LOADS

from ..base import NO_ROOM, DeviceTime, Engine, Recipe, Room, Tensor, check_tensors
from ..cuda.address_cache import AddressCache, ResolvedAddresses
from ..cuda.copies import RING_LENGTH, Span, Table
from ..cuda.recipes import Recipes
from ..cuda.resources import ExecutorResources, zeroed_buffers
from ..cuda.sharing import Sharer
from ..cuda.staging import Staging
from ..cuda.work import CompletedCount, Completion, CudaWork, JoinedWork, failing, failure
from ..datatypes import DataType
from ..errors import EngineError, ExecutionFailed, ModelRefused
from ..memory import added
from ..settings import overridden
from ..signature import Shape, align
from ..streams import selected
from .graph_mode import Override, captures_under_override
from .instance import Instance, Opener, described, graph_memory, kernel_memory
from .lifetime import Finalizer, InstancePool
from .plan import LoadedPlan
from .shapes import Fit, Prepared, ReadyShapes
from .verifying import WrongAnswer

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("greenlane.engines")


class BoundEngine(Engine, Protocol):
    """The part of an engine that its executors use. `TensorRTEngine` implements it; as a protocol it keeps the imports
    acyclic.
    """

    @property
    def loaded(self) -> LoadedPlan:
        """The deserialised plan."""

    @property
    def pool(self) -> InstancePool:
        """The engine's idle instances, and the finalizers of its executors."""

    @property
    def path(self) -> Path:
        """The plan's file."""

    @property
    def open_instance(self) -> Opener:
        """Opens the engine's instances."""

    def rebind(self, executor: "TensorRTExecutor", partition: Partition) -> "TensorRTExecutor":
        """See `Executor.rebind`."""

    def alternate(self, executor: "TensorRTExecutor", partition: Partition) -> "TensorRTExecutor":
        """See `Executor.alternate`."""


class TensorRTExecutor:
    """An instance on a partition; see `engines.base.Executor` for the contract. Threads that enqueue wait for each other.

    An executor that is not closed is released when it is collected, which cannot happen while work of it is in flight: see
    `Finalizer`.

    `enqueue` blocks in these cases:
    - The first inference of a set of shapes, until kernels are compiled and a graph is captured, unless `preparing` did that.
    - A full ring.
    - Where nothing is captured (`graphs` off, streamed weights, lazy kernels with dynamic inputs), every change of shapes,
      until the work in flight has completed.
    - Data-dependent outputs, in every inference, until the library knows their size. They are never in the room.
    """

    def __init__(self, engine: BoundEngine, partition: CudaPartition, instance: Instance, resources: ExecutorResources) -> None:
        self.engine = engine
        self.instance = instance
        self._loaded = engine.loaded
        self._partition = partition
        self.stream = partition.stream
        self._adopted_handle = partition.handle if isinstance(partition, AdoptedPartition) else None
        self._events = resources.events
        self._order = resources.order
        self._aux_streams = resources.aux_streams
        self._staging = Staging(self._loaded.log_staging, partition.device, instance.sizes, len(engine.signature.inputs))
        self._addresses: AddressCache[Prepared] = AddressCache(partition.device)
        self._lock = RLock()
        self._recipes = Recipes(partition.stream, resources.events, instance.addresses, engine.path.name)
        self._clock = instance.copies[True].take_clock(partition.stream) if instance.times_itself else None
        self._clock_number = self._clock.number if self._clock else 0
        self.shapes = ReadyShapes(
            engine.loaded, partition, instance, resources.aux_streams, self._lock, self._recipes, clock=self._clock_number
        )
        # An inference with data-dependent outputs takes two tables of the ring.
        self._ring_size = RING_LENGTH // 2 if instance.data_dependent else RING_LENGTH
        self._runs = self._staged = self._padded = 0
        self._overrides: list[tuple[ReadyShapes, AddressCache[Prepared]]] = []
        self._completed = CompletedCount()
        self.alternate_of: Instance | None = None
        """The instance of the executor that it was made an alternate of."""
        clock = [self._clock] if self._clock else []
        membership = instance.sharers.join(Sharer(self._lock, partition.stream, resources.order, self._recipes.revoke))
        owned = (membership, *clock, resources.order, *resources.events, *resources.aux_streams, self._staging)
        name = f"<TensorRTExecutor {engine.path.name}>"
        self._finalizer = Finalizer(name, engine.pool, instance, partition, owned, self.shapes)
        engine.pool.add(self._finalizer)
        weakref.finalize(self, self._finalizer.collected)

    def __repr__(self) -> str:
        state = ", closed" if self._finalizer.closed else ""
        captures = self.shapes.statistics().captures
        return f"<TensorRTExecutor {self.engine.path.name}, {self._runs} runs, {captures} captures{state}>"

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> CudaWork | JoinedWork:
        with self._lock:
            self._check_open()
            try:
                handle = selected()
                if handle is None:
                    handle = self._adopted_handle
                if handle is not None and handle == self._adopted_handle and self._order.is_capturing(handle):
                    with self._order.primary_context():
                        return self._join_capture(inputs, room)
                if handle is None:
                    if self._order.is_primary_current:
                        return self._enqueue(inputs, room, self.stream)
                    with self._order.primary_context():
                        return self._enqueue(inputs, room, self.stream)
                with self._order.ordered_with(handle) as stream:
                    return self._enqueue(inputs, room, stream)
            except (CUDAError, PartitionError) as error:
                raise failure(error, f"running {self.engine.path.name}") from error

    def preparing(self, shapes: Sequence[Shape]) -> "Future[None] | None":
        with self._lock:
            self._check_open()
            return self.shapes.preparing(tuple(shapes))

    def recipe(self, shapes: Sequence[Shape], revoke: Callable[[], None]) -> Recipe | None:
        """As `Launchable.recipe`. None without a graph that holds the copies, on an adopted stream, and while settings are
        overridden.
        """
        with self._lock:
            self._check_open()
            self._recipes.revoke_by(revoke)
            if self._adopted_handle is not None or self._overrides or self.instance.data_dependent:
                return None
            if (fit := self.shapes.find(tuple(shapes))) is None or fit.parts > 1:
                return None
            prepared = fit.prepared
            return self._recipes.make(tuple(shapes), prepared.shapes, fit.outputs, prepared.graph, prepared.copies)

    def rebind(self, partition: Partition) -> "TensorRTExecutor":
        self._check_settled()
        return self.engine.rebind(self, partition)

    def alternate(self, partition: Partition) -> "TensorRTExecutor":
        """An executor of the same instance, with its own graphs, events and streams.

        It takes graphs and a little host memory beside this one, unless the library has graphs of its own: then it has an
        instance of its own.
        """
        self._check_settled()
        return self.engine.alternate(self, partition)

    def recapture(self, other: "TensorRTExecutor") -> None:
        """Capture here a graph for every set of shapes that the other executor, of the same instance, has captured.

        Call it on an attached thread. Blocks for some 10 ms a graph. Raises ExecutionFailed, DeviceLost.
        """
        with failing(f"capturing graphs of {other!r} on {self._partition!r}"):
            self.shapes.recapture(other.shapes)
            self.shapes.warming = False

    def answer(self, inputs: Sequence[Array]) -> list[Array]:
        """As `engines.verification.rows.Answering`. Call it on an attached thread.

        The tensors are in memory of the GPU for that time: to pin host memory would hold up all tenants.
        """
        signature = self.engine.signature
        with failing(f"verifying {self!r}"), ExitStack() as scratch:
            sizes = [max(1, each.nbytes) for each in inputs]
            outputs = sum(map(align, self.instance.sizes[len(inputs) :]))
            buffers = zeroed_buffers(self._loaded.device, [*sizes, outputs], self.stream)
            for buffer in buffers:
                scratch.callback(buffer.close)
            places = [int(buffer.handle) for buffer in buffers]
            scratch.enter_context(self._staging.owning(places))
            given = [np.ascontiguousarray(each) for each in inputs]
            for address, each in zip(places, given, strict=False):
                if each.nbytes:
                    handle_return(driver.cuMemcpyHtoDAsync(address, each.ctypes.data, each.nbytes, self.stream.handle))
            tensors = [Tensor(each.shape, address, each.nbytes) for each, address in zip(inputs, places, strict=False)]
            found = self.enqueue(tensors, Room(places[-1], outputs)).wait()
            return [self._fetched(tensor, spec.datatype) for spec, tensor in zip(signature.outputs, found, strict=True)]

    def stop_padding(self) -> None:
        """From now on run no more rows than an inference has; nor do executors of this engine that are made later."""
        with self._lock:
            self._loaded.settings = self._loaded.settings.merge(batch_padding=False)
            self._recipes.revoke()
            for shapes in (self.shapes, *(before for before, _ in self._overrides)):
                shapes.stop_padding()
            self._addresses = AddressCache(self._partition.device)

    def _fetched(self, tensor: Tensor, datatype: DataType) -> Array:
        """A copy on the host of what may be there, or on the GPU. Raises CUDAError."""
        if tensor.owner is not None:
            return tensor.array(datatype)
        array = np.empty(tensor.shape, datatype.numpy)
        if tensor.nbytes:
            handle_return(driver.cuMemcpyDtoHAsync(array.ctypes.data, tensor.address, tensor.nbytes, self.stream.handle))
            self.stream.sync()
        return array

    def warm_up(self, sets: Iterable[Sequence[Shape]]) -> None:
        """Make these sets of input shapes ready by running each once on zeros. Blocks. Raises ExecutionFailed.

        The zeros and the outputs are in memory of the GPU for that time: to pin host memory would hold up all tenants.
        """
        began = time.monotonic_ns()
        with failing(f"warming up {self!r}"):
            works = self._run_on_zeros(sets)
        if self._clock and works:
            self.instance.clock_agrees = self._clock.agrees(works, time.monotonic_ns() - began)
            self._clock.start()
        self.shapes.warming = False

    def make_ready(self, sets: Iterable[Sequence[Shape]]) -> None:
        """As `Preparing.make_ready`, by running each once on zeros."""
        ready = self.shapes.ready_sets()
        for shapes in sets:
            if (wanted := tuple(map(tuple, shapes))) in ready:
                continue
            self.shapes.warming = True  # So that these shapes are not padded to a set that is ready.
            try:
                with failing(f"making {list(wanted)} ready"):
                    self._run_on_zeros([wanted])
            except EngineError as error:
                log.warning("%s: shapes %s, which were in use before, are not ready: %s", self.engine.path, list(wanted), error)
            finally:
                self.shapes.warming = False

    def _run_on_zeros(self, sets: Iterable[Sequence[Shape]]) -> int:
        """Run each set of shapes once; how many there were."""
        specs, sizes, works = self.engine.signature.inputs, self.instance.sizes, 0
        with ExitStack() as scratch:
            outputs = sum(map(align, sizes[len(specs) :]))
            blanks = zeroed_buffers(self._loaded.device, [*sizes[: len(specs)], outputs], self.stream)
            for buffer in blanks:
                scratch.callback(buffer.close)
            addresses = [int(buffer.handle) for buffer in blanks]
            room = Room(addresses[-1], blanks[-1].size)
            scratch.enter_context(self._staging.owning(addresses))
            for shapes in sets:
                given = zip(specs, shapes, addresses, strict=False)
                try:
                    self.enqueue([Tensor(shape, address, spec.nbytes(shape)) for spec, shape, address in given], room).wait()
                    works += 1
                except WrongAnswer:  # Which was logged. Other shapes may be right.
                    self.stream.sync()
        return works

    @property
    def device_time(self) -> DeviceTime | None:
        """As `Timed.device_time`: None where the SMs do not make all copies, or the GPU's timer did not agree with the host."""
        return self._clock if self.instance.clock_agrees else None

    @contextmanager
    def overriding(self, **changes: Any) -> Iterator[None]:
        """As `Executor.overriding`. What was ready before the block is neither used in it nor lost."""
        with self._lock:
            self._check_open()
            settings = overridden(self.shapes.settings, changes)
            if settings.copies != "engine" and True not in self.instance.copies:
                raise ModelRefused(
                    f"{self.engine.path}: copies {settings.copies!r} need kernels that it was loaded without; load it with "
                    f"copies {settings.copies!r}"
                )
            instance = self.instance
            capture = captures_under_override(settings, self._loaded.traits, instance.graph_mode, instance.data_dependent)
            override = Override(settings, capture)
            self._recipes.revoke()
            shapes = ReadyShapes(
                self._loaded,
                self._partition,
                instance,
                self._aux_streams,
                self._lock,
                self._recipes,
                override,
                self._clock_number,
            )
            shapes.warming = False
            before = (self.shapes, self._addresses)
            self.shapes, self._addresses = shapes, AddressCache(self._partition.device)
            self._overrides.append(before)
        try:
            yield
        finally:
            self._restore(before)

    def _restore(self, before: tuple[ReadyShapes, AddressCache[Prepared]]) -> None:
        """End an override: free what became ready in it, and use what was ready before it. Blocks. Does so only once."""
        self.shapes.stop_preparing()
        with self._lock:
            if before in self._overrides:
                ended, (self.shapes, self._addresses) = self.shapes, self._overrides.pop()
                with failing(f"restoring {self!r}"), self._partition.device.current(), ExitStack() as after:
                    after.callback(ended.close)
                    self.stream.sync()

    def close(self) -> None:
        """Wait for the stream, destroy graphs and events and give the instance back, even if one step fails. Any thread.

        Raises ExecutionFailed, DeviceLost.
        """
        while self._overrides:
            self._restore(self._overrides[-1])
        self.shapes.stop_preparing()
        with self._lock, KERNEL_LOADS.freeing():
            self._finalizer.release()
        self.engine.pool.release_postponed()

    def describe(self) -> Mapping[str, object]:
        """How inferences run, as JSON values; see `engines.base.Executor`."""
        verifier = self._loaded.verifier
        settings, mode, shapes = self.shapes.settings, self.instance.graph_mode, self.shapes.statistics()
        return {
            "graphs": "native" if mode.native else "captured" if self.shapes.captures else "none",
            "why": mode.note,
            "notes": [*([mode.note] if mode.note else []), *(verifier.notes() if verifier else [])],
            **({"verified": verifier.describe()} if verifier else {}),
            "counts": {
                "captures": shapes.captures,
                "compilations": shapes.compiled,
                "fallbacks": shapes.fallbacks,
                "padded": self._padded + self._recipes.padded,
                "staged": self._staged,
            },
            "copies": settings.copies,
            "shapes": [[list(shape) for shape in shapes] for shapes in self.shapes.ready_sets()],
            "profiles": len(self.instance.contexts),
            **({"missing_sms": missing} if (missing := self.shapes.missing_sms()) else {}),
            **described(self.instance, self._graphs()),
            **({"adds": self._beside(self.alternate_of)} if self.alternate_of else {}),
        }

    @property
    def memory(self) -> Mapping[str, int]:
        return {} if self._finalizer.closed else {**self.instance.memory, **graph_memory(self._graphs())}

    @property
    def streamed(self) -> int:
        """As `Streamed.streamed`."""
        return self._loaded.streamed

    @property
    def shared_memory(self) -> Mapping[Hashable, Mapping[str, int]]:
        return {} if self._finalizer.closed else kernel_memory(self.instance)

    def _beside(self, home: Instance) -> dict[str, int]:
        """What this alternate takes beside the executor of `home`: its graphs; with an instance of its own, all of it."""
        return graph_memory(self._graphs()) if home is self.instance else added([self.memory, *self.shared_memory.values()])

    def _graphs(self) -> list[Taken]:
        """What the driver has taken for each graph, those from before an override included."""
        return [taken for ready in (self.shapes, *(before for before, _ in list(self._overrides))) for taken in ready.graphs()]

    def _check_settled(self) -> None:
        with self._lock:
            self._check_open()
            if self._overrides:
                raise ExecutionFailed(f"{self!r} does not move while its settings are overridden; end that first")

    def _check_open(self) -> None:
        if self._finalizer.closed:
            raise ExecutionFailed(f"{self!r} takes nothing more; bind the engine again")

    def _enqueue(self, inputs: Sequence[Tensor], room: Room, stream: Stream) -> CudaWork:
        slot = self._runs % self._ring_size
        event = self._events[slot]
        if self._runs - self._completed.count >= self._ring_size:  # The slot's last inference may still be running.
            event.sync()
        self._staging.reclaim(slot)
        if self.instance.data_dependent:
            return self._enqueue_data_dependent(slot, inputs, room, stream)
        resolved = self._addresses.get(inputs, room) or self._resolve(slot, inputs, room, stream)
        prepared = resolved.prepared
        try:
            prepared.copies.write(resolved.table)
            self._submit(prepared, stream)
            stream.record(event)
            for table in resolved.more:
                event = self._submit_more(prepared, table, stream)
            if resolved.more and resolved.staged:
                stream.sync()  # What is staged is collected when its slot is used again, by the event of the first part.
        except BaseException:
            self._recover(prepared, stream)
            raise
        self.shapes.mark_used(prepared)
        self._padded += resolved.padded
        completion = Completion(event, self._runs, self._completed, self)
        if not resolved.staged:
            return CudaWork(completion, resolved.outputs)
        self._staged += 1
        return self._staging.staged_work(slot, completion, resolved.outputs)

    def _enqueue_data_dependent(self, slot: int, inputs: Sequence[Tensor], room: Room, stream: Stream) -> CudaWork:
        """Copy the inputs, run the engine, and copy outputs of the sizes it has reported: two tables of the copies.

        The outputs are always staged, as memory for them cannot be chosen before their sizes are known.
        """
        check_tensors(self.engine.signature, inputs)
        prepared = self.shapes.prepare(tuple([tensor.shape for tensor in inputs]), stream).prepared
        try:
            sources = [self._staging.source(slot, index, tensor) for index, tensor in enumerate(inputs)]
            outputs = self._run_data_dependent(slot, prepared, self._spans(sources, inputs, ()), room, stream)
            stream.record(self._events[slot])
        except BaseException:
            self._recover(prepared, stream)
            raise
        self._runs += 1
        self._staged += 1
        self.shapes.mark_used(prepared)
        return self._staging.staged_work(slot, Completion(self._events[slot], self._runs, self._completed, self), outputs)

    def _run_data_dependent(
        self, slot: int, prepared: Prepared, inputs: list[Span], room: Room, stream: Stream
    ) -> tuple[Tensor, ...]:
        copies, outputs, nothing = prepared.copies, len(self.engine.signature.outputs), (0, 0, 0)
        copies.write(copies.table([*inputs, *[nothing] * outputs]))
        copies.copy_in(stream, self._clock_number)
        refused = self.shapes.run(prepared, stream)
        copies.copy_out(stream, self._clock_number)
        copies.count()
        self._loaded.check_execution(refused)
        start = self._staging.room(slot, quiet=True).address
        tensors, _ = self._lay_out(prepared.context.last_output_shapes(), start, room)
        copies.write(copies.table([*[nothing] * len(inputs), *self._spans((), (), tensors)]))
        copies.copy_in(stream)
        copies.copy_out(stream)
        copies.count()
        return tensors

    def _join_capture(self, inputs: Sequence[Tensor], room: Room) -> JoinedWork:
        """Add an inference to the graph that the caller captures from the adopted stream: see `engines.streams`."""
        check_tensors(self.engine.signature, inputs)
        shapes = tuple([tensor.shape for tensor in inputs])
        self._loaded.signature.check(shapes)
        fit = None if self.instance.data_dependent else self.shapes.find(shapes)
        if fit is not None and fit.parts > 1:
            why = f"the rows of this shape are run in {fit.parts} parts"
            raise ExecutionFailed(f"{self.engine.path.name} cannot be part of a graph that is being captured: {why}")
        if fit is None or fit.prepared.graph is None:
            otherwise = self.instance.graph_mode.note or "graphs are off"
            why = "run these shapes once before the capture, so that they are compiled" if self.shapes.captures else otherwise
            raise ExecutionFailed(f"{self.engine.path.name} cannot be part of a graph that is being captured: {why}")
        outputs, end = self._lay_out(fit.outputs, room.address, room)
        specs = self.engine.signature.inputs
        unreachable = [spec.name for spec, tensor in zip(specs, inputs, strict=True) if not self._is_reachable(tensor)]
        if unreachable or end - room.address > room.nbytes or not self._staging.reaches(room.address, room.nbytes):
            what = f"input {unreachable[0]!r} is" if unreachable else f"the {end - room.address} bytes of its outputs would be"
            raise ExecutionFailed(
                f"{what} where the GPU cannot reach; use pinned memory, or the GPU's, for a graph that is being captured"
            )
        self.shapes.join(fit.prepared, self._spans([tensor.address for tensor in inputs], inputs, outputs), self.stream)
        return JoinedWork(outputs)

    def _is_reachable(self, tensor: Tensor) -> bool:
        return not tensor.nbytes or self._staging.reaches(tensor.address, tensor.nbytes)

    def _resolve(self, slot: int, inputs: Sequence[Tensor], room: Room, stream: Stream) -> ResolvedAddresses[Prepared]:
        """Resolve the addresses of inputs and room, through staging memory where needed, and cache them where not."""
        check_tensors(self.engine.signature, inputs)
        fit = self.shapes.prepare(tuple([tensor.shape for tensor in inputs]), stream)
        try:
            sources = [self._staging.source(slot, index, tensor) for index, tensor in enumerate(inputs)]
            outputs, staged = self._destinations(slot, fit, room)
            table, *more = [fit.prepared.copies.table(spans) for spans in self._parts(fit, sources, inputs, outputs)]
        except BaseException:
            self._recover(fit.prepared, stream)
            raise
        if not staged and any(source != tensor.address for source, tensor in zip(sources, inputs, strict=True)):
            self._staged += 1  # With staged outputs it counts when it was submitted.
        padded = fit.outputs is not fit.prepared.outputs
        resolved = ResolvedAddresses(fit.prepared, table, outputs, staged, padded, tuple(more))
        self._addresses.put(inputs, room, resolved)
        return resolved

    def _submit_more(self, prepared: Prepared, table: Table, stream: Stream) -> Event:
        """Submit a further part of an inference whose rows are divided, which takes a table of the ring. Returns its event."""
        slot = self._runs % self._ring_size
        event = self._events[slot]
        if self._runs - self._completed.count >= self._ring_size:
            event.sync()
        self._staging.reclaim(slot)
        prepared.copies.write(table)
        self._submit(prepared, stream)
        stream.record(event)
        return event

    def _parts(
        self, fit: Fit, sources: Sequence[int], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Iterator[list[Span]]:
        """The spans of each run: one, unless the rows are divided."""
        spans = self._spans(sources, inputs, outputs)
        if fit.parts == 1:
            yield spans
            return
        rows, most = inputs[0].shape[0], fit.prepared.shapes[0][0]
        for begin in range(0, rows, most):
            count = min(most, rows - begin)
            part = []
            for index, (source, target, nbytes) in enumerate(spans):
                row, is_input = nbytes // rows, index < len(inputs)
                at = begin * row
                part.append((source + at, target, count * row) if is_input else (source, target + at, count * row))
            yield part

    def _submit(self, prepared: Prepared, stream: Stream) -> None:
        """Submit copies and engine. The last copy counts the inference on the device, so it is counted here after it."""
        copies, graph, refused = prepared.copies, prepared.graph, ""
        outside = graph is None or not copies.captured
        if outside:
            copies.copy_in(stream, self._clock_number)
        if graph is None:
            refused = self.shapes.run(prepared, stream)
        else:
            graph.launch(stream)
        if outside:
            copies.copy_out(stream, self._clock_number)
        copies.count()
        self._runs += 1
        self._loaded.check_execution(refused)

    def _recover(self, prepared: Prepared, stream: Stream) -> None:
        """After a failed inference, wait until the GPU no longer uses the caller's memory.

        Without a graph, its shapes are forgotten and prepared again.
        """
        if prepared.graph is None:
            self.shapes.forget(prepared)
        stream.sync()

    def _destinations(self, slot: int, fit: Fit, room: Room) -> tuple[tuple[Tensor, ...], bool]:
        """The outputs in the room, or in staging memory (True) if they do not fit or the GPU cannot reach the room."""
        outputs, end = self._lay_out(fit.outputs, room.address, room)
        if end - room.address <= room.nbytes and self._staging.reaches(room.address, room.nbytes):
            return outputs, False
        return self._lay_out(fit.outputs, self._staging.room(slot).address, room)[0], True

    def _lay_out(self, shapes: Sequence[Shape], start: int, room: Room) -> tuple[tuple[Tensor, ...], int]:
        """The outputs one behind the other from `start`, and where they end. Nothing copies what `room` leaves out."""
        tensors, end = [], start
        for index, (spec, shape) in enumerate(zip(self.engine.signature.outputs, shapes, strict=True)):
            if room.unasked >> index & 1:
                tensors.append(room.left_out)
                continue
            tensors.append(Tensor(shape, align(end), spec.nbytes(shape)))
            end = align(end) + tensors[-1].nbytes
        return tuple(tensors), end

    def _spans(self, sources: Sequence[int], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Span]:
        count, addresses = len(self.engine.signature.inputs), self.instance.addresses
        spans = [(source, target, t.nbytes) for source, target, t in zip(sources, addresses, inputs, strict=False)]
        return spans + [(source, t.address, t.nbytes) for source, t in zip(addresses[count:], outputs, strict=False)]
