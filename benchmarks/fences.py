"""What a fence is to victims and to the aggressors that it holds, as lines of text. Pure."""

import math
from collections.abc import Iterator
from statistics import fmean, median

from .findings import Findings, times
from .kinds import KINDS
from .verdicts import ALONE, CONTROL, CONTROL_ALONE, CONTROL_OWN, OWN, UNDER, Combination

SHARES = {"memory": "memory_bandwidth", "random": "memory_bandwidth", "pcie": "pcie"}
"""The share that holds an aggressor, by the first word of its name."""


def lines(findings: Findings) -> Iterator[str]:
    """How many times longer victims took, what was left to aggressors, and what the server says of those."""
    victims = list(dict.fromkeys(one.victim for one in findings.combinations))
    each = {name: [one for one in findings.combinations if one.aggressor == name] for name in KINDS}
    found = {name: combinations for name, combinations in each.items() if combinations}
    yield "\np50 / p99 over alone, all rounds together: without the fence -> with it"
    yield f"{'aggressor':16} " + " ".join(f"{victim:>29}" for victim in victims)
    for name, combinations in found.items():
        yield f"{name:16} " + " ".join(f"{_grown(one):>29}" for one in combinations)
    yield "\nthe aggressor, GB/s (over its own alone without the fence); it may have its share while a victim works"
    yield f"{'aggressor':16} {'alone':>9} {'fenced':>16} {'beside':>16} {'fenced, beside':>16} {'share':>9}"
    for combinations in found.values():
        yield _own(findings, combinations)
    yield from _held(findings)
    for one in findings.costs:
        if not (ratios := one.ratios):
            continue
        free = median(one.free)
        turns = f"{ratios[0]:.3f} to {ratios[-1]:.3f} in {len(ratios)} turns"
        rate = f"{median(ratios):.3f} of its {free:,.0f} a second without a fence"
        yield f"a tenant that is no hog, {one.model}: {rate} ({turns})"


def _grown(one: Combination) -> str:
    free, held = (
        " / ".join(times(one.grew(alone, under, quantile)) for quantile in (0.5, 0.99))
        for alone, under in ((CONTROL_ALONE, CONTROL), (ALONE, UNDER))
    )
    return f"{free} -> {held}"


def _own(findings: Findings, combinations: list[Combination]) -> str:
    """The rates of one aggressor; beside victims the mean over those."""
    name = combinations[0].aggressor
    each = KINDS[name].mib[findings.settings.get("device") == "cuda"] * (1 << 20) / 1e9
    alone, held, beside, both = (
        fmean(one.own(kind) for one in combinations) * each for kind in (CONTROL_OWN, OWN, CONTROL, UNDER)
    )
    share = findings.held.get(SHARES.get(name.split("-")[0], ""), 0) / 1e9 or math.nan
    parts = " ".join(f"{f'{_gigabytes(rate)} ({times(rate / alone)})':>16}" for rate in (held, beside, both))
    return f"{name:16} {_gigabytes(alone):>9} {parts} {_gigabytes(share):>9}"


def _held(findings: Findings) -> Iterator[str]:
    held = findings.held
    if not held:
        yield "\nnothing is known of what holds the aggressor"
        return
    yield f"\non granules {held['granules']}: {held['launches']} inferences; {held['waits']} waited for PCIe"
    yield from (*held["notes"], *held["problems"])
    for model in held["models"]:
        took = f"{model['home_ms']:.3g} ms at home, {model['narrow_ms']:.3g} narrow"
        yield f"{model['model']}: {_gigabytes(model['moved'] / 1e9)} GB each, by the meter; {took}"


def _gigabytes(rate: float) -> str:
    return "-" if math.isnan(rate) else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
