"""How many times a percentile grew, and how sure that is: a bootstrap over rounds and over blocks of time in them.

Latencies that follow each other depend on each other: a stall delays all requests that were due during it. So whole blocks of
time are drawn again and not single requests, and whole rounds before them, with the phases of a round kept together, because
what changes slowly on a machine meets them alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .figures import Samples, percentile

BLOCK = 0.1
"""Seconds of a block: longer than what one stall delays, and short enough for several in a phase."""
DRAWS = 400
LEVEL = 0.95
"""The part of all draws that lies in the interval."""
Latencies = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and between which values it lies with a probability of LEVEL; NaN for unknown."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


UNKNOWN = Interval(math.nan, math.nan, math.nan)


def growth(before: Sequence[Samples], after: Sequence[Samples], quantile: float) -> Interval:
    """How many times larger a percentile is after than before: phases of the same rounds, in the same order.

    The estimate is of all rounds together; rounds in which one side has no request are left out. UNKNOWN where none is left.
    The same samples give the same interval.
    """
    rounds = [(blocks(a), blocks(b)) for a, b in _pairs(before, after)]
    if not rounds:
        return UNKNOWN
    sides = [[both[0] for both in rounds], [both[1] for both in rounds]]
    draw = np.random.default_rng(1)
    ratios = np.sort([_drawn(sides[0], sides[1], quantile, draw) for _ in range(DRAWS)])
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(grown(before, after, quantile), float(low), float(high))


def grown(before: Sequence[Samples], after: Sequence[Samples], quantile: float) -> float:
    """The estimate of `growth`, which takes much longer; NaN where no round is left."""
    sides = list(zip(*_pairs(before, after), strict=True))
    if not sides:
        return math.nan
    base, other = (percentile(np.sort(np.concatenate([each.latency for each in side])).tolist(), quantile) for side in sides)
    return other / base


def _pairs(before: Sequence[Samples], after: Sequence[Samples]) -> list[tuple[Samples, Samples]]:
    return [(a, b) for a, b in zip(before, after, strict=True) if len(a) and len(b)]


def blocks(samples: Samples) -> list[Latencies]:
    """The latencies of a phase by the block in which they were due; blocks without any are left out."""
    if not len(samples):
        return []
    due, latency = np.asarray(samples.due), np.asarray(samples.latency)
    numbers = ((due - due.min()) / BLOCK).astype(int)
    return [latency[numbers == number] for number in np.unique(numbers)]


def _drawn(before: list[list[Latencies]], after: list[list[Latencies]], quantile: float, draw: np.random.Generator) -> float:
    """The ratio for one draw of rounds, and of blocks in them."""
    turns = draw.integers(len(before), size=len(before))
    found = []
    for side in (before, after):
        every = [side[turn][index] for turn in turns for index in draw.integers(len(side[turn]), size=len(side[turn]))]
        whole = np.concatenate(every)
        place = max(0, math.ceil(quantile * len(whole)) - 1)
        found.append(float(np.partition(whole, place)[place]))
    return found[1] / found[0]


def later(before: Sequence[float], after: Sequence[float]) -> Interval:
    """By how much the median is larger after than before, of values that do not depend on each other. UNKNOWN of nothing."""
    if not (len(before) and len(after)):
        return UNKNOWN
    draw = np.random.default_rng(1)
    sides = [np.asarray(side)[draw.integers(len(side), size=(DRAWS, len(side)))] for side in (before, after)]
    drawn = np.median(sides[1], axis=1) - np.median(sides[0], axis=1)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(np.median(after) - np.median(before)), float(low), float(high))
