"""The p99 of latencies, how sure it is, and whether it keeps a target. Pure.

A p99 rests on the slowest hundredth, so it needs many requests; and where requests queue, slow ones come in groups, which
says less than as many that do not know of each other. The interval is the wider of two at 95 %: from the order of the values
(binomial), which assumes nothing but independence, and from redrawing contiguous blocks of them (bootstrap), which keeps groups
together.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

Word = Literal["keeps", "misses", "overloaded", "too noisy", "too few", "measured"]
"""Whether a share keeps its target; `measured` where there is none."""

LEAST = 500
"""Requests for a p99: five are slower than it."""

ROUND = 1000
"""Requests after which a p99 is first compared with its target; twice as many each time that it is not clear."""

_QUANTILE = 0.99
_Z = 1.96
_BLOCKS, _DRAWS = 20, 200


class P99(NamedTuple):
    """The p99 of so many requests (`requests`) in seconds, and the interval that it is in with 95 %."""

    value: float
    low: float
    high: float
    requests: int


def p99(latencies: Sequence[float]) -> P99:
    """Of latencies in the order in which the requests were due, at least one."""
    values = np.asarray(latencies, np.float64)
    ascending, count = np.sort(values), len(values)
    middle, spread = _QUANTILE * count, _Z * math.sqrt(count * _QUANTILE * (1 - _QUANTILE))
    low, high = (ascending[min(max(math.ceil(place) - 1, 0), count - 1)] for place in (middle - spread, middle + spread))
    value = ascending[max(0, math.ceil(middle) - 1)]
    if count >= LEAST:
        drawn = _redrawn(values)
        low, high = min(low, drawn[0]), max(high, drawn[1])
    return P99(float(value), float(low), float(high), count)


def judge(latencies: Sequence[float], target: float | None) -> Word:
    """Whether these latencies keep a target p99, so far as they show it."""
    if len(latencies) < LEAST:
        return "too few"
    if target is None:
        return "measured"
    found = p99(latencies)
    return "keeps" if found.high <= target else "misses" if found.low > target else "too noisy"


def tolerated(most: int) -> int:
    """How many of `most` requests may be slower than the target; with one more the p99 misses it, unless they came together."""
    allowed = (1 - _QUANTILE) * most
    return math.ceil(allowed + 3 * math.sqrt(allowed))


def _redrawn(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    """The interval of the p99 when blocks of the values are drawn again and again, by a fixed seed."""
    size = len(values) // _BLOCKS
    blocks = values[: size * _BLOCKS].reshape(_BLOCKS, size)
    chosen = np.random.default_rng(0).integers(0, _BLOCKS, (_DRAWS, _BLOCKS))
    place = max(0, math.ceil(_QUANTILE * size * _BLOCKS) - 1)
    found = [np.partition(blocks[draw].ravel(), place)[place] for draw in chosen]
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)
