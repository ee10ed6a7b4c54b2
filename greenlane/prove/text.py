"""The findings as plain text, for a terminal."""

import math
from collections.abc import Iterator, Sequence

from greenlane.load.figures import figures, merged
from greenlane.load.intervals import Interval
from greenlane.load.rules import BOUND
from partitions.plan import ranges

from . import lending
from .attacks import WHAT
from .findings import Findings
from .lending import STATES, Lent, Level
from .measure import Measured, Result
from .plan import PHASES
from .survey import Surveyed

MEANS = {
    "isolated": "every neighbour was held off, where the control shows that it disturbs",
    "leaks": "something of a neighbour's reaches a tenant",
    "not exercised": "not everything could be judged; each pair that was not says why",
    "too noisy": "this machine was too busy to judge everything; stop other programs, and run it again",
}
HEADING = f"""\
{"":22} {"p99 of the victim, ms":^26}  {"times, with interval":^34}
{"aggressor":22} {"alone":>8} {"beside":>8} {"control":>8}  {"beside":>24} {"control":>9}  verdict"""
TIMES = "times: how much the median (p50) or the tail (p99; p90 of few requests) grew, whichever the verdict rests on"

UNFENCED = f"""\
{"":16} {"p99 of the victim, ms":^26}  {"times, with interval":^34}  {"GB/s":^13}
{"strain":16} {"alone":>8} {"beside":>8} {"control":>8}  {"beside":>24} {"control":>9}  {"alone":>6} {"beside":>6}  verdict"""
ONLY_SAID = "They do not count for the verdict: no partition fences memory, caches and PCIe. With --memory they do."
COUNTED = "They count for the verdict (--memory)."

LATE = 1.1
"""Times the planned seconds from which the report says why it took more."""

LENDING = f"""\
{"":22} {"p99 of the lender, ms":^17}  {"times":^30}
{"load":22} {"rigid":>8} {"lending":>8}  {"lending":>20} {"borrower":>9}  verdict"""


def render(findings: Findings) -> str:
    """The whole report."""
    return "\n".join(_lines(findings))


def milliseconds(microseconds: float) -> str:
    """Three digits or so; a dash for what is not a number."""
    value = microseconds / 1e3
    return "-" if math.isnan(value) else f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def times(interval: Interval) -> str:
    """A growth with its interval."""
    if math.isnan(interval.value):
        return "-"
    return f"{short(interval.value)} ({short(interval.low)}-{short(interval.high)})"


def short(value: float) -> str:
    """A growth as it stands in tables."""
    return "-" if math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def grown(result: Result) -> str:
    """The growth that the verdict rests on, and of which part of the requests it is."""
    one = result.held.decisive(BOUND)
    return f"{'p50' if one is result.held.median else f'p{result.held.quantile * 100:g}'} {times(one)}"


def _failed(failures: Sequence[str]) -> Iterator[str]:
    """A line for all failures that differ only in the time at which they were seen."""
    times: dict[str, list[str]] = {}
    for failure in failures:
        time, _, how = failure.partition(": ")
        times.setdefault(how, []).append(time)
    for how, seen in times.items():
        yield f"  {'a request failed at' if len(seen) == 1 else 'requests failed, the first at'} {seen[0]}: {how[:160]}"


def _not_asked(tenant: Surveyed) -> Iterator[str]:
    """A line for each reason for which models of this tenant were not asked."""
    models: dict[str, list[str]] = {}
    for name, why in tenant.undriven.items():
        models.setdefault(why, []).append(name)
    number = len(tenant.drivable) + len(tenant.undriven)
    for why, names in models.items():
        which = f"{names[0]} was" if len(names) == 1 else f"{len(names)} of {number} models were"
        yield f"  {tenant.name}: {which} not asked: {why}"


