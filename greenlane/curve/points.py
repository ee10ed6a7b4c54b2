"""What was measured on each share, the knee of the curve, and the smallest share that keeps a target. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .intervals import P99, Word

LESS = 0.1
"""The knee is where no larger share has more than this part more throughput."""


@dataclass(frozen=True, slots=True)
class Target:
    """Requests a second, and the p99 in seconds that they are to keep; None: it is only measured."""

    rate: float
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class AtRate:
    """Requests that were due at a rate: how many, their median in seconds and p99, and whether they keep the target."""

    rate: float
    word: Word
    p50: float = 0.0
    p99: P99 | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """A share of so many granules, `size` units together.

    `throughput` is requests a second, back to back; `p50` and `p99` are seconds of one alone, without a queue.
    """

    granules: int
    size: int
    throughput: float
    p50: float
    p99: float
    at_rate: AtRate | None = None


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
