"""Several models that run one after another as one engine, an ensemble: outputs become inputs by the names of tensors.

On a GPU they are one graph, and the tensors in between stay on the device: see `engines.tensorrt.chain`. Elsewhere they run
one after another on the host.
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
    """An engine that runs these steps in this order and returns these tensors.

    A tensor that no step gives is an input. Of `settings`, `graphs`, `copies` and `batch_padding` apply to the chain; the
    others are those that each engine was loaded with. The caller keeps the engines, and closes them after the chain. Does not
    block. Raises ModelRefused naming the step and the tensor that do not fit together.
    """
    wiring = wire(steps, outputs)
    join = getattr(wiring.engines[0], "chained", None)
    if join is None or len({type(engine) for engine in wiring.engines}) > 1:
        return SequenceEngine(wiring, settings or RuntimeSettings())
    joined: Engine = join(wiring, settings or RuntimeSettings())
    return joined


class SequenceEngine:
    """Runs engines one after another; see `engines.base.Engine`."""

    platform = "ensemble"

    def __init__(self, wiring: Wiring, settings: RuntimeSettings) -> None:
        self.wiring = wiring
        self._settings = settings
        ones = [tuple(dim if isinstance(dim, int) else 1 for dim in spec.dims) for spec in wiring.signature.inputs]
        asked = settings.warm_up if isinstance(settings.warm_up, tuple) else ()
        self.warm_up = shape_sets(asked, wiring.signature, ones)
        """Input shapes to run before an executor is bound, in addition to the warm-up of each step."""

    def __repr__(self) -> str:
        return f"<SequenceEngine of {list(self.wiring.engines)}>"

    @property
    def signature(self) -> Signature:
        return self.wiring.signature

    def bind(self, partition: Partition) -> "SequenceExecutor":
        """Bind all steps or none. Raises ModelRefused."""
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
        """Run the warm-up. A model may refuse zeros, so a failure is only logged."""
        try:
            for shapes in self.warm_up:
                executor.enqueue([blank(*each) for each in zip(self.signature.inputs, shapes, strict=True)]).wait()
        except ExecutionFailed as error:
            log.warning("%r: warm-up with zeros failed, so the first request pays for it: %s", self, error)

    def close(self) -> None:
        """Do nothing: the caller closes the engines."""


class SequenceExecutor:
    """Runs executors one after another, in `Work.wait`; see `engines.base.Executor`."""

    def __init__(self, engine: SequenceEngine, executors: Sequence[Executor]) -> None:
        self.engine = engine
        self._executors = tuple(executors)
        self._lock = RLock()
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
        """None: the shapes between the models are not known beforehand."""

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
        """Trim every step."""
        for executor in self._executors:
            if (trim := getattr(executor, "trim", None)) is not None:
                trim(after, idle)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with ExitStack() as closing:
                for executor in self._executors:
                    closing.callback(executor.close)

    def run_until(self, work: "SequenceWork") -> None:
        """Run what was enqueued, in order, up to this work. Blocks."""
        with self._lock:
            while not work.ended:
                self._pending.popleft().run(self._executors)


class SequenceWork:
    """One inference of every step; see `engines.base.Work`."""

    def __init__(self, executor: SequenceExecutor, inputs: tuple[Tensor, ...], room: Room) -> None:
        self.ended = False
        self._executor = executor
        self._call: tuple[tuple[Tensor, ...], Room] | None = (inputs, room)
        self._current: Work | None = None
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
        if current := self._current:
            current.cancel()

    def run(self, executors: Sequence[Executor]) -> None:
        """Run it, once, and keep the outputs or the error. Called by the executor."""
        call, self._call = self._call, None
        try:
            if call:
                self._outputs = self._run(executors, *call)
        except Exception as error:
            self._error = error
        self._current = None
        self.ended = True

    def _run(self, executors: Sequence[Executor], inputs: tuple[Tensor, ...], room: Room) -> tuple[Tensor, ...]:
        wiring = self._executor.engine.wiring
        tensors = {spec.name: tensor for spec, tensor in zip(wiring.signature.inputs, inputs, strict=True)}
        for executor, takes, gives in zip(executors, wiring.takes, wiring.gives, strict=True):
            self._current = executor.enqueue([tensors[name] for name in takes])
            if self._cancelled:
                self._current.cancel()
            results = self._current.wait()
            if self._cancelled:
                raise Cancelled("cancelled between two models")
            tensors |= {name: tensor for name, tensor in zip(gives, results, strict=True) if name}
        found = [tensors[spec.name] for spec in wiring.signature.outputs]
        known = wiring.signature.output_shapes(wiring.signature.check([tensor.shape for tensor in inputs]))
        return tuple(_placed(found, known, room))


def _placed(tensors: Sequence[Tensor], known: Sequence[Shape | None], room: Room) -> Iterator[Tensor]:
    """Copies of those of known size into the room, as far as they fit; the others as they are."""
    end = 0
    for tensor, shape in zip(tensors, known, strict=True):
        if shape is not None and end + tensor.nbytes <= room.nbytes:
            memmove(room.address + end, tensor.address, tensor.nbytes)
            yield Tensor(tensor.shape, room.address + end, tensor.nbytes)
            end = align(end + tensor.nbytes)
        else:
            yield tensor
