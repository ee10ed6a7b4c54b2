"""The classification extension: the highest values of an output in place of the output, as texts `value:index[:label]`.

As https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md has it. Of a model
that takes batches each row has classes of its own.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from engines import TensorSpec
from server.errors import BadRequest
from server.link.messages import Shape
from server.protocol.time_slices import Steps

from .json_tensors import Array

MOST_ELEMENTS = 1_000_000
"""Elements that one row of an output may have to be classified, as in Triton."""
MOST_TEXTS = 100_000
"""Texts of one output, which take some 20 MB and 0.1 s to make."""
_BLOCK = 1 << 15
"""Elements to look through at a time: about a millisecond."""
_TEXTS = 1 << 10
"""Texts to make at a time: about a millisecond."""


class Classes(NamedTuple):
    """An output classified: its shape as a BYTES tensor, and its elements."""

    shape: Shape
    texts: list[bytes]


class Labels:
    """What the classes of outputs are called, by the output's name: the contents of label files, a line a class, in UTF-8.

    They are split when they are first asked for, in the process that asks; what is pickled is the files.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._lines: dict[str, list[bytes]] = {}

    def __repr__(self) -> str:
        return f"<Labels of {', '.join(self._files) or 'nothing'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Labels, (self._files,)

    def of(self, output: str) -> Sequence[bytes]:
        """The label of each class, an empty one for none; shorter than the output where the file is."""
        if output not in self._files:
            return ()
        if output not in self._lines:
            self._lines[output] = [line.removesuffix(b"\r") for line in self._files[output].split(b"\n")]
        return self._lines[output]


UNLABELLED = Labels({})
"""Of a model whose classes have no names."""


def classify(
    spec: TensorSpec, data: memoryview, shape: Shape, count: int, batched: bool, labels: Sequence[bytes]
) -> Steps[Classes]:
    """The `count` highest values of each row, the highest first, of equals the one of the lower index, NaN last.

    Raises BadRequest for what is too much of either.
    """
    rows = shape[0] if batched else 1
    size = math.prod(shape[1:] if batched else shape)
    most = min(count, size)
    if size > MOST_ELEMENTS:
        raise BadRequest(f"output {spec.name!r}: {size} elements; at most {MOST_ELEMENTS} can be classified")
    if rows * most > MOST_TEXTS:
        raise BadRequest(f"output {spec.name!r}: {rows} times {most} classes; an answer has at most {MOST_TEXTS}")
    texts: list[bytes] = []
    due = 0
    for row in np.frombuffer(data, spec.datatype.numpy).reshape(rows, size):
        numbers = row if spec.datatype.name != "BF16" else (row.astype("<u4") << 16).view("<f4")
        values = np.where(np.isnan(numbers), -np.inf, numbers) if numbers.dtype.kind == "f" else numbers
        places = np.zeros(0, np.intp)
        for start in range(0, size, _BLOCK):
            block = np.arange(start, min(start + _BLOCK, size))
            places = _best(values, np.concatenate([places, block]), most)
            if (due := due + len(block)) >= _BLOCK:
                yield
                due = 0
        places = _sorted(values, places)
        for start in range(0, most, _TEXTS):
            part = places[start : start + _TEXTS]
            texts += _texts(numbers, part, labels)
            if (due := due + len(part) * (_BLOCK // _TEXTS)) >= _BLOCK:
                yield
                due = 0
    return Classes((rows, most) if batched else (most,), texts)


def _best(values: Array, places: Array, count: int) -> Array:
    """Of these places, which ascend, the `count` that have the highest values, ascending; of equals the first."""
    if len(places) <= count:
        return places
    found = values[places]
    last = np.partition(found, len(found) - count)[len(found) - count]
    above = places[found > last]
    equal = places[found == last][: count - len(above)]
    merged: Array = np.sort(np.concatenate([above, equal]))
    return merged


def _sorted(values: Array, places: Array) -> Array:
    """These places by their values, the highest first; of equals the first."""
    backwards = places[::-1]  # Sorted upwards and turned round, so that the first of equals stays the first.
    ordered: Array = backwards[np.argsort(values[backwards], kind="stable")][::-1]
    return ordered


def _texts(numbers: Array, places: Array, labels: Sequence[bytes]) -> list[bytes]:
    """As Triton writes them: floats with six digits."""
    form = b"%f:%d" if numbers.dtype.kind == "f" else b"%d:%d"
    found = []
    for value, place in zip(numbers[places].tolist(), places.tolist(), strict=True):
        text = form % (value, place)
        label = labels[place] if place < len(labels) else b""
        found.append(b"%b:%b" % (text, label) if label else text)
    return found
