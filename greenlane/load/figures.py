"""From samples to figures: percentiles of one phase. Pure arithmetic.

A sample that was not answered counts with the time it had been waited for, so that a stall is never hidden.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


@dataclass(slots=True)
class Samples:
    """One entry a request, in the order they were due: seconds since the phase began, microseconds, and the status.

    Status 0 is no answer: a connection that broke, or patience that ended.
    """

    due: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    status: list[int] = field(default_factory=list)

    def add(self, due: float, latency: float, status: int) -> None:
        """Note one request."""
        self.due.append(due)
        self.latency.append(latency)
        self.status.append(status)

    def __len__(self) -> int:
        return len(self.due)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one phase, or medians over phases: how many requests, how many not answered with 200, latencies in microseconds."""

    count: int
    failed: int
    p50: float
    p99: float
    p999: float
    worst: float


def percentile(ascending: Sequence[float], quantile: float) -> float:
    """The smallest value that at least this part of the values does not exceed; NaN of nothing."""
    if not ascending:
        return math.nan
    return ascending[max(0, math.ceil(quantile * len(ascending)) - 1)]


def figures(samples: Samples) -> Figures:
    """The figures of one phase."""
    ascending = sorted(samples.latency)
    failed = sum(status != 200 for status in samples.status)
    points = {name: percentile(ascending, quantile) for name, quantile in QUANTILES.items()}
    return Figures(len(samples), failed, worst=percentile(ascending, 1), **points)


def merged(parts: Iterable[Samples]) -> Samples:
    """The samples of several processes as one, in the order they were due."""
    rows = sorted(row for part in parts for row in zip(part.due, part.latency, part.status, strict=True))
    whole = Samples()
    for row in rows:
        whole.add(*row)
    return whole
