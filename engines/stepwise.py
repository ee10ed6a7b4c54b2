"""Models that answer in parts: a small Python model runs other engines step by step, and gives a part whenever it has one.

    def count(inputs, run):
        state = inputs
        for _ in range(10):
            outputs = run("step", state)
            yield {"y": outputs["y"]}
            state = {"x": outputs["y"]}

    engine = StepwiseEngine(count, Signature(inputs, outputs), {"step": load_engine("step.onnx")})
    for (y,) in parts(engine.bind(partition), [x]):
        ...

Between two parts the generator is suspended, and other inferences run. Its local variables are the state of the answer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from partitions import Partition

from .base import NO_ROOM, Engine, Executor, Room, Streaming, Tensor, Work, check_tensors
from .errors import Cancelled, ExecutionFailed, ModelRefused, did_you_mean
from .in_turn import BoundTogether, WorkInTurn, bound, placed
from .memory import added, view
from .settings import Loop
from .signature import Shape, Signature, TensorSpec

Tensors = Mapping[str, Tensor]
"""Tensors by the names of a model's inputs or outputs; BYTES in wire form."""


class Run(Protocol):
    """Runs one of a stepwise model's engines, on the partition that its answer is on now."""

    def __call__(self, name: str, inputs: Tensors) -> dict[str, Tensor]:
        """Run the engine of this name and return its outputs, which own their memory. Blocks.

        Raises ExecutionFailed, TensorMismatch, and Cancelled once the part is cancelled, which the model should not catch.
        """


END: Tensors = {}
"""In place of a part: the iterator has none left."""

Model = Callable[[Tensors, Run], Iterator[Tensors]]
"""Begins an answer: takes its inputs, which are copies, and yields the outputs of each part. The answer ends with the iterator.

It runs on a worker's thread, one part at a time and each perhaps on another thread. What it raises ends the answer. The server
calls it with the GIL, so it should leave what takes long to engines and NumPy.
"""


