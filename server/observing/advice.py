"""Compares what a tenant needed with its share: whether that should be kept, or how many granules would do. Pure.

What would happen with more or fewer granules is what the autopilot expects too (`Need.with_share`). It takes runs to be longer
in proportion as granules are fewer. So fewer granules that would do are enough for any model, and more are the least that it
takes.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from ..tenants.statistics import BOUNDS
from .autopilot import FULL, KEEPS
from .need import Need

LEAST = 500
"""The fewest requests that a p99 is computed from: five of them are slower than it."""

Verdict = Literal["keep", "fewer", "more", "unknown"]
Certainty = Literal["high", "low", "none"]


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's granules, of `total` of its device, each of `size` units; it may not have fewer than `least`."""

    granules: int
    total: int
    size: int
    unit: str
    least: int = 1

    def text(self, granules: int) -> str:
        """So many granules in units: `1 core`, `16 SMs`."""
        count = granules * self.size
        return f"{count} {self.unit}{'s' * (count != 1)}"


class Advice(NamedTuple):
    """A verdict, the granules that would do (None where that is unknown, or the whole device would not), and a sentence."""

    verdict: Verdict
    granules: int | None
    certainty: Certainty
    text: str


def advise(tenant: str, need: Need, share: Share, target: float | None) -> Advice:
    """What to do with a tenant's share; `target` is the p99 in seconds that it is to keep, None for a tenant without one."""
    facts = f"{tenant} uses {100 * need.busy:.0f} % of {share.text(share.granules)}"
    if not need.requests and not need.turned_away:
        return Advice("unknown", None, "none", f"{facts}: no requests in {need.seconds:.3g} s")
    if target is None:
        return Advice("unknown", None, "none", f"{facts}; {_p99(need)}: no target_p99 to compare it with")
    facts = f"{facts}; {_p99(need)}, target {_time(target)}"
    if need.turned_away or need.misses(target):
        return _more(facts, need, share, target)
    if need.requests < LEAST:
        longer = f"{LEAST} take {LEAST / need.rate:.0f} s"
        return Advice("unknown", None, "none", f"{facts}: {need.requests} requests are too few for a p99, {longer}")
    enough = [width for width in range(share.least, share.granules) if _would_do(need, width / share.granules, target)]
    granules = enough[0] if enough else share.granules
    verdict: Verdict = "fewer" if enough else "keep"
    what = f"{share.text(granules)} would do" if enough else f"keep {share.text(granules)}"
    return Advice(verdict, granules, _certainty(need, granules / share.granules, target), f"{facts}: {what}")


def p99_between(need: Need) -> tuple[float, float | None]:
    """The bounds in seconds of the bucket that has the p99; the upper one is None where it is above all bounds."""
    if not need.requests:
        return 0.0, None
    index = bisect_left(list(accumulate(need.buckets)), 0.99 * need.requests)
    low = BOUNDS[index - 1] / 1e9 if index else 0.0
    return low, BOUNDS[index] / 1e9 if index < len(BOUNDS) else None


def _certainty(need: Need, times: float, target: float) -> Certainty:
    """How sure it is to keep its target with `times` its granules: "high" if even the upper bound of its p99 does."""
    (_, most), (_, p99) = p99_between(need), need.with_share(times)
    return "high" if most is not None and need.p99 and most * p99 / need.p99 <= target else "low"


def _more(facts: str, need: Need, share: Share, target: float) -> Advice:
    """Advice for a tenant that misses its target, or turns requests away."""
    refused = f" ({need.turned_away} requests refused or too late)" if need.turned_away else ""
    if share.granules == share.total:
        return Advice(
            "more", None, "high", f"{facts}{refused}: it has the whole device, so it takes a faster model or less load"
        )
    widths = range(share.granules + 1, share.total + 1)
    enough = [width for width in widths if _would_do(need, width / share.granules, target)]
    if enough:
        return Advice("more", enough[0], "low", f"{facts}{refused}: needs {share.text(enough[0])}, or more")
    whole = f"all {share.text(share.total)} would hardly do"
    return Advice("more", None, "low", f"{facts}{refused}: needs more; {whole}, so it also takes a faster model or less load")


def _would_do(need: Need, times: float, target: float) -> bool:
    busy, p99 = need.with_share(times)
    return busy <= FULL and p99 <= KEEPS * target


def _p99(need: Need) -> str:
    return f"its p99 is {_time(need.p99)}" if need.p99 is not None else "no request was answered"


def _time(seconds: float) -> str:
    """A time as people write it: `412 us`, `3.2 ms`, `1.5 s`."""
    factor, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
    return f"{factor * seconds:.3g} {unit}"
