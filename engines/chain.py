"""Several models one after another as one engine: what one gives the next takes, by the names of tensors; an ensemble.

On a GPU they are one graph, and what is between them stays on the device: see `engines.tensorrt.chain`. Elsewhere they run
in turn, each on what the one before gave.
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from ctypes import memmove
from threading import RLock
from typing import Any

from partitions import Partition

from .base import NO_ROOM, Engine, Executor, Room, Tensor, Work, check_tensors
from .errors import Cancelled, ExecutionFailed, ModelRefused
from .settings import RuntimeSettings, overridden
from .signature import Shape, Signature, align
from .warmup import blank, shape_sets
from .wiring import Step, Wiring, wire

log = logging.getLogger("greenlane.engines")


def chain(steps: Sequence[Step], outputs: Sequence[str], settings: RuntimeSettings | None = None) -> Engine:
    """An engine that runs these steps in this order and gives these tensors.

    What no step gives is an input. Of `settings`, `graphs`, `copies` and `batch_padding` are the chain's; the others are those
    that each engine was loaded with. The engines stay the caller's, to be closed after the chain. Does not block. Raises
    ModelRefused naming the step and the tensor where they do not fit together.
    """
    wiring = wire(steps, outputs)
    joint = getattr(wiring.engines[0], "chained", None)
    if joint is None or len({type(engine) for engine in wiring.engines}) > 1:
        return SequenceEngine(wiring, settings or RuntimeSettings())
    made: Engine = joint(wiring, settings or RuntimeSettings())
    return made


class SequenceEngine:
    """Engines in turn; see `engines.base.Engine`."""

    platform = "ensemble"

    def __init__(self, wiring: Wiring, settings: RuntimeSettings) -> None:
        self.wiring = wiring
        self._settings = settings
        ones = [tuple(dim if isinstance(dim, int) else 1 for dim in spec.dims) for spec in wiring.signature.inputs]
        asked = settings.warm_up if isinstance(settings.warm_up, tuple) else ()
        self.warm_up = shape_sets(asked, wiring.signature, ones)
        """Shapes of the inputs to run before an executor is bound; the steps are warmed up by themselves, too."""

    def __repr__(self) -> str:
        return f"<SequenceEngine of {list(self.wiring.engines)}>"

    @property
    def signature(self) -> Signature:
        return self.wiring.signature

    def bind(self, partition: Partition) -> "SequenceExecutor":
        """Each of them, all or none. Raises ModelRefused."""
        if self._settings.graphs == "required":
            raise ModelRefused(f"graphs are required, but {self!r} runs its models in turn; leave graphs 'on'")
        with ExitStack() as failed:
            bound = []
            for engine in self.wiring.engines:
                bound.append(engine.bind(partition))
                failed.callback(bound[-1].close)
            executor = SequenceExecutor(self, bound)
            self.make_ready(executor)
            failed.pop_all()
        return executor

    def make_ready(self, executor: "SequenceExecutor") -> None:
        """Run what it is to be warm for. A model may refuse what was made up, so failing here is worth a word and no more."""
        try:
            for shapes in self.warm_up:
                executor.enqueue([blank(*each) for each in zip(self.signature.inputs, shapes, strict=True)]).wait()
        except ExecutionFailed as error:
            log.warning("%r: warm-up with zeros failed, so the first request pays for it: %s", self, error)

    def close(self) -> None:
        """Nothing: the engines are the caller's."""


