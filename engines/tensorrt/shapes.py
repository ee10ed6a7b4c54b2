"""What one executor has ready for each set of input shapes: a graph on its partition, or at least compiled kernels.

Shapes become ready in one of three ways. `prepare` compiles and captures them while its caller waits. `preparing` does so on
a thread and contexts of its own, while other shapes are served. `adopt` captures again what another executor of the same
instance has, which compiles nothing.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from threading import RLock, Thread, current_thread
from typing import NamedTuple

from cuda.core import Stream

from partitions.cuda.device import CudaPartition, SideStream

from ..errors import ExecutionFailed, TensorMismatch
from ..model_files.profiles import padded, suited
from ..settings import RuntimeSettings
from ..signature import Shape
from .capture import Graph, capture, exclusively, joining
from .context import Context
from .copies import Copies, Span, by_sms
from .graph_mode import fall_back, refusal
from .instance import Instance
from .plan import LoadedPlan
from .thread_priority import give_way
from .work import failing

log = logging.getLogger("greenlane.engines")

MOST_SHAPES = 64
"""Sets of shapes of one executor that are kept ready, the least recently used forgotten."""

Shapes = tuple[Shape, ...]


class Prepared:
    """A set of input shapes that was run before: its output shapes, its context, who copies, and its graph if it has one."""

    __slots__ = ("context", "copies", "graph", "outputs", "shapes")

    def __init__(self, shapes: Shapes, outputs: Shapes, context: Context, copies: Copies, graph: Graph | None = None) -> None:
        self.shapes = shapes
        self.outputs = outputs
        self.context = context
        self.copies = copies
        self.graph = graph

    def __repr__(self) -> str:
        return f"<Prepared {list(self.outputs)}{', captured' if self.graph else ''}>"

    def close(self) -> None:
        """Destroy the graph, which must not be in flight."""
        graph, self.graph = self.graph, None
        if graph is not None:
            graph.close()


class Override(NamedTuple):
    """What holds instead of the engine's settings for a while; `capture`: with graphs of ours."""

    settings: RuntimeSettings
    capture: bool


class Fit(NamedTuple):
    """What runs for some shapes, and the shapes of the outputs that are asked for: fewer rows than run, if it is padded."""

    prepared: Prepared
    outputs: Shapes


class ShapeStatistics(NamedTuple):
    """Sets of shapes that are ready, and so far: captures, sets that were compiled after the executor was bound, and times that
    graphs were given up.
    """

    ready: int
    captures: int
    compiled: int
    fallbacks: int