def parts(executor: Streaming, inputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The parts of an answer, each computed when it is asked for. Blocks and raises as `Work.wait` does."""
    part = executor.enqueue(inputs)
    while outputs := part.wait():
        yield outputs
        part = executor.proceed(part)


class StepwiseEngine:
    """A Python model, and the engines that it may run by their names; see `engines.base.Engine`.

    The caller keeps the engines, and closes them after this one.
    """

    platform = "python_stepwise"
    by_shape = False

    def __init__(self, model: Model, signature: Signature, engines: Mapping[str, Engine] | None = None) -> None:
        self.model = model
        self.signature = replace(signature, in_parts=True)
        self.engines = dict(engines or {})

    def __repr__(self) -> str:
        return f"<StepwiseEngine {getattr(self.model, '__name__', self.model)} of {list(self.engines)}>"

    @property
    def memory(self) -> Mapping[str, int]:
        """Nothing: the engines belong to the caller."""
        return {}

    @property
    def executor_memory(self) -> Mapping[str, int]:
        return added(engine.executor_memory for engine in self.engines.values())

    def bind(self, partition: Partition) -> "StepwiseExecutor":
        """Bind all engines or none. The model itself is not run before the first request. Raises ModelRefused."""
        with bound([engine.bind for engine in self.engines.values()], partition) as executors:
            return StepwiseExecutor(self, executors)

    def close(self) -> None:
        """Do nothing: the caller closes the engines."""


class StepwiseExecutor(BoundTogether):
    """Runs a Python model in `Work.wait`; see `engines.base.Streaming`."""

    def __init__(self, engine: StepwiseEngine, executors: Sequence[Executor]) -> None:
        super().__init__(executors)
        self.engine = engine
        self.by_name = dict(zip(engine.engines, executors, strict=True))

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> "StepwiseWork":
        signature = self.engine.signature
        self._check_open()
        check_tensors(signature, inputs)
        sizes = signature.check([tensor.shape for tensor in inputs])
        named = {spec.name: tensor for spec, tensor in zip(signature.inputs, inputs, strict=True)}
        return self._add(StepwiseWork(self, StepwiseAnswer(self.engine, named, signature.output_shapes(sizes)), room))

    def proceed(self, part: Work, room: Room = NO_ROOM) -> "StepwiseWork":
        self._check_open()
        answer = part.take_answer() if isinstance(part, StepwiseWork) else None
        if answer is None or answer.engine is not self.engine:
            raise ExecutionFailed(f"{self!r} cannot go on from {part!r}; expected the last part of an answer that goes on")
        return self._add(StepwiseWork(self, answer, room))

    def rebind(self, partition: Partition) -> "StepwiseExecutor":
        with bound([executor.rebind for executor in self.executors], partition) as moved:
            return StepwiseExecutor(self.engine, moved)

    def alternate(self, partition: Partition) -> "StepwiseExecutor":
        with bound([executor.alternate for executor in self.executors], partition) as others:
            return StepwiseExecutor(self.engine, others)

    def describe(self) -> Mapping[str, object]:
        return {"graphs": "none", "why": "a Python model runs it step by step", **self.describe_steps()}

    def _add(self, work: "StepwiseWork") -> "StepwiseWork":
        self.turns.add(work)
        return work

    def _check_open(self) -> None:
        if self.closed:
            raise ExecutionFailed(f"{self!r} takes nothing more; bind the engine again")


class StepwiseAnswer:
    """An answer from its first part to its last: the iterator of the model, and what its next part is to be like."""

    def __init__(self, engine: StepwiseEngine, inputs: Tensors, shapes: Sequence[Shape | None]) -> None:
        self.engine = engine
        self.count = 0
        self._inputs: Tensors | None = inputs
        self._shapes = shapes
        self._running = Running()
        self._parts: Iterator[Tensors] | None = None

    def next_part(self, work: "StepwiseWork", executor: StepwiseExecutor, room: Room) -> tuple[Tensor, ...]:
        """The next part; () at the end. Raises ExecutionFailed, or Cancelled if `work` is cancelled. Blocks."""
        self._running.begin(work, executor)
        try:
            if self._parts is None:
                inputs, self._inputs = self._inputs or {}, None
                copies = {name: copied(tensor) for name, tensor in inputs.items()}
                self._parts = iter(self.engine.model(copies, self._running))
            if (part := next(self._parts, END)) is END:
                return ()
            self.count += 1
            return tuple(placed(self._outputs(part), self._shapes, room))
        except Exception as error:
            if work.cancelled:
                raise Cancelled(f"cancelled in part {self.count + 1}") from error
            if isinstance(error, ExecutionFailed):
                raise
            raise ExecutionFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._running.end()

    def _outputs(self, part: Tensors) -> list[Tensor]:
        """A part's tensors in the order of the signature. Raises ExecutionFailed for a part that does not match it."""
        if not isinstance(part, Mapping):
            came = f"is a {type(part).__name__}; expected its outputs by their names"
            raise ExecutionFailed(f"part {self.count} of the model's answer {came}")
        return [self._output(spec, part.get(spec.name)) for spec in self.engine.signature.outputs]

    def _output(self, spec: TensorSpec, tensor: Tensor | None) -> Tensor:
        there = f"part {self.count} of the model's answer"
        if tensor is None:
            raise ExecutionFailed(f"{there} has no output {spec.name!r}")
        if not isinstance(tensor, Tensor):
            raise ExecutionFailed(f"{there}: output {spec.name!r} is a {type(tensor).__name__}; expected an engines.Tensor")
        if spec.datatype.size and tensor.nbytes != spec.nbytes(tensor.shape):
            expected = f"expected {spec.nbytes(tensor.shape)}"
            raise ExecutionFailed(
                f"{there}: output {spec.name!r} has {tensor.nbytes} bytes for shape {list(tensor.shape)} of "
                f"{spec.datatype}; {expected}"
            )
        return tensor


class Running:
    """Runs the engines of an answer, where the work of its current part has them; see `Run`.

    The model's iterator refers to this and not to the answer, which has the iterator: a cycle would only be freed by the
    garbage collector, and with it everything that the model keeps.
    """

    def __init__(self) -> None:
        self._work: StepwiseWork | None = None
        self._executors: Mapping[str, Executor] = {}

    def begin(self, work: "StepwiseWork", executor: StepwiseExecutor) -> None:
        """A part begins, on this executor."""
        self._work, self._executors = work, executor.by_name

    def end(self) -> None:
        """The part has ended."""
        self._work, self._executors = None, {}

    def __call__(self, name: str, inputs: Tensors) -> dict[str, Tensor]:
        if self._work is None:
            raise ExecutionFailed(f"engine {name!r} was run between two parts; run engines only while a part is asked for")
        if (executor := self._executors.get(name)) is None:
            raise ExecutionFailed(f"there is no engine {name!r}; expected one of {list(self._executors)}")
        signature = executor.engine.signature
        if missing := [spec.name for spec in signature.inputs if spec.name not in inputs]:
            raise ExecutionFailed(f"engine {name!r} needs an input {missing[0]!r}; given are {list(inputs)}")
        outputs = self._work.run_model(executor, [inputs[spec.name] for spec in signature.inputs])
        return {spec.name: tensor for spec, tensor in zip(signature.outputs, outputs, strict=True)}


class StepwiseWork(WorkInTurn):
    """One part of an answer; see `engines.base.Work`."""

    def __init__(self, executor: StepwiseExecutor, answer: StepwiseAnswer, room: Room) -> None:
        super().__init__(executor.turns)
        self._call: tuple[StepwiseExecutor, Room] | None = (executor, room)
        self._answer: StepwiseAnswer | None = answer

    def take_answer(self) -> StepwiseAnswer | None:
        """The answer, to go on with it: once, and None unless this part has ended with outputs."""
        if not (self.ended and self._outputs):
            return None
        answer, self._answer = self._answer, None
        return answer

    def compute(self) -> tuple[Tensor, ...]:
        call, self._call = self._call, None
        if self.cancelled:
            raise Cancelled("cancelled before it began")
        outputs = self._answer.next_part(self, *call) if call and self._answer else ()
        if self.cancelled:
            raise Cancelled("cancelled while it ran")
        return outputs

    def run(self) -> None:
        super().run()
        if not self._outputs:
            self._answer = None  # Frees what the model keeps.


def copied(tensor: Tensor) -> Tensor:
    """A copy in memory of its own."""
    data = np.frombuffer(bytearray(view(tensor.address, tensor.nbytes)), np.uint8)
    return Tensor(tensor.shape, data.ctypes.data, tensor.nbytes, data)


_MODEL = "model"


class LoopEngine(StepwiseEngine):
    """Runs one engine as `settings.Loop` says, with its own outputs as inputs, and answers with a part for each run: so text is
    generated token by token, or a series forecast step by step. It closes the engine with itself. See `engines.base.Engine`.
    """

    def __init__(self, engine: Engine, loop: Loop) -> None:
        """Raises ModelRefused for tensors that the engine does not have, and for an output that is no such input."""
        super().__init__(_loop_model(loop), _loop_signature(engine.signature, loop), {_MODEL: engine})
        self.platform, self.by_shape = engine.platform, engine.by_shape
        self._engine = engine

    @property
    def memory(self) -> Mapping[str, int]:
        """That of the engine, which is its own."""
        return self._engine.memory

    def close(self) -> None:
        self._engine.close()


def _loop_model(loop: Loop) -> Model:
    def run_in_a_loop(inputs: Tensors, run: Run) -> Iterator[Tensors]:
        state = dict(inputs)
        for _ in range(loop.steps):
            outputs = run(_MODEL, state)
            yield {name: outputs[name] for name in loop.outputs} if loop.outputs else outputs
            if loop.until and any(view(outputs[loop.until].address, outputs[loop.until].nbytes)):
                return
            state |= {taken: outputs[given] for given, taken in loop.feed}

    return run_in_a_loop


def _loop_signature(signature: Signature, loop: Loop) -> Signature:
    """The signature of an answer's parts. Raises ModelRefused."""
    inputs, outputs = ({spec.name: spec for spec in specs} for specs in (signature.inputs, signature.outputs))
    for given, taken in loop.feed:
        source, target = _tensor(outputs, "output", given), _tensor(inputs, "input", taken)
        if source.datatype != target.datatype or len(source.dims) != len(target.dims):
            raise ModelRefused(
                f"loop: output {given!r}, {source.datatype} {list(source.shape)}, cannot be input {taken!r}, which is "
                f"{target.datatype} {list(target.shape)}"
            )
    if loop.until and not _tensor(outputs, "output", loop.until).datatype.size:
        raise ModelRefused(f"loop: until is output {loop.until!r}, which is BYTES; expected numbers or BOOL")
    wanted = tuple(_tensor(outputs, "output", name) for name in loop.outputs) or signature.outputs
    return Signature(signature.inputs, wanted, signature.max_batch)


def _tensor(specs: dict[str, TensorSpec], what: str, name: str) -> TensorSpec:
    if name not in specs:
        known = list(specs)
        raise ModelRefused(f"loop: the model has no {what} {name!r}; {did_you_mean(name, known)}there are {', '.join(known)}")
    return specs[name]
