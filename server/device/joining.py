"""Whether requests for a model may be joined: two random rows were run alone and together, and got the same answers."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from engines import Executor, RuntimeSettings, Signature, TensorMismatch
from engines.model_files.onnx_file import index_bounds, precisions
from engines.signature import Shape
from engines.verification.rows import dependence, run_on
from engines.verification.rule import coarsest
from engines.warmup import usual_shapes
from partitions import Partition
from partitions.regular_file import open_regular

_SIZE = 16
"""Tried for sizes that vary and of which nothing is known: with 1, as in a warm-up, many operations do nothing."""


class Rows(NamedTuple):
    """What was found of a model's rows: how they depend on each other, "" if they do not, and why that is not known."""

    depend: str = ""
    unknown: str = ""

    def described(self) -> str:
        """In a word or a sentence, for `greenlane.execution`."""
        return (
            f"depend on each other: {self.depend}"
            if self.depend
            else f"unknown: {self.unknown}"
            if self.unknown
            else "separate"
        )

    def why_not(self, required: bool) -> str:
        """Why requests are not joined; "" if they may be. `required`: they may not be where nothing is known."""
        if self.depend:
            why = f"its rows depend on each other: {self.depend}"
        elif self.unknown and required:
            why = f"whether its rows depend on each other is not known: {self.unknown}; verify is required"
        else:
            return ""
        return f"requests are not joined into batches: {why}"


UNSEEN = Rows()
"""Of a model that was not looked at, or whose rows are separate."""


def look(executor: Executor, partition: Partition, signature: Signature, settings: RuntimeSettings, onnx: Path | None) -> Rows:
    """Run two rows on the executor. Blocks for five runs, or some more where a model refuses the first inputs.

    `signature` is the model's with its largest batch, `onnx` its file, if it has one: that says which integers it takes and
    how precise it is.
    """
    if getattr(executor.engine, "endless", False):
        return Rows(unknown="its warm-up did not end")
    data = b""
    try:
        if onnx:
            with open_regular(onnx) as file:
                data = file.read()
    except OSError as error:
        return Rows(unknown=str(error.strerror))
    by_shape = executor.engine.by_shape
    precision = coarsest(precisions(data), rounds=by_shape or not onnx)
    bounds = index_bounds(data)
    if not onnx and partition.host_cores is None:  # An index may be made of floats, and a GPU does not check it.
        bounds = {spec.name: 1 for spec in signature.inputs if spec.datatype.kind == "float"}
    found = Rows(unknown="there are no shapes to try it with")
    run = partial(run_on, executor, seconds=settings.trial_limit)
    for shapes in _tries(executor, signature, settings):
        found = Rows(*partition.run(partial(dependence, run, signature, shapes, precision, bounds)))
        if not found.unknown:
            break
    if found != UNSEEN and by_shape and not onnx:
        for other in _other_sizes(signature, shapes):
            again = Rows(*partition.run(partial(dependence, run, signature, other, precision, bounds)))
            if again == UNSEEN:
                return again
            found = again if again.depend else found
    return found


def _other_sizes(signature: Signature, shapes: Sequence[Shape]) -> Iterator[Sequence[Shape]]:
    """Shapes of one row with other sizes of what varies beside the rows, larger and smaller by one, if the engine takes them.

    A shape that a library answers wrongly seems to have rows that depend on each other; with no reference it is not known to be
    wrong. Rows that do depend on each other do so at every size.
    """
    for step in (1, -1):
        other = [
            (1, *(size + step * isinstance(dim, str) for size, dim in zip(shape[1:], spec.dims[1:], strict=True)))
            for spec, shape in zip(signature.inputs, shapes, strict=True)
        ]
        if other != [(1, *shape[1:]) for shape in shapes] and _is_taken(signature, other):
            yield other


def _is_taken(signature: Signature, shapes: Sequence[Shape]) -> bool:
    try:
        signature.check(shapes)
    except TensorMismatch:
        return False
    return all(size > 1 for shape in shapes for size in shape[1:])


def _tries(executor: Executor, signature: Signature, settings: RuntimeSettings) -> Iterator[Sequence[Shape]]:
    """Shapes of one row; where others would have to be made ready first, of sizes that are."""
    ready = executor.describe().get("shapes")
    sets = [each for each in ready if each] if isinstance(ready, list) else []
    several = [each for each in sets if each[0][0] > 1]
    shapes = [tuple(shape) for shape in (several or sets or [usual_shapes(settings, signature.inputs)])[0]]
    if not executor.engine.by_shape:
        grown = [
            tuple(_SIZE if size == 1 and isinstance(dim, str) else size for size, dim in zip(shape, spec.dims, strict=True))
            for spec, shape in zip(signature.inputs, shapes, strict=True)
        ]
        if [shape[1:] for shape in grown] != [shape[1:] for shape in shapes]:
            yield [(1, *shape[1:]) for shape in grown]
    yield [(1, *shape[1:]) for shape in shapes]
