"""What was measured on each share, the knee of the curve, and the smallest share that keeps a target. Pure.

A p99 rests on the slowest hundredth, so it needs many requests. Where requests queue, slow ones come in groups, and a group
says less than as many independent requests. The interval is the wider of two at 95 %: from the order of the values (binomial),
which assumes nothing but independence, and from redrawing contiguous blocks of them (bootstrap), which keeps groups together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from server.accounts.usage import Moved

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


LESS = 0.1
"""The knee is where no larger share has more than this part more throughput."""


@dataclass(frozen=True, slots=True)
class AtRate:
    """Requests that were due at a rate: how many, their median in seconds and p99, and whether they keep the target."""

    rate: float
    word: Word
    p50: float = 0.0
    p99: P99 | None = None


class Drawn(NamedTuple):
    """What requests back to back drew: `moved` are bytes of one, `rates` bytes a second of all, by the GPU's own counters.

    `memory` and `pcie` are the parts of what the GPU moves at most, as the keys `memory_bandwidth` and `pcie` count them: of
    PCIe the way that was used more, and 0 where its most is not known.
    """

    moved: Moved
    rates: Moved
    memory: float
    pcie: float


@dataclass(frozen=True, slots=True)
class Point:
    """A share of so many granules, `size` units together.

    `throughput` is requests a second, back to back; `p50` and `p99` are seconds of one alone, without a queue. `drawn` is None
    where it was not asked for.
    """

    granules: int
    size: int
    throughput: float
    p50: float
    p99: float
    at_rate: AtRate | None = None
    drawn: Drawn | None = None


def disturbed(point: Point) -> bool:
    """Whether something else used the share: one request alone took much longer now and then, without a queue."""
    return point.p99 > 3 * point.p50 and point.p99 - point.p50 > 0.002


def knee(points: Sequence[Point]) -> Point | None:
    """The smallest share whose throughput no larger one exceeds by more than LESS; None if that is the largest, of several.

    Points are in ascending order of their shares.
    """
    for index, point in enumerate(points):
        if all(other.throughput <= point.throughput * (1 + LESS) for other in points[index + 1 :]):
            return point if index + 1 < len(points) or len(points) == 1 else None
    return None


def smallest(points: Sequence[Point]) -> Point | None:
    """The smallest share that keeps its target."""
    return min((point for point in points if keeps(point)), key=lambda point: point.granules, default=None)


def keeps(point: Point) -> bool:
    """Whether a share keeps its target."""
    return point.at_rate is not None and point.at_rate.word == "keeps"


def best(points: Sequence[Point]) -> Point | None:
    """The share with the lowest p99 at the rate, of those that were not overloaded."""
    there = [(point.at_rate.p99.value, point) for point in points if point.at_rate and point.at_rate.p99]
    return min(there, key=lambda pair: pair[0])[1] if there else None


def candidate(known: Mapping[int, bool], most: int) -> int | None:
    """The share to measure next; None once the smallest of 1 to `most` that keeps the target is known, or that none does.

    `known` says of the shares that were measured whether they do. To need few of them, shares are doubled until one keeps the
    target, then the gap is halved: what a share keeps, larger shares are taken to keep too.
    """
    kept = min((share for share, keeps in known.items() if keeps), default=None)
    missed = max((share for share, keeps in known.items() if not keeps and (kept is None or share < kept)), default=0)
    if kept is None:
        return None if missed >= most else min(most, max(1, 2 * missed))
    return None if kept - missed == 1 else (kept + missed) // 2


def doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, and `most` itself."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent < most]
    return (*powers, most)


@dataclass(frozen=True, slots=True)
class Fit:
    """Granules by tenant on a device that has `total`."""

    needs: Mapping[str, int]
    total: int

    @property
    def left(self) -> int:
        """Granules that no tenant needs; below 0: so many are missing."""
        return self.total - sum(self.needs.values())

    @property
    def largest(self) -> str:
        """The tenant that needs most, the first of several. Raises ValueError without tenants."""
        return max(self.needs, key=lambda name: self.needs[name])
