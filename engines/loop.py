"""A model that is run again and again with its own outputs as inputs, and answers with a part for each run.

That is how text is generated token by token, a series forecast step by step, or an image refined.
"""

from collections.abc import Iterator, Mapping

from .base import Engine
from .errors import ModelRefused, did_you_mean
from .memory import view
from .settings import Loop
from .signature import Signature, TensorSpec
from .stepwise import Model, Run, StepwiseEngine, Tensors

_MODEL = "model"


class LoopEngine(StepwiseEngine):
    """Runs one engine as `settings.Loop` says; see `engines.base.Engine`. It closes the engine with itself."""

    def __init__(self, engine: Engine, loop: Loop) -> None:
        """Raises ModelRefused for tensors that the engine does not have, and for an output that is no such input."""
        super().__init__(_model(loop), _signature(engine.signature, loop), {_MODEL: engine})
        self.platform, self.by_shape = engine.platform, engine.by_shape
        self._engine = engine

    @property
    def memory(self) -> Mapping[str, int]:
        """That of the engine, which is its own."""
        return self._engine.memory

    def close(self) -> None:
        self._engine.close()


def _model(loop: Loop) -> Model:
    def run_in_a_loop(inputs: Tensors, run: Run) -> Iterator[Tensors]:
        state = dict(inputs)
        for _ in range(loop.steps):
            outputs = run(_MODEL, state)
            yield {name: outputs[name] for name in loop.outputs} if loop.outputs else outputs
            if loop.until and any(view(outputs[loop.until].address, outputs[loop.until].nbytes)):
                return
            state |= {taken: outputs[given] for given, taken in loop.feed}

    return run_in_a_loop


def _signature(signature: Signature, loop: Loop) -> Signature:
    """The signature of an answer's parts. Raises ModelRefused."""
    inputs, outputs = ({spec.name: spec for spec in specs} for specs in (signature.inputs, signature.outputs))
    for given, taken in loop.feed:
        source, target = _find(outputs, "output", given), _find(inputs, "input", taken)
        if source.datatype != target.datatype or len(source.dims) != len(target.dims):
            raise ModelRefused(
                f"loop: output {given!r}, {source.datatype} {list(source.shape)}, cannot be input {taken!r}, which is "
                f"{target.datatype} {list(target.shape)}"
            )
    if loop.until and not _find(outputs, "output", loop.until).datatype.size:
        raise ModelRefused(f"loop: until is output {loop.until!r}, which is BYTES; expected numbers or BOOL")
    wanted = tuple(_find(outputs, "output", name) for name in loop.outputs) or signature.outputs
    return Signature(signature.inputs, wanted, signature.max_batch)


def _find(specs: dict[str, TensorSpec], what: str, name: str) -> TensorSpec:
    if name not in specs:
        known = list(specs)
        raise ModelRefused(f"loop: the model has no {what} {name!r}; {did_you_mean(name, known)}there are {', '.join(known)}")
    return specs[name]
