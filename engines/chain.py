"""Several models that run one after another as one engine, an ensemble: outputs become inputs by the names of tensors.

On a GPU they are one graph, and the tensors in between stay on the device: see `engines.tensorrt.chain`. Elsewhere they run
one after another on the host.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from partitions import Partition

from .base import NO_ROOM, Engine, Executor, Room, Tensor, check_tensors
from .errors import ExecutionFailed, ModelRefused
from .in_turn import Bind, BoundTogether, WorkInTurn, bound, placed
from .memory import added
from .settings import RuntimeSettings
from .signature import Shape, Signature
from .warmup import blank, shape_sets, usual_shapes, warm_up_failed
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
    by_shape = False  # As a whole; each step is looked at by itself.

    def __init__(self, wiring: Wiring, settings: RuntimeSettings) -> None:
        self.wiring = wiring
        self._settings = settings
        asked = settings.warm_up if isinstance(settings.warm_up, tuple) else ()
        self.warm_up = shape_sets(asked, wiring.signature, usual_shapes(settings, wiring.signature.inputs))
        """Input shapes to run before an executor is bound, in addition to the warm-up of each step."""

    def __repr__(self) -> str:
        return f"<SequenceEngine of {list(self.wiring.engines)}>"

    @property
    def signature(self) -> Signature:
        return self.wiring.signature

    @property
    def memory(self) -> Mapping[str, int]:
        """Nothing: the engines belong to the caller."""
        return {}

    @property
    def executor_memory(self) -> Mapping[str, int]:
        return added(engine.executor_memory for engine in self.wiring.engines)

    def bind(self, partition: Partition) -> "SequenceExecutor":
        """Bind all steps or none. Raises ModelRefused."""
        if self._settings.graphs == "required":
            raise ModelRefused(f"graphs are required, but {self!r} runs its models in turn; leave graphs 'on'")
        with bound([engine.bind for engine in self.wiring.engines], partition) as executors:
            executor = SequenceExecutor(self, executors)
            self.make_ready(executor)
        return executor

    def make_ready(self, executor: "SequenceExecutor") -> None:
        """Run the warm-up. A model may refuse zeros, so a failure is only logged."""
        shapes: tuple[Shape, ...] = ()
        try:
            for shapes in self.warm_up:
                executor.enqueue([blank(*each) for each in zip(self.signature.inputs, shapes, strict=True)]).wait()
        except ExecutionFailed as error:
            log.warning("%r: %s", self, warm_up_failed(self.signature.inputs, shapes, error))

    def close(self) -> None:
        """Do nothing: the caller closes the engines."""


class SequenceExecutor(BoundTogether):
    """Runs executors one after another, in `Work.wait`; see `engines.base.Executor`."""

    def __init__(self, engine: SequenceEngine, executors: Sequence[Executor]) -> None:
        super().__init__(executors)
        self.engine = engine

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> "SequenceWork":
        if self.closed:
            raise ExecutionFailed(f"{self!r} takes nothing more; bind the engine again")
        check_tensors(self.engine.signature, inputs)
        self.engine.signature.check([tensor.shape for tensor in inputs])
        work = SequenceWork(self, tuple(inputs), room)
        self.turns.add(work)
        return work

    def rebind(self, partition: Partition) -> "SequenceExecutor":
        return self._bound([executor.rebind for executor in self.executors], partition)

    def alternate(self, partition: Partition) -> "SequenceExecutor":
        return self._bound([executor.alternate for executor in self.executors], partition)

    def _bound(self, binds: Iterable[Bind], partition: Partition) -> "SequenceExecutor":
        with bound(binds, partition) as executors:
            whole = SequenceExecutor(self.engine, executors)
            self.engine.make_ready(whole)
        return whole

    def describe(self) -> Mapping[str, object]:
        warm = [[list(shape) for shape in shapes] for shapes in self.engine.warm_up]
        return {"graphs": "none", "why": "its models run in turn", "shapes": warm, **self.describe_steps()}


class SequenceWork(WorkInTurn):
    """One inference of every step; see `engines.base.Work`."""

    def __init__(self, executor: SequenceExecutor, inputs: tuple[Tensor, ...], room: Room) -> None:
        super().__init__(executor.turns)
        self._call: tuple[SequenceExecutor, tuple[Tensor, ...], Room] | None = (executor, inputs, room)

    def compute(self) -> tuple[Tensor, ...]:
        call, self._call = self._call, None
        return self._compute(*call) if call else ()

    def _compute(self, executor: SequenceExecutor, inputs: tuple[Tensor, ...], room: Room) -> tuple[Tensor, ...]:
        wiring = executor.engine.wiring
        tensors = {spec.name: tensor for spec, tensor in zip(wiring.signature.inputs, inputs, strict=True)}
        for step, takes, gives in zip(executor.executors, wiring.takes, wiring.gives, strict=True):
            results = self.run_model(step, [tensors[name] for name in takes])
            tensors |= {name: tensor for name, tensor in zip(gives, results, strict=True) if name}
        found = [tensors[spec.name] for spec in wiring.signature.outputs]
        known = wiring.signature.output_shapes(wiring.signature.check([tensor.shape for tensor in inputs]))
        return tuple(placed(found, known, room))
