"""Whether an engine answers the same inputs alike, and rightly each time: found by running it several times in a row.

TensorRT-RTX 1.6.1 without auxiliary streams answered a ResNet-50 rightly once or twice, and then wrongly in 4 to 24 of 24 runs
(H100, 2026-11-26). Right shapes answered with the same bits each time.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from ..signature import TensorSpec
from .rule import Comparison, compare

Array = np.ndarray[Any, np.dtype[Any]]
Repeat = Callable[[Sequence[Array]], Generator[list[Array], None, None]]
"""Runs an engine on inputs again and again, back to back, and yields a copy of the outputs of each run."""

RUNS = 16
"""What goes wrong in one of five runs is missed by 3 of 100 tries, and what does in one of ten by 20."""
LEAST = 3
"""Runs of a slow model: the first was right by itself in most cases."""
SECONDS = 0.25
"""For the runs after the first, which may compile: as long as it takes to compile a shape. A tenant's own requests share its
SMs meanwhile, or wait where shapes cannot be prepared in the background.
"""
PART = 8
"""Answers to the same inputs may differ by this part of the tolerance, 0.0025 for TF32: sums in another order, which atomics
make, round in FP32, and so by far less than products do.
"""


class Repeated(NamedTuple):
    """The answers of several runs: `found` is the one that the reference disagrees with most, None without a reference, and
    `spread` the one that the first disagrees with most.
    """

    runs: int
    found: Comparison | None
    spread: Comparison

    @property
    def steady(self) -> bool:
        """Whether the same inputs have the same answer, but for rounding."""
        return self.spread.error <= self.spread.tolerance / PART

    def why_not(self) -> str:
        """How answers differ, as a text."""
        most = self.spread.tolerance / PART
        how = f"differs by {self.spread.error:.2g} in {self.runs} runs of the same inputs (at most {most:.2g})"
        return f"output {self.spread.output!r} is unsteady: it {how}"


def repeated(
    repeat: Repeat, inputs: Sequence[Array], specs: Sequence[TensorSpec], reference: Sequence[Array] | None, precision: str
) -> Repeated:
    """Run so often as above, and compare every answer. Blocks. Raises what `repeat` raises."""
    first: list[Array] = []
    found, spread = None, Comparison("", 0.0, 1.0)
    runs, began = 0, 0.0
    with closing(repeat(inputs)) as answers:
        for answer in answers:
            runs += 1
            if runs == 1:
                first, began = answer, time.monotonic()
                spread = compare(specs, first, first, precision)._replace(output="", error=0.0)
                found = compare(specs, reference, first, precision) if reference is not None else None
            elif not all(map(_same, first, answer)):
                spread = _worse(spread, compare(specs, first, answer, precision))
                found = _worse(found, compare(specs, reference, answer, precision)) if found and reference is not None else None
            if runs >= RUNS or (runs >= LEAST and time.monotonic() - began > SECONDS):
                break
    return Repeated(runs, found, spread)


def _worse(one: Comparison, other: Comparison) -> Comparison:
    return max(one, other, key=lambda each: each.error / each.tolerance)


def _same(one: Array, other: Array) -> bool:
    """Whether they are the same bits, or the same texts."""
    if one.shape != other.shape or one.dtype == object:
        return np.array_equal(one, other)
    return np.array_equal(_bits(one), _bits(other))


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
