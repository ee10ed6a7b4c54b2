"""Whether the rows of a batch depend on each other: found by running two random rows alone and together."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from ..base import Executor, Tensor, wait_within
from ..errors import EngineError
from ..memory import view
from ..signature import Shape, Signature, TensorSpec
from ..wire import unpack
from .rule import Comparison, compare, encoded, is_usable, numbers
from .samples import ATTEMPTS, draw

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[[Sequence[Array]], list[Array]]

LARGE = 1000.0
"""How many times as large as a row the one beside it is, in the second try: FP16 has room for that."""
LONGEST = 5.0
"""Seconds after which no further run is begun: a load is not to take much longer for it."""


class Answering(Executor, Protocol):
    """An executor that takes inputs from anywhere without pinning memory. Others need not have the method."""

    def answer(self, inputs: Sequence[Array]) -> list[Array]:
        """Run one inference and return copies of its outputs. Blocks. Raises EngineError."""


def run_on(executor: Executor, inputs: Sequence[Array], seconds: float | None = None) -> list[Array]:
    """Run one inference, or the first part of an answer, and return copies of its outputs. Blocks. Raises EngineError.

    It is stopped after so many seconds, where that is not None, and where the library can do that. Call it on a thread that is
    attached to the executor's partition.
    """
    asked: Run | None = getattr(executor, "answer", None)
    if asked is not None:
        return asked(inputs)
    outputs = wait_within(executor.enqueue([Tensor.of(each) for each in inputs]), seconds)
    specs = executor.engine.signature.outputs
    return [_array(spec, tensor) for spec, tensor in zip(specs, outputs, strict=True)]


def _array(spec: TensorSpec, tensor: Tensor) -> Array:
    """A copy of a tensor on the host; BYTES as an array of bytes objects."""
    if spec.datatype.size:
        return tensor.array(spec.datatype)
    elements = np.empty(math.prod(tensor.shape), object)
    elements[:] = unpack(view(tensor.address, tensor.nbytes), elements.size)
    return elements.reshape(tensor.shape)


def stop_padding(executor: Executor) -> None:
    """Have it never run more rows than an inference has, where it would (`RuntimeSettings.batch_padding`)."""
    stop: Callable[[], None] | None = getattr(executor, "stop_padding", None)
    if stop is not None:
        stop()


def dependence(
    run: Run, signature: Signature, shapes: Sequence[Shape], precision: str, bounds: Mapping[str, int], seed: int = 0
) -> tuple[str, str]:
    """How rows depend on each other, "" if they do not; and why that is not known, "" if it is.

    `shapes` are those of one row, `bounds` as for `draw`: floats that have one are not enlarged, as an index may be made of
    them, and a GPU does not check it. Blocks for five runs. No error is raised.
    """
    unknown, limited = "", _Limited(run)
    for attempt in range(ATTEMPTS):
        try:
            inputs = draw(signature.inputs, [(2, *shape[1:]) for shape in shapes], bounds, seed, attempt)
            return _dependence(limited, signature, inputs, precision, bounds)
        except _TooLong as error:
            return "", str(error)
        except (EngineError, _Unknown) as error:
            unknown = str(error)
    return "", unknown


class _Unknown(Exception):
    """These inputs decide nothing; the text says why."""


class _TooLong(Exception):
    """The model takes too long to be looked at; the text says how long."""


class _Limited:
    """Runs, of which none is begun after one that took too long, also if that one failed."""

    def __init__(self, run: Run) -> None:
        self.unlimited = run
        self._longest = 0.0

    def __call__(self, inputs: Sequence[Array]) -> list[Array]:
        if self._longest > LONGEST:
            raise _TooLong(f"one run took {self._longest:.1f} s")
        began = time.monotonic()
        try:
            return self.unlimited(inputs)
        finally:
            self._longest = max(self._longest, time.monotonic() - began)


def _dependence(
    run: _Limited, signature: Signature, inputs: Sequence[Array], precision: str, bounds: Mapping[str, int]
) -> tuple[str, str]:
    rows: list[list[Array]] = [[each[row : row + 1] for each in inputs] for row in range(2)]
    first, second, together = run(rows[0]), run(rows[1]), run(inputs)
    if odd := [spec.name for spec, each in zip(signature.outputs, together, strict=True) if each.shape[:1] != (2,)]:
        return f"output {odd[0]!r} of two rows has not two", ""
    if any(one.shape[1:] != each.shape[1:] for row in (first, second) for one, each in zip(row, together, strict=True)):
        return "the shape of a row's answer depends on the rows beside it", ""
    alone = [np.concatenate(each) for each in zip(first, second, strict=True)]
    if not (is_usable(signature.outputs, alone) or is_usable(signature.outputs, together)):
        raise _Unknown("its answers to random inputs are not finite, or all 0")
    found = compare(signature.outputs, together, alone, precision)
    if found.agrees:
        found = _beside_large(run, signature, inputs, alone, precision, bounds)
        beside = f"one {LARGE:g} times as large"
    elif not compare(signature.outputs, first, run.unlimited(rows[0]), precision).agrees:
        return "answers to the same inputs differ from run to run", ""
    else:
        beside = "another"
    if found.agrees:
        return "", ""
    text = f"output {found.output!r} of a row beside {beside} is off by {found.error:.2g} from that of the row alone"
    return f"{text} (tolerance {found.tolerance:.2g})", ""


def _beside_large(
    run: Run, signature: Signature, inputs: Sequence[Array], alone: Sequence[Array], precision: str, bounds: Mapping[str, int]
) -> Comparison:
    """How the answer to the first row differs beside a much larger row, above and below 0, from that of the row alone.

    All rows may be divided by the range of all, or have their largest number subtracted, which similar rows do not show.
    `alone` are the answers to both rows alone, since a small row's error is judged by the size of all (`rule`).
    """
    found = compare(signature.outputs, alone, alone, precision)
    enlarged = [spec.datatype.kind == "float" and spec.name not in bounds for spec in signature.inputs]
    for factor in (LARGE, -LARGE) if any(enlarged) else ():
        large = [
            encoded(spec.datatype, numbers(spec.datatype, each[1:]) * factor) if is_enlarged else each[1:]
            for spec, each, is_enlarged in zip(signature.inputs, inputs, enlarged, strict=True)
        ]
        with suppress(EngineError):
            together = run([np.concatenate([each[:1], more]) for each, more in zip(inputs, large, strict=True)])
            pairs = zip(alone, together, strict=True)
            both = [np.concatenate([each[:1], one[1:]]) if each.shape == one.shape else each for one, each in pairs]
            beside = compare(signature.outputs, alone, both, precision)
            found = max(found, beside, key=lambda each: each.error / each.tolerance)
        if not found.agrees:
            break
    return found
