"""What a tenant needs of its partition, measured between two reports of its HTTP side. Pure.

The counters of a report only grow, until a model is loaded again: then its own begin at 0. So differences are taken for each
model, and a model whose counters have shrunk counts from 0.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..config.tenant import TenantConfig
from ..control.fence import FencedTenant
from ..tenants.frontend import ModelReport, Report
from ..tenants.statistics import BOUNDS

_EDGES: tuple[int, ...] = (0, *BOUNDS, 2 * BOUNDS[-1])
"""Where buckets begin and end, in nanoseconds. The last one has no end: this stands for it."""


@dataclass(frozen=True, slots=True)
class Need:
    """A tenant's requests of `seconds` seconds. Times are seconds; a rate or share of time is 0 where nothing came."""

    seconds: float
    busy: float
    """Share of the time in which its partition ran an inference, from 0 to 1."""
    queue: float
    """Mean time from decoded inputs to the beginning of the run."""
    buckets: tuple[int, ...] = ()
    """The requests answered, by their time from the complete body to the encoded answer: up to each of `BOUNDS`, and others."""
    turned_away: int = 0
    """Requests refused for a full queue or memory, and those whose timeout passed."""
    limited: int = 0
    """Requests refused for one of the tenant's limits, which a larger share would not help."""
    held: int = 0
    """Works that its shares of bandwidth made later, or slower, while others worked: no more granules help these."""

    @property
    def requests(self) -> int:
        """Requests answered."""
        return sum(self.buckets)

    @property
    def rate(self) -> float:
        """Requests answered a second."""
        return self.requests / self.seconds

    @property
    def p99(self) -> float | None:
        """Interpolated in its bucket; None without a request."""
        return quantile(self.buckets, 0.99)

    def with_share(self, times: float) -> tuple[float, float]:
        """How busy the partition would be with so many times its granules, and the p99 in seconds.

        As for a queue with one server (M/M/1) whose runs take longer in proportion as granules are fewer.
        """
        busy = self.busy / times
        return busy, (self.p99 or 0.0) / times * max(1 - self.busy, 0.02) / max(1 - busy, 0.02)

    def misses(self, target: float) -> bool:
        """Whether more than 1 % of the requests took longer than this, by more than chance makes of few requests."""
        late, few = self.requests - below(self.buckets, target), 0.01 * self.requests
        return late > few + 2 * math.sqrt(few) + 1


@dataclass(frozen=True, slots=True)
class Counted:
    """The counters of a tenant at a moment, by model and version."""

    at: float
    models: Mapping[tuple[str, str], tuple[int, ...]]
    turned_away: int
    limited: int = 0
    held: int = 0
    ran: int = 0
    """Nanoseconds, also of works whose requests failed or were given up."""


def counted(report: Report, at: float, held: int = 0) -> Counted:
    """The counters in a report that was made at this time, in seconds on any clock; `held` are as in `Need`."""
    models, lane = {(each.name, each.version): _counters(each) for each in report.served}, report.lane
    return Counted(at, models, lane.rejected + lane.expired, sum(lane.limited), held, lane.ran)


def held(tenant: TenantConfig, fence: FencedTenant | None) -> int:
    """How many works of a tenant this fence has held; shares that are "auto" do not count, as they grow with granules."""
    if fence is None:
        return 0
    return fence.launches * (tenant.memory_bandwidth != "auto") + fence.waits * (tenant.pcie != "auto")


def need(before: Counted, after: Counted) -> Need:
    """What was needed between two moments."""
    grown = [_grown(before.models.get(key, ()), counters) for key, counters in after.models.items()]
    requests, queue, *buckets = [sum(each) for each in zip(*grown, strict=True)] or [0] * (2 + len(BOUNDS) + 1)
    seconds = max(after.at - before.at, 1e-9)
    return Need(
        seconds,
        min(1.0, _since(before.ran, after.ran) / 1e9 / seconds),
        queue / 1e9 / requests if requests else 0.0,
        tuple(buckets),
        _since(before.turned_away, after.turned_away),
        _since(before.limited, after.limited),
        _since(before.held, after.held),
    )


def _since(before: int, after: int) -> int:
    return after - before if after >= before else after


def by_model(before: Counted, after: Counted) -> dict[tuple[str, str], Need]:
    """The same for each model and version alone. What of it was turned away, and how busy it kept the share, is not known."""
    found = {}
    for key, counters in after.models.items():
        known = {key: before.models[key]} if key in before.models else {}
        found[key] = need(Counted(before.at, known, 0), Counted(after.at, {key: counters}, 0))
    return found


class History:
    """The last counters of each tenant: enough for what was needed in the last `window` seconds."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._counted: dict[str, deque[Counted]] = {}

    def add(self, tenant: str, counted: Counted) -> None:
        """The tenant's counters, which are newer than all before."""
        kept = self._counted.setdefault(tenant, deque())
        kept.append(counted)
        while len(kept) > 2 and counted.at - kept[1].at >= self._window:
            kept.popleft()

    def forget(self, tenant: str | None = None) -> None:
        """What was needed before now is of no interest, as the shares have changed; of one tenant, or of all."""
        if tenant is None:
            self._counted.clear()
        else:
            self._counted.pop(tenant, None)

    def ends(self, tenant: str) -> tuple[Counted, Counted] | None:
        """The tenant's counters at the beginning of the window, or when it was first measured, and the last ones.

        None if they are the same.
        """
        kept = self._counted.get(tenant)
        return (kept[0], kept[-1]) if kept and len(kept) > 1 else None

    def needs(self) -> dict[str, Need]:
        """What each tenant needed in the window, without those that were not measured for so long."""
        ends = {name: (kept[0], kept[-1]) for name, kept in self._counted.items()}
        return {name: need(old, new) for name, (old, new) in ends.items() if new.at - old.at >= 0.9 * self._window}


def quantile(buckets: Sequence[int], share: float) -> float | None:
    """The time below which this share of the requests was answered, in seconds; linear within a bucket, as in Prometheus."""
    rank, before = share * sum(buckets), 0
    if not rank:
        return None
    for index, count in enumerate(buckets):
        if count and before + count >= rank:
            low, high = _EDGES[index], _EDGES[index + 1]
            return (low + (high - low) * (rank - before) / count) / 1e9
        before += count
    return _EDGES[-1] / 1e9


def below(buckets: Sequence[int], seconds: float) -> float:
    """How many requests took at most so long; linear within a bucket."""
    spans = zip(buckets, pairwise(_EDGES), strict=False)
    return sum(count * min(max((seconds * 1e9 - low) / (high - low), 0.0), 1.0) for count, (low, high) in spans)


def _counters(report: ModelReport) -> tuple[int, ...]:
    """Requests, nanoseconds queued, and the histogram."""
    found = report.statistics
    return found.success.count, found.queue.ns, *found.buckets


def _grown(before: Sequence[int], after: Sequence[int]) -> Sequence[int]:
    if not before or any(now < then for then, now in zip(before, after, strict=True)):
        return after
    return [now - then for then, now in zip(before, after, strict=True)]