class ReadyShapes:
    """Those of one executor. `turn` is the executor's lock, held to call a method unless it says otherwise."""

    def __init__(
        self,
        loaded: LoadedPlan,
        partition: CudaPartition,
        instance: Instance,
        extra: Sequence[SideStream],
        turn: RLock,
        override: Override | None = None,
    ) -> None:
        self._loaded = loaded
        self._partition = partition
        self._instance = instance
        self._extra = extra
        self._turn = turn
        self._override = override
        self.settings = override.settings if override else loaded.settings
        """Those that hold now."""
        self._pads = self.settings.pads(loaded.signature)
        self._ready: OrderedDict[Shapes, Prepared] = OrderedDict()
        self._fits: dict[Shapes, Fit] = {}
        self._pending: dict[Shapes, Future[None]] = {}
        self._compiler: ThreadPoolExecutor | None = None
        self._compiling: Thread | None = None
        self._closed = False
        self._captures = self._compiled = self._fallbacks = 0
        self._profile = suited(loaded.profiles, loaded.usable, partition.size)
        self.warming = True
        """Whether the executor is being bound, so that what is compiled was expected, and nothing is padded instead."""

    def __repr__(self) -> str:
        return f"<ReadyShapes {list(self._ready)}, {len(self._pending)} pending>"

    @property
    def captures(self) -> bool:
        """Whether each set of shapes gets a graph of ours. Any thread."""
        return self._override.capture if self._override else self._instance.way.capture

    @property
    def is_preparing(self) -> bool:
        """Whether a thread prepares shapes, or is going to. Any thread."""
        return bool(self._pending)

    def statistics(self) -> ShapeStatistics:
        """Any thread; what it counts may be in the middle of a change."""
        return ShapeStatistics(len(self._ready), self._captures, self._compiled, self._fallbacks)

    def names(self) -> list[Shapes]:
        """The sets of input shapes that are ready. Any thread."""
        return list(self._ready)

    def find(self, shapes: Shapes) -> Fit | None:
        """What is ready for these shapes, as they are or with rows added; None if nothing is.

        Raises TensorMismatch for fewer rows than the engine takes.
        """
        if found := self._fits.get(shapes):
            return found
        if found := self._fit(shapes):
            self._fits[shapes] = found
        return found

    def used(self, prepared: Prepared) -> None:
        """It is run now, so others are forgotten before it."""
        if prepared.shapes in self._ready:
            self._ready.move_to_end(prepared.shapes)

    def prepare(self, shapes: Shapes, stream: Stream) -> Fit:
        """What is to run for these shapes, compiled and captured first where nothing is ready. Blocks for that.

        Raises TensorMismatch, ExecutionFailed, CUDAError.
        """
        if found := self.find(shapes):
            return found
        self._loaded.signature.check(shapes)
        context = self._context(shapes)
        self._loaded.warn_of_tuning(self._partition, context.profile)
        with context.lock:
            context.use_streams(self._extra)
            context.set_shapes(shapes)
            if self.captures and shapes not in context.compiled:
                self._compile(context, stream)
            prepared = self._prepared(context)
            if self.captures:
                prepared = self._captured(prepared, stream)
        self._keep(prepared)
        return Fit(prepared, prepared.outputs)

    def preparing(self, shapes: Shapes) -> "Future[None] | None":
        """See `engines.base.Preparing`."""
        if self._closed or not self.captures or not self._instance.prepares or shapes in self._fits or not self._lacks(shapes):
            return None
        if (pending := self._pending.get(shapes)) is None:
            self._compiler = self._compiler or ThreadPoolExecutor(1, f"compiling {self._loaded.path.name}", give_way)
            pending = self._pending[shapes] = self._compiler.submit(self._prepare_beside, shapes)
        return pending

    def _lacks(self, shapes: Shapes) -> bool:
        """Whether nothing is ready for shapes that the engine takes."""
        try:
            self._loaded.signature.check(shapes)
            return self.find(shapes) is None
        except TensorMismatch:
            return False

    def adopt(self, other: "ReadyShapes") -> None:
        """Capture here what the other has graphs of. Blocks for some 10 ms each; the other may serve meanwhile.

        Raises ExecutionFailed, PartitionError, CUDAError.
        """
        with other._turn:
            theirs = list(other._ready.values())
        for prepared in theirs:
            if prepared.graph:
                self._keep(self._captured_again(prepared))
                self._captures += 1

    def run(self, prepared: Prepared, stream: Stream) -> str:
        """Submit the engine's part of an inference that has no graph; returns "", or what the library said."""
        context = prepared.context
        with context.lock:
            context.use_streams(self._extra)
            context.set_shapes(prepared.shapes)
            return context.execute(stream, then=self._partition.stream)

    def join(self, prepared: Prepared, spans: Sequence[Span], stream: Stream) -> None:
        """Put an inference, with copies from and to these addresses, into what the caller captures from this stream.

        Of shapes that have a graph, so that nothing of the context is in flight but graphs. Raises ExecutionFailed, CUDAError.
        """
        context, copies = prepared.context, self._instance.copies[False]
        with joining(), context.lock:
            context.use_streams(self._extra)
            context.set_shapes(prepared.shapes)
            context.set_addresses(self._instance.addresses)
            copies.write(copies.table(spans))
            copies.bring_in(stream)
            refused = context.execute(stream, captured=True)
            copies.take_out(stream)
        self._loaded.check_execution(refused)

    def forget(self, prepared: Prepared) -> None:
        """Its shapes count as new. Nothing of it is in flight."""
        if self._ready.get(prepared.shapes) is prepared:
            del self._ready[prepared.shapes]
            self._fits.clear()
            prepared.context.compiled.discard(prepared.shapes)
            prepared.close()

    def finish(self) -> None:
        """Wait for what is being prepared, and begin no more. Blocks. Not with `turn` held, which what is prepared needs."""
        with self._turn:
            self._closed = True
        if self._compiler:
            itself = self._compiling is current_thread()  # Where the collector found the executor in the thread that compiles.
            self._compiler.shutdown(wait=not itself, cancel_futures=True)

    def close(self) -> None:
        """Destroy every graph, whatever fails; nothing may be in flight. Raises CUDAError."""
        self._fits.clear()
        with ExitStack() as left:
            while self._ready:
                left.callback(self._ready.popitem()[1].close)

    def _context(self, shapes: Shapes) -> Context:
        contexts = self._instance.contexts
        return contexts[self._loaded.profile_for(shapes, self._profile)]

    def _prepared(self, context: Context) -> Prepared:
        """Of the shapes that are set."""
        shapes, outputs = context.shapes or (), context.output_shapes()
        tensors = zip(self._loaded.specs, (*shapes, *outputs), self._instance.sizes, strict=True)
        nbytes = sum(most if -1 in shape else spec.nbytes(shape) for spec, shape, most in tensors)
        return Prepared(shapes, outputs, context, self._instance.copies[by_sms(self.settings.copies, nbytes)])

    def _fit(self, shapes: Shapes) -> Fit | None:
        if found := self._ready.get(shapes):
            return Fit(found, found.outputs)
        larger = padded(shapes, self._ready) if self._pads and not self.warming else None
        if larger is None:
            return None
        self._loaded.signature.check(shapes)
        found, rows = self._ready[larger], shapes[0][0]
        if any(output[:1] != larger[0][:1] or -1 in output for output in found.outputs):
            return None  # Not a row for each row: nothing says which of them are those of the inference.
        return Fit(found, tuple([(rows, *output[1:]) for output in found.outputs]))

    def _compile(self, context: Context, stream: Stream) -> None:
        """Run the shapes that are set once, on whatever lies in the memory, so that they can be captured."""
        self._loaded.check_execution(context.execute(stream))
        context.settle()
        self._compiled += not self.warming

    def _captured(self, prepared: Prepared, stream: Stream) -> Prepared:
        """It with a graph; where that cannot be, as it is to run without from now on, which is said once."""
        prepared.context.settle()
        try:
            with failing("capturing"):
                prepared.graph = self._graph(prepared)
        except ExecutionFailed as error:
            return self._give_up(str(error), prepared, stream)
        self._captures += 1
        return prepared

    def _graph(self, prepared: Prepared) -> Graph:
        return capture(self._partition, lambda side: _record(prepared, side))

    def _captured_again(self, prepared: Prepared) -> Prepared:
        context = prepared.context
        with context.lock:
            context.use_streams(self._extra)
            context.set_shapes(prepared.shapes)
            context.set_addresses(self._instance.addresses)  # It may have others, where a preparation beside has failed.
            graph = self._graph(prepared)
        return Prepared(prepared.shapes, prepared.outputs, context, prepared.copies, graph)

    def _give_up(self, why: str, prepared: Prepared, stream: Stream) -> Prepared:
        """No graphs of ours any more, but perhaps the library's own. Raises ExecutionFailed where graphs are required."""
        if refused := refusal(self.settings, why):
            raise ExecutionFailed(f"running {self._loaded.path.name}: {refused}")
        self._fallbacks += 1
        if self._override:  # What the executor has otherwise stays.
            log.warning(
                "%s: cannot be captured as a graph (%s), so it runs without until the override ends", self._loaded.path, why
            )
            self._override = self._override._replace(capture=False)
            return Prepared(prepared.shapes, prepared.outputs, prepared.context, prepared.copies)
        way = fall_back(self._loaded.situation, why)
        log.warning("%s: %s", self._loaded.path, way.notice)
        stream.sync()
        self.close()
        self._instance.renew(way, self._partition.stream)
        return Prepared(prepared.shapes, prepared.outputs, self._context(prepared.shapes), prepared.copies)

    def _keep(self, prepared: Prepared) -> None:
        self._ready[prepared.shapes] = prepared
        self._fits.clear()
        if len(self._ready) > MOST_SHAPES:
            self._partition.stream.sync()
            self._ready.popitem(last=False)[1].close()

    def _prepare_beside(self, shapes: Shapes) -> None:
        """On the compiling thread: compile with contexts of its own, capture, and let the executor have the graph."""
        self._compiling = current_thread()
        try:
            with failing(f"preparing {self._loaded.path.name}"), ExitStack() as made:
                self._partition.attach()
                self._loaded.signature.check(shapes)
                side = made.enter_context(closing(self._partition.make_stream()))
                extra = [made.enter_context(closing(self._partition.make_stream())) for _ in self._extra]
                made.callback(side.stream.sync)  # Whatever fails: nothing may be in flight there when they are destroyed.
                self._compile_beside(shapes, side.stream, extra)
        finally:
            with self._turn:
                self._pending.pop(shapes, None)

    def _compile_beside(self, shapes: Shapes, stream: Stream, extra: Sequence[SideStream]) -> None:
        profile, beside = self._loaded.profile_for(shapes, self._profile), self._instance.beside
        beside.compile(shapes, profile, stream, extra)
        context = beside.context(profile)
        with context.lock:
            self._execute_in_order(context, shapes)
            context.settle()
            context.use_streams(extra)
            prepared = self._prepared(context)
            prepared.graph = self._graph(prepared)
        with self._turn:
            if self._closed or shapes in self._ready:
                prepared.close()
            else:
                self._keep(prepared)
                self._captures += 1
                self._compiled += 1

    def _execute_in_order(self, context: Context, shapes: Shapes) -> None:
        """Run shapes once whose kernels are compiled, so that they can be captured, on the partition's stream: graphs of the
        context may be in flight there, and use its memory. The tenant waits while this is submitted.
        """
        with exclusively(self._turn):
            context.use_streams(self._extra)
            context.set_shapes(shapes)
            context.set_addresses(self._instance.addresses)
            if shapes not in context.compiled:
                self._loaded.check_execution(context.execute(self._partition.stream))


def _record(prepared: Prepared, side: SideStream) -> str:
    """Put one inference into the capture of a stream; returns "", or what the library said."""
    context, copies = prepared.context, prepared.copies
    if not copies.captured:
        return context.execute(side.stream, captured=True)
    copies.bring_in(side.stream)
    refused = context.execute(side.stream, captured=True)
    copies.take_out(side.stream)
    return refused
