"""The classification extension: answers with the highest values of an output, as strings `value:index[:label]`.

See https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md. For a model with a
batch dimension, each row is classified separately.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engines import TensorSpec

from ..errors import BadRequest
from ..link.messages import Shape
from .json_tensors import Array
from .time_slices import Steps

MAX_ELEMENTS = 1_000_000
"""Elements of one row that can be classified at most, as in Triton."""
MAX_TEXTS = 100_000
"""Classes of one output at most; as many strings take about 20 MB and 0.1 s."""
_BLOCK = 1 << 15
"""Elements searched per time slice: about a millisecond."""
_TEXTS = 1 << 10
"""Strings made per time slice: about a millisecond."""


class Classes(NamedTuple):
    """The result for one output: its shape as a BYTES tensor, and the elements."""

    shape: Shape
    texts: list[bytes]


class Labels:
    """The names of classes by output: the contents of label files in UTF-8, one line per class.

    A file is split on its first use.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self._lines: dict[str, list[bytes]] = {}

    def __repr__(self) -> str:
        return f"<Labels of {', '.join(self.files) or 'nothing'}>"

    def of(self, output: str) -> Sequence[bytes]:
        """The label of each class, empty for a class without one; may be shorter than the output."""
        if output not in self.files:
            return ()
        if output not in self._lines:
            self._lines[output] = [line.removesuffix(b"\r") for line in self.files[output].split(b"\n")]
        return self._lines[output]


UNLABELLED = Labels({})
"""For a model without label files."""


def classify(
    spec: TensorSpec, data: memoryview, shape: Shape, count: int, batched: bool, labels: Sequence[bytes]
) -> Steps[Classes]:
    """The `count` highest values of each row in descending order, equal values by ascending index, NaN last.

    Yields about once a millisecond. Raises BadRequest if the row or the result is too large.
    """
    rows = shape[0] if batched else 1
    size = math.prod(shape[1:] if batched else shape)
    most = min(count, size)
    if size > MAX_ELEMENTS:
        raise BadRequest(f"output {spec.name!r}: {size} elements; at most {MAX_ELEMENTS} can be classified")
    if rows * most > MAX_TEXTS:
        raise BadRequest(f"output {spec.name!r}: {rows} times {most} classes; an answer has at most {MAX_TEXTS}")
    texts: list[bytes] = []
    due = 0
    for row in np.frombuffer(data, spec.datatype.numpy).reshape(rows, size):
        numbers = row if spec.datatype.name != "BF16" else (row.astype("<u4") << 16).view("<f4")
        keys = -numbers if numbers.dtype.kind == "f" else ~numbers  # Ascending in the order of the answer, with NaN last.
        indices = np.zeros(0, np.intp)
        for start in range(0, size, _BLOCK):
            block = np.arange(start, min(start + _BLOCK, size))
            indices = _best(keys, np.concatenate([indices, block]), most)
            if (due := due + len(block)) >= _BLOCK:
                yield
                due = 0
        indices = indices[np.argsort(keys[indices], kind="stable")]
        for start in range(0, most, _TEXTS):
            chunk = indices[start : start + _TEXTS]
            texts += _texts(numbers, chunk, labels)
            if (due := due + len(chunk) * (_BLOCK // _TEXTS)) >= _BLOCK:
                yield
                due = 0
    return Classes((rows, most) if batched else (most,), texts)


def _best(keys: Array, indices: Array, count: int) -> Array:
    """The `count` of these ascending indices with the lowest keys, ascending; of equal keys the lower indices."""
    if len(indices) <= count:
        return indices
    found = keys[indices]
    last = np.partition(found, count - 1)[count - 1]
    before, equal = (found < last, found == last) if last == last else (found == found, found != found)  # NaN is no number.
    merged: Array = np.sort(np.concatenate([indices[before], indices[equal][: count - before.sum()]]))
    return merged


def _texts(numbers: Array, indices: Array, labels: Sequence[bytes]) -> list[bytes]:
    """Strings in Triton's format: floats have six digits."""
    form = b"%f:%d" if numbers.dtype.kind == "f" else b"%d:%d"
    found = []
    for value, index in zip(numbers[indices].tolist(), indices.tolist(), strict=True):
        text = form % (value, index)
        label = labels[index] if index < len(labels) else b""
        found.append(b"%b:%b" % (text, label) if label else text)
    return found
