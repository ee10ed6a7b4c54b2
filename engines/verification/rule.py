"""When two answers to one question agree: errors, and how large they may be. Pure.

The error of an output is the largest over its rows of |answer - reference| / |reference|, with Euclidean norms over the row; a
row that is smaller than the root mean square of all rows counts as if it were as large. So an element near 0 may be off by
what rounding elsewhere in its row explains, and a single wrong row is seen.

Rounding to p bits of significand has the unit u = 2**-p: 24 bits for FP32, 11 for TF32 (10 are stored) and FP16, 8 for BF16.
Errors of independent roundings add up as their root mean square does, so a chain of L of them is off by some sqrt(L) u (Higham
and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41(5), 2019). A product of matrices
rounds its inputs to u, and adds up some 2**12 terms in FP32, which is 2**6 units of FP32 by the same rule. So the tolerance is
sqrt(LAYERS) * (MARGIN * u + SUMS * 2**6 * 2**-24), and never more than MOST: 0.02 for TF32. MARGIN is measured: right answers
of seven networks with TF32 were off by 0.0004 to 0.0054 on an H100 (2026-11-26), so the worst has a reserve of 3.7. Wrong ones
were off by 0.65 to 2.8, and those of an unsteady library by 0.002 to 150, of which `steady` has to find the small ones. FP16,
BF16 and INT8 have the same margin, and were not measured.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..datatypes import DataType
from ..signature import Shape, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

BITS = {"FP32": 24, "TF32": 11, "FP16": 11, "BF16": 8, "INT8": 7}
"""Bits of significand; of quantised networks, the bits of a step's number without its sign."""
MARGIN = 5
SUMS = 16
LAYERS = 64
"""Products of matrices after one another: no network is much deeper, and the root of it counts."""
MOST = 0.25
"""An answer that is off by more than a quarter is wrong whatever the datatype."""
FEW = 32
"""A discrete output of fewer elements is not judged where products are rounded: a near tie may flip one of them."""
MOST_PARTS = 8
"""Runs that the rows of one inference are divided into at most."""
_CHUNK = 1 << 20
"""Elements that are compared at a time, so that the memory for it is bounded."""


class Comparison(NamedTuple):
    """The output of two answers that disagrees most: its name, its error and the tolerance."""

    output: str
    error: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


def tolerance(precision: str) -> float:
    """The largest error that this precision, a key of BITS, explains."""
    unit = 2.0 ** -BITS[precision]
    return min(MOST, math.sqrt(LAYERS) * (MARGIN * unit + SUMS * 2.0 ** (6 - BITS["FP32"])))


def explained(sensitivity: float) -> float:
    """The error that rounding explains where rounding the inputs alone changes the answer by `sensitivity`: the tolerance, with
    that in place of u, as a network that magnifies one rounding does so with all.
    """
    return math.sqrt(LAYERS) * MARGIN * sensitivity


def other_rows(shapes: Sequence[Shape], most: int) -> list[tuple[Shape, ...]]:
    """With how many other rows to try, the better one first: a few more, then half of them and less, in several runs."""
    rows = shapes[0][0]
    more = [count for count in (rows + 1, rows + 2, 2 * rows) if count <= most]
    fewer = [-(-rows // parts) for parts in (2, 3, 4, rows) if 1 < parts <= MOST_PARTS]
    return [tuple((count, *shape[1:]) for shape in shapes) for count in dict.fromkeys((*more, *fewer)) if count != rows]


def coarsest(datatypes: Collection[str], rounds: bool) -> str:
    """The precision of a network with these datatypes; `rounds`: the library may round FP32 to TF32 in products."""
    found = [name for name in ("BF16", "INT8", "FP16") if name in datatypes]
    return min([*found, "TF32" if rounds else "FP32"], key=lambda name: BITS[name])


def compare(specs: Sequence[TensorSpec], reference: Sequence[Array], answer: Sequence[Array], precision: str) -> Comparison:
    """Compare two answers, an array for each output.

    An output of another shape, and a number that is finite in only one of the two, is an infinite error.
    """
    limit = tolerance(precision)
    found = [Comparison("", 0.0, limit)]
    for spec, ours, theirs in zip(specs, reference, answer, strict=True):
        if spec.datatype.kind == "float":
            found.append(Comparison(spec.name, row_error(numbers(spec.datatype, ours), numbers(spec.datatype, theirs)), limit))
        else:
            found.append(_discrete(spec.name, ours, theirs, limit))
    return max(found, key=lambda each: each.error / each.tolerance)


def row_error(reference: Array, answer: Array) -> float:
    """The error of an output of floats; see above. Infinite for other shapes, and for what is finite in only one of them."""
    if reference.shape != answer.shape:
        return math.inf
    if not reference.size:
        return 0.0
    rows = reference.shape[0] if reference.ndim else 1
    ours, theirs = reference.reshape(rows, -1), answer.reshape(rows, -1)
    norms, errors = np.zeros(rows), np.zeros(rows)
    step = max(1, _CHUNK // ours.shape[1])
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        finite = np.isfinite(ours[part])
        if not np.array_equal(ours[part][~finite], theirs[part][~finite]) or not np.isfinite(theirs[part][finite]).all():
            return math.inf
        exact = np.where(finite, ours[part], 0).astype(np.float64)
        off = np.where(finite, theirs[part], 0).astype(np.float64) - exact
        norms[part], errors[part] = np.sqrt((exact * exact).sum(1)), np.sqrt((off * off).sum(1))
    floor = max(math.sqrt(float((norms * norms).mean())), float(np.finfo(np.float32).tiny))
    return float((errors / np.maximum(norms, floor)).max())


def is_usable(specs: Sequence[TensorSpec], reference: Sequence[Array]) -> bool:
    """Whether a reference can decide anything: it has no NaN, and some number that is neither 0 nor infinite."""
    floats = [
        numbers(spec.datatype, each) for spec, each in zip(specs, reference, strict=True) if spec.datatype.kind == "float"
    ]
    return not any(np.isnan(each).any() for each in floats) and (
        not floats or any((np.isfinite(each) & (each != 0)).any() for each in floats)
    )


def numbers(datatype: DataType, array: Array) -> Array:
    """The floats of an array: BF16, which NumPy does not have, comes as its 16 bits."""
    return (array.astype(np.uint32) << 16).view(np.float32) if datatype.name == "BF16" else array


def encoded(datatype: DataType, found: Array) -> Array:
    """The array of this datatype whose `numbers` these floats are, but for what BF16 cuts off."""
    if datatype.name == "BF16":
        return (np.asarray(found, np.float32).view(np.uint32) >> 16).astype(datatype.numpy)
    return found.astype(datatype.numpy)


def _discrete(name: str, reference: Array, answer: Array, limit: float) -> Comparison:
    """Integers, booleans and texts: the share of the elements that differ."""
    if reference.shape != answer.shape:
        return Comparison(name, math.inf, limit)
    exact = limit < tolerance("TF32")
    if not reference.size or (reference.size < FEW and not exact):
        return Comparison(name, 0.0, limit)
    return Comparison(name, float((reference != answer).mean()), limit if exact else MOST)
