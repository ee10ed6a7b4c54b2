"""Keeps what an executor has ready for each set of input shapes: a graph on its partition, or at least compiled kernels.

Shapes become ready in one of three ways:
- `prepare` compiles and captures them while the caller waits.
- `preparing` does so on a thread and with contexts reserved for it, while other shapes are served.
- `recapture` captures what another executor of the same instance has captured, which compiles nothing. So do the others for
  shapes of which an executor of the instance has a graph.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from threading import RLock, Thread, current_thread
from typing import NamedTuple

from cuda.core import Stream

from partitions.cuda.device import CudaPartition, SideStream
from partitions.cuda.driver_memory import Taken
from partitions.cuda.kernel_loads import KERNEL_LOADS

from ..cuda.capture import Graph, capture, joining_capture
from ..cuda.copies import Copies, Span, uses_sms
from ..cuda.recipes import Recipes
from ..cuda.work import failing
from ..errors import ExecutionFailed, TensorMismatch
from ..model_files.profiles import best_profile, padded
from ..signature import Shape
from ..thread_priority import lower_priority
from ..verification.order import Answered
from ..verification.rule import other_rows
from ..verification.steady import Repeat
from ..verification.verdicts import shapes_text
from .context import Context
from .graph_mode import Override, refusal
from .instance import Array, Instance, answers
from .plan import LoadedPlan
from .verifying import WrongAnswer

log = logging.getLogger("greenlane.engines")

MAX_READY_SETS = 64
"""Sets of shapes that an executor keeps ready. Beyond that, the least recently used one is dropped."""

Shapes = tuple[Shape, ...]


class Prepared:
    """A set of input shapes that was run before: its output shapes, context and copies, and its graph if it has one."""

    __slots__ = ("context", "copies", "graph", "outputs", "shapes")

    def __init__(self, shapes: Shapes, outputs: Shapes, context: Context, copies: Copies, graph: Graph | None = None) -> None:
        self.shapes = shapes
        self.outputs = outputs
        self.context = context
        self.copies = copies
        self.graph = graph

    def close(self) -> None:
        """Destroy the graph, which must not be in flight."""
        graph, self.graph = self.graph, None
        if graph is not None:
            graph.close()


class Fit(NamedTuple):
    """The shapes to run for an inference, and the output shapes that the caller asked for: with padding, those have fewer
    rows.
    """

    prepared: Prepared
    outputs: Shapes
    parts: int = 1
    """In how many runs, of as many rows each as are prepared, or fewer in the last."""


class ShapeStatistics(NamedTuple):
    """Counts of sets of shapes that are ready, and since the executor was bound: graphs captured, sets compiled after the
    warm-up, and changes to a mode without capture.
    """

    ready: int
    captures: int
    compiled: int
    fallbacks: int


class ReadyShapes:
    """The shapes of one executor. `lock` is the executor's lock; hold it to call a method that does not say otherwise."""

    def __init__(
        self,
        loaded: LoadedPlan,
        partition: CudaPartition,
        instance: Instance,
        aux_streams: Sequence[SideStream],
        lock: RLock,
        recipes: Recipes,
        override: Override | None = None,
        clock: int = 0,
    ) -> None:
        self._loaded = loaded
        self._partition = partition
        self._instance = instance
        self._aux_streams = aux_streams
        self._lock = lock
        self._override = override
        self._clock = clock
        self.settings = override.settings if override else loaded.settings
        """The settings in force."""
        self._pads = self.settings.pads(loaded.signature)
        self._ready: OrderedDict[Shapes, Prepared] = OrderedDict()
        self._fits: dict[Shapes, Fit] = {}
        self._pending: dict[Shapes, Future[None]] = {}
        self._compiler: ThreadPoolExecutor | None = None
        self._preparing_thread: Thread | None = None
        self._closed = False
        self._captures = self._compiled = self._fallbacks = 0
        self._profile = best_profile(loaded.profiles, loaded.usable, partition.size)
        self._recipes = recipes
        self.warming = True
        """The executor is being warmed up: compiling is expected and not counted, and nothing is padded."""

    @property
    def captures(self) -> bool:
        """Whether a graph is captured for each set of shapes. Any thread."""
        return self._override.capture if self._override else self._instance.graph_mode.capture

    @property
    def is_preparing(self) -> bool:
        """Whether shapes are being prepared in the background, or wait to be. Any thread."""
        return bool(self._pending)

    def statistics(self) -> ShapeStatistics:
        """Any thread may call; the counts may be in the middle of a change."""
        return ShapeStatistics(len(self._ready), self._captures, self._compiled, self._fallbacks)

    def graphs(self) -> list[Taken]:
        """What the driver has taken for each graph. Any thread."""
        return [graph.taken for prepared in list(self._ready.values()) if (graph := prepared.graph)]

    def ready_sets(self) -> list[Shapes]:
        """The sets of input shapes that are ready. Any thread."""
        return list(self._ready)

    def missing_sms(self) -> int:
        """How many SMs the partition has fewer than a profile is meant for that ready shapes run with, at most. Any thread."""
        profiles = {prepared.context.profile for prepared in list(self._ready.values())}
        return max((self._loaded.missing_sms(self._partition, profile) for profile in profiles), default=0)

    def find(self, shapes: Shapes) -> Fit | None:
        """The fit for these shapes, as they are or padded with rows; None if nothing is ready.

        Raises TensorMismatch for fewer rows than the engine takes.
        """
        if found := self._fits.get(shapes):
            return found
        if found := self._fit(shapes):
            self._fits[shapes] = found
        return found

    def stop_padding(self) -> None:
        """From now on run no more rows than an inference has."""
        self._pads = False
        self._fits.clear()

    def mark_used(self, prepared: Prepared) -> None:
        """Make this the most recently used set of shapes."""
        if prepared.shapes in self._ready:
            self._ready.move_to_end(prepared.shapes)

    def prepare(self, shapes: Shapes, stream: Stream) -> Fit:
        """The fit for these shapes. Compiles and captures them if nothing is ready, and blocks meanwhile.

        Raises TensorMismatch, ExecutionFailed, CUDAError.
        """
        if found := self.find(shapes):
            return found
        self._loaded.signature.check(shapes)
        self._first_right(shapes, lambda each: self._prepare_one(each, stream))
        if found := self.find(shapes):
            return found
        raise ExecutionFailed(f"{self._loaded.path.name} is not ready for shape {shapes_text(shapes)}")

    def _first_right(self, shapes: Shapes, prepare: Callable[[Shapes], bool]) -> None:
        """Prepare these shapes, or where they are answered wrongly others that their rows can be run with.

        `prepare` returns whether answers are right, and then has made the shapes ready. Raises WrongAnswer if no way is
        found, and what `prepare` raises.
        """
        verifier = self._loaded.verifier
        if verifier is None:
            prepare(shapes)
            return
        if why := verifier.refused.get(shapes):
            raise WrongAnswer(why)
        if prepare(shapes):
            return
        for other in self._others(shapes):
            if other in self._ready or prepare(other):
                verifier.route(shapes, other)
                self._fits.clear()
                return
        raise verifier.refuse(shapes)

    def _others(self, shapes: Shapes) -> list[Shapes]:
        """With which other numbers of rows these shapes may be run, the better one first; none if rows are no rows."""
        if not self._pads or not shapes or any(shape[:1] != shapes[0][:1] for shape in shapes):
            return []
        most = min([spec.limits[0][1] for spec in self._loaded.signature.inputs if spec.limits], default=shapes[0][0])
        others = other_rows(shapes, most)
        known = self._loaded.verifier.routes.get(shapes) if self._loaded.verifier else None
        return ([known] if known in others else []) + [each for each in others if each != known and self._is_taken(each)]

    def _is_taken(self, shapes: Shapes) -> bool:
        try:
            self._loaded.signature.check(shapes)
            self._loaded.profile_for(shapes, self._profile)
        except TensorMismatch:
            return False
        return True

    def _prepare_one(self, shapes: Shapes, stream: Stream) -> bool:
        """Compile and capture these shapes, and have them ready, unless they are answered wrongly: then False."""
        context, reference = self._context(shapes), self._reference(shapes)
        self._loaded.warn_of_tuning(self._partition, context.profile)
        with KERNEL_LOADS.hurrying(), context.lock:
            context.use_streams(self._aux_streams)
            context.set_shapes(shapes)
            if not self._is_right(context, reference, stream):
                return False
            if self.captures and shapes not in context.compiled:
                self._compile(context, stream)
            prepared = self._prepared(context)
            if self.captures:
                prepared = self._captured(prepared, stream)
        self._keep(prepared)
        return True

    def _reference(self, shapes: Shapes) -> Answered | None:
        """What answers are compared with, None if nothing is to be. Blocks, perhaps for seconds. Raises Cancelled."""
        if self._instance.data_dependent:
            return Answered(None, "the sizes of its outputs depend on data", 0.0)
        return self._loaded.verifier.fetch(shapes) if self._loaded.verifier else None

    def _is_right(self, context: Context, reference: Answered | None, stream: Stream) -> bool:
        """Whether the shapes that are set in the context may be run. Its kernels may be compiled for that."""
        verifier, shapes = self._loaded.verifier, context.shapes or ()
        if verifier is None:
            return True

        def repeat(inputs: Sequence[Array]) -> Generator[list[Array], None, None]:
            try:
                self._compiled += not self.warming
                yield from answers(self._loaded, context, inputs, stream, self._partition if self.captures else None)
            finally:
                context.set_addresses(self._instance.addresses)

        return verifier.judge(shapes, reference, None if self._instance.data_dependent else repeat)

    def preparing(self, shapes: Shapes) -> "Future[None] | None":
        """See `engines.base.Preparing`."""
        if self._closed or shapes in self._fits or not self._is_unprepared(shapes):
            return None
        prepare = self._prepare_in_background
        if not self.captures or not self._instance.prepares:  # Then only the reference is computed beforehand.
            if self._instance.data_dependent or not (self._loaded.verifier and self._loaded.verifier.lacks(shapes)):
                return None
            prepare = self._prefetch
        if (pending := self._pending.get(shapes)) is None:
            self._compiler = self._compiler or ThreadPoolExecutor(1, f"compiling {self._loaded.path.name}", lower_priority)
            pending = self._pending[shapes] = self._compiler.submit(prepare, shapes)
        return pending

    def _is_unprepared(self, shapes: Shapes) -> bool:
        """Whether the engine takes these shapes and nothing is ready for them."""
        if self._loaded.verifier and shapes in self._loaded.verifier.refused:
            return False
        try:
            self._loaded.signature.check(shapes)
            return self.find(shapes) is None
        except TensorMismatch:
            return False

    def recapture(self, other: "ReadyShapes") -> None:
        """Capture here what the other has graphs of. Blocks for some 10 ms a graph, while the other may serve.

        Raises ExecutionFailed, PartitionError, CUDAError.
        """
        with other._lock:
            theirs = list(other._ready.values())
        for prepared in theirs:
            if prepared.graph:
                self._keep(self._recapture_one(prepared))
                self._captures += 1

    def run(self, prepared: Prepared, stream: Stream) -> str:
        """Submit the engine of an inference that has no graph. Returns "", or the library's error text."""
        context = prepared.context
        with KERNEL_LOADS.hurrying(), context.lock:
            context.use_streams(self._aux_streams)
            context.set_shapes(prepared.shapes)
            return context.execute(stream, ordered_stream=self._partition.stream)

    def join(self, prepared: Prepared, spans: Sequence[Span], stream: Stream) -> None:
        """Add an inference, with copies from and to these addresses, to what the caller captures from this stream.

        The shapes must have a graph, so that nothing of the context is in flight but graphs. Raises ExecutionFailed,
        CUDAError.
        """
        context, copies = prepared.context, self._instance.copies[False]
        with joining_capture(), context.lock:
            context.use_streams(self._aux_streams)
            context.set_shapes(prepared.shapes)
            copies.write(copies.table(spans))
            copies.copy_in(stream)
            refused = context.execute(stream, captured=True)
            copies.copy_out(stream)
        self._loaded.check_execution(refused)

    def forget(self, prepared: Prepared) -> None:
        """Drop these shapes, so that the next inference of them prepares them again. Nothing of them may be in flight."""
        if self._ready.get(prepared.shapes) is prepared:
            self._recipes.revoke()
            del self._ready[prepared.shapes]
            self._fits.clear()
            prepared.context.compiled.discard(prepared.shapes)
            self._instance.compiled.pop((prepared.context.profile, prepared.shapes), None)
            prepared.close()

    def stop_preparing(self) -> None:
        """Wait for background preparations and start no more. Blocks. Not with `lock` held, which they need to finish."""
        with self._lock:
            self._closed = True
        if self._compiler:
            itself = self._preparing_thread is current_thread()  # If the collector finds the executor on that thread.
            self._compiler.shutdown(wait=not itself, cancel_futures=True)

    def close(self) -> None:
        """Destroy every graph, even if one fails; nothing may be in flight. Raises CUDAError."""
        self._recipes.revoke()
        self._fits.clear()
        with ExitStack() as closing_all:
            while self._ready:
                closing_all.callback(self._ready.popitem()[1].close)

    def _context(self, shapes: Shapes) -> Context:
        profile = self._loaded.profile_for(shapes, self._profile)
        known = self._instance.compiled.get((profile, shapes)) if self.captures else None
        return known or self._instance.contexts[profile]

    def _prepared(self, context: Context) -> Prepared:
        """For the shapes that are set in the context."""
        shapes, outputs = context.shapes or (), context.output_shapes()
        tensors = zip(self._loaded.specs, (*shapes, *outputs), self._instance.sizes, strict=True)
        nbytes = sum(most if -1 in shape else spec.nbytes(shape) for spec, shape, most in tensors)
        return Prepared(shapes, outputs, context, self._instance.copies[uses_sms(self.settings.copies, nbytes)])

    def _fit(self, shapes: Shapes) -> Fit | None:
        if found := self._ready.get(shapes):
            return Fit(found, found.outputs)
        if self._pads and (verifier := self._loaded.verifier) and (other := verifier.routes.get(shapes)):
            found = self._ready.get(other)
            return self._of_rows(found, shapes) if found else None
        larger = padded(shapes, self._ready) if self._pads and not self.warming else None
        if larger is None:
            return None
        self._loaded.signature.check(shapes)
        return self._of_rows(self._ready[larger], shapes)

    def _of_rows(self, found: Prepared, shapes: Shapes) -> Fit | None:
        """The fit for shapes of other rows than are prepared."""
        rows, prepared = shapes[0][0], found.shapes[0][0]
        if any(output[:1] != (prepared,) or -1 in output for output in found.outputs):
            return None  # The outputs do not have one row for each input row, so the padding cannot be cut off.
        return Fit(found, tuple([(rows, *output[1:]) for output in found.outputs]), -(-rows // prepared))

    def _compile(self, context: Context, stream: Stream) -> None:
        """Run the shapes that are set once, on arbitrary data, so that they can be captured."""
        self._loaded.check_execution(context.execute(stream))
        context.wait_until_idle()
        self._compiled += not self.warming

    def _captured(self, prepared: Prepared, stream: Stream) -> Prepared:
        """Capture a graph. If that fails, log it once and continue without graphs."""
        prepared.context.wait_until_idle()
        try:
            with failing("capturing"):
                prepared.graph = self._graph(prepared, patient=self.warming)
        except ExecutionFailed as error:
            return self._stop_capturing(str(error), prepared, stream)
        self._captures += 1
        return prepared

    def _graph(self, prepared: Prepared, patient: bool) -> Graph:
        """`patient`: no request or move waits for it, so it may wait until it can be measured."""
        what = self._loaded.structure, prepared.context.profile, prepared.shapes
        return capture(self._partition, lambda side: _record(prepared, side, self._clock), what, patient)

    def _recapture_one(self, prepared: Prepared) -> Prepared:
        context = prepared.context
        with context.lock:
            context.use_streams(self._aux_streams)
            context.set_shapes(prepared.shapes)
            graph = self._graph(prepared, patient=False)
        return Prepared(prepared.shapes, prepared.outputs, context, prepared.copies, graph)

    def _stop_capturing(self, why: str, prepared: Prepared, stream: Stream) -> Prepared:
        """Continue without captured graphs, perhaps with native ones. Raises ExecutionFailed where graphs are required."""
        if refused := refusal(self.settings, why):
            raise ExecutionFailed(f"running {self._loaded.path.name}: {refused}")
        self._fallbacks += 1
        if self._override:  # What was ready before the override stays.
            log.warning(
                "%s: cannot be captured as a graph (%s), so it runs without until the override ends", self._loaded.path, why
            )
            self._override = self._override._replace(capture=False)
            return Prepared(prepared.shapes, prepared.outputs, prepared.context, prepared.copies)
        mode = self._instance.stop_capturing(why)
        log.warning("%s: %s", self._loaded.path, mode.note)
        stream.sync()
        self.close()
        if mode.native:
            self._instance.open_native_contexts(self._partition.stream)
        return Prepared(prepared.shapes, prepared.outputs, self._context(prepared.shapes), prepared.copies)

    def _keep(self, prepared: Prepared) -> None:
        if len(self._ready) >= MAX_READY_SETS:
            self._recipes.revoke()
            for used in self._recipes.used():
                if used in self._ready:
                    self._ready.move_to_end(used)
        self._ready[prepared.shapes] = prepared
        if prepared.graph:
            self._instance.compiled[prepared.context.profile, prepared.shapes] = prepared.context
        self._fits.clear()
        if len(self._ready) > MAX_READY_SETS:
            self._partition.stream.sync()
            self._ready.popitem(last=False)[1].close()

    def _prepare_in_background(self, shapes: Shapes) -> None:
        """On the preparing thread: compile with contexts reserved for that, capture, and hand the graph to the executor."""
        self._preparing_thread = current_thread()
        try:
            with failing(f"preparing {self._loaded.path.name}"), ExitStack() as made:
                self._partition.attach()
                self._loaded.signature.check(shapes)
                side = made.enter_context(closing(self._partition.make_stream()))
                aux_streams = [made.enter_context(closing(self._partition.make_stream())) for _ in self._aux_streams]
                made.callback(side.stream.sync)  # Even after a failure, nothing may be in flight on streams that are destroyed.
                self._first_right(shapes, lambda each: self._compile_in_background(each, side.stream, aux_streams))
        finally:
            with self._lock:
                self._pending.pop(shapes, None)

    def _prefetch(self, shapes: Shapes) -> None:
        """On the preparing thread: have the reference of these shapes computed."""
        self._preparing_thread = current_thread()
        try:
            if self._loaded.verifier:
                self._loaded.verifier.prefetch(shapes)
        finally:
            with self._lock:
                self._pending.pop(shapes, None)

    def _compile_in_background(self, shapes: Shapes, stream: Stream, aux_streams: Sequence[SideStream]) -> bool:
        """As `_prepare_one`, with contexts of its own."""
        verifier, reference = self._loaded.verifier, self._reference(shapes)

        def judge(repeat: Repeat) -> None:
            if verifier and not verifier.judge(shapes, reference, repeat):
                raise WrongAnswer(shapes_text(shapes))

        profile, background = self._loaded.profile_for(shapes, self._profile), self._instance.background
        known = self._instance.compiled.get((profile, shapes))
        with KERNEL_LOADS.hurrying():
            if known is None:
                try:
                    background.compile(shapes, profile, stream, aux_streams, self._partition, judge)
                except WrongAnswer:
                    return False
            context = known or background.context(profile)
            with context.lock:
                self._execute_in_order(context, shapes)
                context.wait_until_idle()
                context.use_streams(aux_streams)
                prepared = self._prepared(context)
                prepared.graph = self._graph(prepared, patient=False)
            with self._lock:
                if self._closed or shapes in self._ready:
                    prepared.close()
                else:
                    self._keep(prepared)
                    self._captures += 1
                    self._compiled += known is None
        return True

    def _execute_in_order(self, context: Context, shapes: Shapes) -> None:
        """Run shapes once whose kernels are compiled, so that they can be captured.

        On the partition's stream, and in order with those of alternates, as graphs of the context may be in flight there and
        use its memory. The tenant waits while this is submitted.
        """
        with self._instance.sharers.between(self._lock):
            context.use_streams(self._aux_streams)
            context.set_shapes(shapes)
            context.set_addresses(self._instance.addresses)
            if shapes not in context.compiled:
                self._loaded.check_execution(context.execute(self._partition.stream))


def _record(prepared: Prepared, side: SideStream, clock: int) -> str:
    """Add one inference to the capture of a stream. Returns "", or the library's error text."""
    context, copies = prepared.context, prepared.copies
    if not copies.captured:
        return context.execute(side.stream, captured=True)
    copies.copy_in(side.stream, clock)
    refused = context.execute(side.stream, captured=True)
    copies.copy_out(side.stream, clock)
    return refused