class SequenceExecutor:
    """Executors in turn, within `Work.wait`; see `engines.base.Executor`."""

    def __init__(self, engine: SequenceEngine, executors: Sequence[Executor]) -> None:
        self.engine = engine
        self._executors = tuple(executors)
        self._turn = RLock()
        self._pending: deque[SequenceWork] = deque()
        self._closed = False

    def __repr__(self) -> str:
        return f"<SequenceExecutor {list(self._executors)}{', closed' if self._closed else ''}>"

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> "SequenceWork":
        if self._closed:
            raise ExecutionFailed(f"{self!r} takes nothing more; bind the engine again")
        check_tensors(self.engine.signature, inputs)
        self.engine.signature.check([tensor.shape for tensor in inputs])
        work = SequenceWork(self, tuple(inputs), room)
        self._pending.append(work)
        return work

    def preparing(self, shapes: Sequence[Shape]) -> None:
        """The shapes between the models are not known beforehand."""

    def rebind(self, partition: Partition) -> "SequenceExecutor":
        with ExitStack() as failed:
            moved = []
            for executor in self._executors:
                moved.append(executor.rebind(partition))
                failed.callback(moved[-1].close)
            whole = SequenceExecutor(self.engine, moved)
            self.engine.make_ready(whole)
            failed.pop_all()
        return whole

    @contextmanager
    def overriding(self, **changes: Any) -> Iterator[None]:
        overridden(RuntimeSettings(), changes)
        each: list[AbstractContextManager[None]] = [executor.overriding(**changes) for executor in self._executors]
        with ExitStack() as after:
            for one in each:
                after.enter_context(one)
            yield

    def describe(self) -> Mapping[str, object]:
        warm = [[list(shape) for shape in shapes] for shapes in self.engine.warm_up]
        return {
            "graphs": "none",
            "why": "its models run in turn",
            "shapes": warm,
            "steps": [dict(each.describe()) for each in self._executors],
        }

    def trim(self, after: float, idle: bool) -> None:
        """Each."""
        for executor in self._executors:
            if (trim := getattr(executor, "trim", None)) is not None:
                trim(after, idle)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with ExitStack() as left:
                for executor in self._executors:
                    left.callback(executor.close)

    def run_until(self, work: "SequenceWork") -> None:
        """Run what was enqueued, in order, up to this. Blocks."""
        with self._turn:
            while not work.ended:
                self._pending.popleft().run(self._executors)


class SequenceWork:
    """One inference of every model; see `engines.base.Work`."""

    def __init__(self, executor: SequenceExecutor, inputs: tuple[Tensor, ...], room: Room) -> None:
        self.ended = False
        self._executor = executor
        self._call: tuple[tuple[Tensor, ...], Room] | None = (inputs, room)
        self._now: Work | None = None
        self._cancelled = False
        self._outputs: tuple[Tensor, ...] = ()
        self._error: Exception | None = None

    def __repr__(self) -> str:
        return f"<SequenceWork {'failed' if self._error else 'done' if self.ended else 'waiting'}>"

    def wait(self) -> tuple[Tensor, ...]:
        self._executor.run_until(self)
        if self._error:
            raise self._error
        return self._outputs

    def cancel(self) -> None:
        self._cancelled = True
        if now := self._now:
            now.cancel()

    def run(self, executors: Sequence[Executor]) -> None:
        """For the executor, once: keep what comes of it, or the error."""
        call, self._call = self._call, None
        try:
            if call:
                self._outputs = self._run(executors, *call)
        except Exception as error:
            self._error = error
        self._now = None
        self.ended = True

    def _run(self, executors: Sequence[Executor], inputs: tuple[Tensor, ...], room: Room) -> tuple[Tensor, ...]:
        wiring = self._executor.engine.wiring
        tensors = {spec.name: tensor for spec, tensor in zip(wiring.signature.inputs, inputs, strict=True)}
        for executor, takes, gives in zip(executors, wiring.takes, wiring.gives, strict=True):
            self._now = executor.enqueue([tensors[name] for name in takes])
            if self._cancelled:
                self._now.cancel()
            results = self._now.wait()
            if self._cancelled:
                raise Cancelled("cancelled between two models")
            tensors |= {name: tensor for name, tensor in zip(gives, results, strict=True) if name}
        found = [tensors[spec.name] for spec in wiring.signature.outputs]
        known = wiring.signature.output_shapes(wiring.signature.check([tensor.shape for tensor in inputs]))
        return tuple(_placed(found, known, room))


def _placed(tensors: Sequence[Tensor], known: Sequence[Shape | None], room: Room) -> Iterator[Tensor]:
    """Those of known size in the room, as far as they fit."""
    end = 0
    for tensor, shape in zip(tensors, known, strict=True):
        if shape is not None and end + tensor.nbytes <= room.nbytes:
            memmove(room.address + end, tensor.address, tensor.nbytes)
            yield Tensor(tensor.shape, room.address + end, tensor.nbytes)
            end = align(end + tensor.nbytes)
        else:
            yield tensor
