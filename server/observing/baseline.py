"""A tenant's latency while its neighbours rested, to compare the latency of now with. Pure."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

from ..facts import Fact, milliseconds
from ..tenants.statistics import BOUNDS
from .need import Need, quantile

ENOUGH = 500
"""Requests from which there is a baseline: five of them are slower than its p99."""
ENOUGH_NOW = 100
"""Requests of now that are compared with it."""
SLOWER = 1.1
"""How many times the baseline the p99 has to be before it counts as slower; it is interpolated in a histogram."""
_MOST = 100_000
"""Requests of one range of rates that count; beyond that all count half, so that old ones are forgotten."""
_STEPS = 2
"""Ranges of rates for each doubling. Ranges at most so many away from each other are compared: from half to twice the rate."""


class Isolation(Fact):
    """The p99 of now, compared with that of requests at about the same rate that were answered while its neighbours rested."""

    ratio: Annotated[float | None, "How many times as high; null where that is not known, see `why`."]
    slower: Annotated[bool, "More requests are slower than the quiet p99 than chance explains."]
    quiet_p99_ms: float | None
    quiet_requests: Annotated[int, "Requests that it is made of."]
    why: Annotated[str, "Why it is not known; empty if it is."]


class Baseline:
    """The requests of one tenant that were answered while its neighbours rested, by rate and time.

    By rate, as a tenant's own load makes its requests wait for each other: they are compared with those at about the same rate.
    But clients that wait for answers send fewer when a neighbour delays these. So where there are too few at that rate, those
    at higher rates count too: they can only have been slower, so that the ratio is too low then, and never too high.
    """

    def __init__(self) -> None:
        self._buckets: defaultdict[int, list[int]] = defaultdict(lambda: [0] * (len(BOUNDS) + 1))

    def learn(self, need: Need) -> None:
        """Its neighbours rested while these requests were answered."""
        if need.requests:
            kept = self._buckets[_range(need.rate)]
            kept[:] = [before + added for before, added in zip(kept, need.buckets, strict=True)]
            if sum(kept) > _MOST:
                kept[:] = [count // 2 for count in kept]

    def forget(self) -> None:
        """What was learned is of another share, or of other models."""
        self._buckets.clear()

    def compare(self, need: Need) -> Isolation:
        """The requests of now, compared with those at about the same rate."""
        if need.requests < ENOUGH_NOW:
            why = f"{need.requests} of the {ENOUGH_NOW} requests that this needs, in the last {need.seconds:.0f} s"
            return Isolation(None, False, None, 0, why)
        quiet = self._at(need.rate)
        p99, requests = quantile(quiet, 0.99), sum(quiet)
        if p99 is None or requests < ENOUGH:
            why = (
                f"not known yet: {requests} of {ENOUGH} requests at about this rate or a higher one while its neighbours rested"
            )
            return Isolation(None, False, None, requests, why)
        ratio = (need.p99 or 0.0) / p99
        return Isolation(round(ratio, 2), ratio > SLOWER and need.misses(p99), milliseconds(p99), requests, "")

    def _at(self, rate: float) -> Sequence[int]:
        """The requests at about this rate; if they are too few, also those at the next higher ones."""
        found, now = [0] * (len(BOUNDS) + 1), _range(rate)
        for each, kept in sorted(self._buckets.items()):
            if abs(each - now) <= _STEPS or (each > now and sum(found) < ENOUGH):
                found = [before + added for before, added in zip(found, kept, strict=True)]
        return found


def _range(rate: float) -> int:
    return math.floor(_STEPS * math.log2(rate))