def _lines(findings: Findings) -> Iterator[str]:
    yield from ("", "Where work ran")
    for each in findings.located:
        where = f" on {each.unit}{'s' * (len(each.units) != 1)} {ranges(each.units)}" if each.units else ""
        yield f"  {each.tenant}: probe{where}: {each.word}: {each.why}"
        own = f" on core{'s' * (len(each.own) != 1)} {ranges(each.own)}" if each.own else ""
        if each.own_why:
            yield f"  {each.tenant}: models{own}: {each.own_word}: {each.own_why}"
    for tenant in findings.tenants:
        yield from _not_asked(tenant)
    for measured in findings.measured:
        yield from ("", _title(measured), HEADING)
        yield from map(_line, measured.results)
        yield from (f"  {line}" for line in measured.fenced)
        yield from _failed(measured.failures)
        yield from (f"  {r.attack.other.kind}: {r.ruling.word}: {r.ruling.why}" for r in measured.results if _explain(r))
    if findings.measured:
        yield from ("", TIMES)
    for measured in findings.unfenced:
        yield from ("", f"What partitions do not fence: {_title(measured)}", UNFENCED)
        yield from map(_strained, measured.results)
        yield from (f"  {line}" for line in measured.fenced)
        yield from _failed(measured.failures)
        yield from (f"  {r.attack.other.kind}: {r.ruling.word}: {r.ruling.why}" for r in measured.results if _explain(r))
    if findings.unfenced:
        yield f"  {COUNTED if findings.memory else ONLY_SAID}"
    for lent in findings.lending:
        yield from ("", f"{lent.pair.victim} lends to {lent.pair.aggressor}: {about_lending(lent)}", LENDING)
        yield from map(_level, lent.levels)
        yield f"  after idling: {lent.first.word}: {lent.first.why}"
        for ruling in dict.fromkeys(each.ruling for each in lent.levels if _explain(each)):
            loads = ", ".join(f"{each.load:.0%}" for each in lent.levels if each.ruling == ruling)
            yield f"  {loads}: {ruling.word}: {ruling.why}"
    if findings.untried:
        yield from ("", "Not tried")
        yield from (f"  {pair}: {why}" for pair, why in findings.untried.items())
    if findings.ended and findings.ended not in findings.untried.values():
        yield from ("", findings.ended)
    yield ""
    said = ", ".join(f"{count} {word}" for word, count in findings.counts.items())
    yield f"Pairs: {said or 'none, as one tenant has no neighbour'}"
    bound = lending.BOUND if findings.lending else BOUND
    took, planned = f"{findings.seconds:.0f} s", findings.planned
    if findings.seconds > LATE * planned:
        took += f": --seconds {planned:g}, and more for strains and repeated measurements"
    yield f"{findings.word}: {MEANS[findings.word]} (a growth of at most {bound:g} is allowed; {took})"


def about(measured: Measured) -> str:
    """What the victim was asked, and what else was going on."""
    share = "an unknown part" if math.isnan(measured.others) else f"{measured.others:.0%}"
    late, others = f"{measured.late * 1e3:.2f} ms late (p99)", f"other programs used {share} of the cores"
    return f"{measured.model}, {measured.rate:.0f} requests a second; its client was {late}; {others}"


def about_lending(lent: Lent) -> str:
    """What the lender was asked, and what else was going on."""
    launches, returns, _ = lent.borrowed
    ran = f"{launches} inferences of the borrower ran on its share, {returns} of them when it had a request again"
    return f"{lent.model}, for at most {lent.limit * 1e3:g} ms; {ran}; other programs used {lent.others:.0%} of the cores"


def _level(level: Level) -> str:
    off, on = (milliseconds(figures(merged(level.rounds[state])).p99) for state in STATES)
    grown, gained = times(level.growth.decisive(lending.BOUND)), f"{level.gained:.2f}"
    return f"{f'{level.load:.0%}, {level.rate:.0f} a second':22} {off:>8} {on:>8}  {grown:>20} {gained:>9}  {level.ruling.word}"


def _explain(result: Result | Level) -> bool:
    return result.ruling.word != "isolated"


def _title(measured: Measured) -> str:
    return f"{measured.pair}: {about(measured)}"


def _line(result: Result) -> str:
    return f"{f'{result.attack.other.kind} ({result.attack.other.model})':22.22} {_felt(result)}  {result.ruling.word}"


def _strained(result: Result) -> str:
    alone, beside = rates(result)
    return f"{result.attack.other.kind:16} {_felt(result)}  {alone:>6} {beside:>6}  {result.ruling.word}"


def _felt(result: Result) -> str:
    points = " ".join(f"{milliseconds(result.figures(which).p99):>8}" for which in PHASES)
    return f"{points}  {grown(result):>24} {short(result.shared.decisive(BOUND).value):>9}"


def rates(result: Result) -> tuple[str, str]:
    """The gigabytes a second that a strain moved alone, and beside the victim."""
    alone, beside = result.attack.other.rate, result.moved["beside"]
    return _gigabytes(alone), _gigabytes(beside)


def _gigabytes(rate: float) -> str:
    return "-" if math.isnan(rate) else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def legend(findings: Findings) -> str:
    """The kinds of aggressor that were tried, in words."""
    kinds = dict.fromkeys(result.attack.other.kind for each in findings.measured for result in each.results)
    return "; ".join(f"{kind}: {WHAT[kind]}" for kind in kinds)
