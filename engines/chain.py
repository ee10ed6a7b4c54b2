"""Several models one after another as one engine: what one gives the next takes, by the names of tensors; an ensemble.

On a GPU they are one graph, and what is between them stays on the device: see `engines.tensorrt_chain`. Elsewhere they run
in turn, each on what the one before gave.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from ctypes import memmove
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

from partitions import Partition

from .base import NO_ROOM, Engine, Executor, Room, Tensor, Work, check_tensors
from .errors import Cancelled, ExecutionFailed, ModelRefused
from .settings import RuntimeSettings, overridden
from .signature import Shape, Signature, TensorSpec, align


@dataclass(frozen=True, slots=True)
class Step:
    """A model of a chain: the tensor that each of its inputs takes, and the one that each of its outputs becomes, by name.

    Every input has to be named. An output that is not is dropped.
    """

    engine: Engine
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Wiring:
    """A chain that was found right. `takes` and `gives` are the tensors of each step, in its model's order."""

    engines: tuple[Engine, ...]
    signature: Signature
    takes: tuple[tuple[str, ...], ...]
    gives: tuple[tuple[str | None, ...], ...]


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


def wire(steps: Sequence[Step], outputs: Sequence[str]) -> Wiring:
    """Check that the steps fit together; pure. Raises ModelRefused."""
    if not steps:
        raise ModelRefused("a chain of no steps; expected one or more")
    known: dict[str, TensorSpec] = {}
    given: list[str] = []
    later = [set(step.outputs.values()) for step in steps]
    for number, step in enumerate(steps):
        _check_names(number, step)
        names: dict[str, str] = {}
        for spec in step.engine.signature.inputs:
            tensor = step.inputs[spec.name]
            if tensor not in known:
                if any(tensor in each for each in later[number:]):
                    raise ModelRefused(f"step {number}: input {spec.name!r} takes {tensor!r}, which only a later step gives")
                known[tensor] = _fresh(spec, tensor, number)
                given.append(tensor)
            _unify(number, spec, known[tensor], names)
        for spec in step.engine.signature.outputs:
            if (tensor := step.outputs.get(spec.name, "")) in known:
                raise ModelRefused(f"step {number}: output {spec.name!r} gives {tensor!r}, which there is already")
            if tensor:
                known[tensor] = replace(spec, name=tensor, dims=_renamed(spec, names), limits=())
    if missing := [name for name in outputs if name not in known or name in given]:
        raise ModelRefused(f"no step gives {', '.join(map(repr, missing))}")
    if not outputs:
        raise ModelRefused("a chain without outputs; expected one or more")
    signature = Signature(tuple(known[name] for name in given), tuple(known[name] for name in outputs))
    takes = tuple(tuple(step.inputs[spec.name] for spec in step.engine.signature.inputs) for step in steps)
    gives = tuple(tuple(step.outputs.get(spec.name) for spec in step.engine.signature.outputs) for step in steps)
    return Wiring(tuple(step.engine for step in steps), signature, takes, gives)


def _check_names(number: int, step: Step) -> None:
    inputs = [spec.name for spec in step.engine.signature.inputs]
    outputs = [spec.name for spec in step.engine.signature.outputs]
    if missing := [name for name in inputs if name not in step.inputs]:
        raise ModelRefused(f"step {number}: nothing is said of input {missing[0]!r}; the model's are {', '.join(inputs)}")
    for named, real in ((step.inputs, inputs), (step.outputs, outputs)):
        if unknown := [name for name in named if name not in real]:
            raise ModelRefused(f"step {number}: the model has no {unknown[0]!r}; there are {', '.join(real)}")
    if len(set(step.outputs.values())) < len(step.outputs):
        raise ModelRefused(f"step {number}: two outputs give one tensor")


def _fresh(spec: TensorSpec, tensor: str, number: int) -> TensorSpec:
    """An input of the chain. Names of dimensions are a model's own: those of a later one are others than the first's."""
    dims = tuple(f"{dim}.{number}" if isinstance(dim, str) and dim and number else dim for dim in spec.dims)
    return replace(spec, name=tensor, dims=dims)


def _unify(number: int, spec: TensorSpec, tensor: TensorSpec, names: dict[str, str]) -> None:
    """Check an input against its tensor, and learn what the model's names of dimensions are called in the chain."""
    fits = len(spec.dims) == len(tensor.dims) and all(
        isinstance(ours, str) or isinstance(theirs, str) or ours == theirs
        for ours, theirs in zip(spec.dims, tensor.dims, strict=False)
    )
    if spec.datatype != tensor.datatype or not fits:
        raise ModelRefused(
            f"step {number}: input {spec.name!r} is {spec.datatype} {list(spec.shape)}, "
            f"but {tensor.name!r} is {tensor.datatype} {list(tensor.shape)}"
        )
    for ours, theirs in zip(spec.dims, tensor.dims, strict=True):
        if isinstance(ours, str) and ours and isinstance(theirs, str) and theirs:
            names.setdefault(ours, theirs)


def _renamed(spec: TensorSpec, names: Mapping[str, str]) -> tuple[int | str, ...]:
    """What is not of the chain's inputs is known only once it ran."""
    return tuple(dim if isinstance(dim, int) else names.get(dim, "") for dim in spec.dims)


class SequenceEngine:
    """Engines in turn; see `engines.base.Engine`."""

    platform = "ensemble"

    def __init__(self, wiring: Wiring, settings: RuntimeSettings) -> None:
        self.wiring = wiring
        self._settings = settings

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
            failed.pop_all()
        return SequenceExecutor(self, bound)

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
            failed.pop_all()
        return SequenceExecutor(self.engine, moved)

    @contextmanager
    def overriding(self, **changes: Any) -> Iterator[None]:
        overridden(RuntimeSettings(), changes)
        each: list[AbstractContextManager[None]] = [executor.overriding(**changes) for executor in self._executors]
        with ExitStack() as after:
            for one in each:
                after.enter_context(one)
            yield

    def describe(self) -> Mapping[str, object]:
        return {"graphs": "none", "why": "its models run in turn", "steps": [dict(each.describe()) for each in self._executors]}

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
