"""What to advise on a tenant after it was measured: on its share, on lending, and on its share of memory bandwidth. Pure.

What would happen with more or fewer granules is what the autopilot expects too (`Need.with_share`). It takes runs to be longer
in proportion as granules are fewer. So fewer granules that would do are enough for any model, and more are the least that it
takes.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from ..config.bandwidth import in_words
from ..config.tenant import TenantConfig
from ..control.fence import FencedTenant
from ..control.stretch import WidePartition
from ..tenants.statistics import BOUNDS
from .autopilot import FULL, KEEPS, time_text
from .need import Need

LEAST = 500
"""The fewest requests that a p99 is computed from: five of them are slower than it."""
IDLE = 0.2
"""A tenant whose partition is busy for less of the time could lend it. Not measured: so much is left in four fifths of it."""
MOSTLY = 0.5
"""From this part of all inferences on, why they stayed on the tenant's own granules is named."""

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
        what = "no request was answered" if need.busy else "no requests"
        return Advice("unknown", None, "none", f"{facts}: {what} in {need.seconds:.3g} s")
    if target is None:
        return Advice("unknown", None, "none", f"{facts}; {_p99(need)}: no target_p99 to compare it with")
    facts = f"{facts}; {_p99(need)}, target {time_text(target)}"
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
    return f"its p99 is {time_text(need.p99)}" if need.p99 is not None else "no request was answered"


def advise_hog(
    tenant: str, drew: float, part: float, whole: int, beside: Sequence[str], estimated: bool, granules: int = 2
) -> list[str]:
    """A sentence about a tenant that nothing holds, and that draws more of the device's memory than its part of the device.

    It has so many granules, and drew so many bytes a second of `whole`; `beside` are tenants of the device that were at work
    meanwhile.
    """
    if not whole or not beside or drew <= part * whole:
        return []
    about = "about " if estimated else ""
    share = f"{drew / whole:.0%} of the device's memory bandwidth with {part:.0%} of its SMs"
    how = f'`memory_bandwidth = "auto"` would hold {tenant} to its part while others work'
    if granules == 1:
        how = "It has one granule, which no `memory_bandwidth` narrows"
    return [
        f"{tenant} draws {about}{_words(drew)}, {share}, which {' and '.join(beside)} may feel. "
        f"{how}; `greenlane prove --memory` says what they feel"
    ]


def advise_fenced(tenant: str, fence: FencedTenant, target: float | None) -> list[str]:
    """Sentences about models that slow others, or are too slow for the tenant's target in seconds where they are held.

    A model that is held though it does not slow others is being tried. One that needs less than its tenant has is on fewer
    granules than that takes. Works of others, one after another, begin as often as the share allows at most.
    """
    found = []
    for each in fence.models:
        if each.slows:
            found.append(
                f"{each.model} runs on granules {list(fence.granules)} while others work: beside it on all of {tenant}'s share "
                f"their inferences take at least {each.slows:.2g} times as long. Any `memory_bandwidth` below 1 holds it so if "
                f"{tenant}'s granules can draw more"
            )
        every = each.moved / fence.memory_bandwidth * 1e3 if fence.paced and not each.anyway else 0.0
        takes = max(each.narrow_ms, every) if each.narrow_ms else 0.0
        if target is not None and takes > target * 1e3 >= each.home_ms:
            begins = f", and begins every {every:.3g} ms," if every > each.narrow_ms else ""
            held = f"{each.model} takes {each.narrow_ms:.3g} ms{begins} where {tenant}'s `memory_bandwidth` holds it"
            rate = 0.0 if each.anyway else each.moved / target
            need = f"takes at least {_words(rate)}" if rate > fence.memory_bandwidth else "takes a larger one"
            need = "takes none, or one that does not hold it so" if each.slows else need
            found.append(
                f"{held}, and {each.home_ms:.3g} ms on all of its share: its target_p99 of {target * 1e3:.3g} ms while others "
                f"work {need}"
            )
    return [*found, *fence.problems]


def advise_paced(tenant: TenantConfig, waited: int, requests: int, rate: int) -> list[str]:
    """A sentence about a tenant that misses its target, if so many inferences waited for its share of PCIe that its p99 may be
    theirs. The share is `rate` bytes a second; one that is "auto" grows with granules.
    """
    if not rate or waited <= 0.01 * requests or tenant.pcie == "auto":
        return []
    held = f"{waited} inferences waited for {tenant.name}'s `pcie` of {_words(rate)} while others worked"
    return [f"{held}: with more of that they would start sooner, on more granules they would not"]


def _words(rate: float) -> str:
    """In three digits."""
    return in_words(int(float(f"{rate:.3g}")))


class Neighbour(NamedTuple):
    """Another tenant of the device. `busy` is None where nothing was measured; `lends`: whether it has `lend`."""

    name: str
    busy: float | None
    lends: bool


def advise_borrower(before: WidePartition, after: WidePartition, needs: Mapping[str, Need]) -> list[str]:
    """Sentences about a tenant's wide partition; none where nothing ran and all is well."""
    ran = max(0, after.launches - before.launches)
    home = {why: max(0, number - before.home_launches.get(why, 0)) for why, number in after.home_launches.items()}
    whole, lenders = ran + sum(home.values()), [each.owner for each in after.borrowed]
    sentences = []
    if whole and lenders:  # Otherwise the wide partition has gone meanwhile.
        lend = f"{' and '.join(lenders)} {'lends' if len(lenders) == 1 else 'lend'}"
        fact = f"{ran} of {whole} inferences ran on granules that {lend}"
        why, number = max(home.items(), key=lambda item: item[1], default=("", 0))
        named = number >= MOSTLY * whole and number
        sentences.append(f"{fact}; {_why(why, number, lenders, needs)}" if named else fact)
    return [*sentences, *after.too_long, *after.problems]


def advise_lender(tenant: str, lends: bool | None) -> list[str]:
    """A sentence about a tenant that has stopped lending; `lends` is None for one that never does."""
    if lends is not False:
        return []
    return [
        f"{tenant} lends nothing for now, as its own requests were later beside borrowers than without them. It lends again by "
        f"itself; `greenlane prove --lending` says whether it should"
    ]


def advise_neighbours(tenant: str, burst: int | None, neighbours: list[Neighbour]) -> list[str]:
    """A sentence about neighbours that a tenant which needs more could borrow from, where none of them lends yet."""
    idle = [each for each in neighbours if each.busy is not None and each.busy < IDLE]
    if not idle or any(each.lends for each in neighbours):
        return []
    names = ", ".join(f"{each.name} ({100 * (each.busy or 0):.0f} %)" for each in idle)
    how = "With `lend` there" if burst else f"With `lend` there and a `burst` for {tenant}"
    return [f"little used: {names}. {how}, {tenant} could use those granules while they are idle"]


def _why(why: str, number: int, lenders: list[str], needs: Mapping[str, Need]) -> str:
    """Why most inferences stayed at home, and what to do."""
    busy = ", ".join(f"{name} is busy {100 * needs[name].busy:.0f} % of the time" for name in lenders if name in needs)
    texts = {
        "in_flight": "another one of its own was running",
        "owner_busy": f"a lender had a request{f': {busy}' if busy else ''}",
        "owner_stopped": "a lender lent nothing for now, as its own requests were late",
        "not_measured": "what they take there is not known yet",
        "too_long": "they take longer than the lenders allow (`lend`)",
        "no_faster": "they are no faster there, so its `burst` brings nothing for these models",
        "fenced": "another tenant was at work, and there they could draw more of the memory than `memory_bandwidth`",
    }
    return f"for {number}, {texts.get(why, why)}"
