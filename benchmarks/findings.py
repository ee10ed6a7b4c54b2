"""The findings of an experiment, as the text table and the JSON document; the page and the plots are made from it as well."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from greenlane.load.figures import Figures, figures
from greenlane.load.rules import ENOUGH

from .verdicts import CONTROL_OWN, KINDS, OWN, Combination, Phase, Verdict


@dataclass(frozen=True, slots=True)
class Throughput:
    """Work done a second by all tenants at the same time, on partitions and without; the ratio is of medians over rounds."""

    name: str
    partitions: float
    plain: float

    @property
    def ratio(self) -> float:
        """Throughput with partitions over throughput without."""
        return self.partitions / self.plain


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model that is no hog did a second, by turns of a tenant that has a fence and of the same one without it."""

    model: str
    held: tuple[float, ...]
    free: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """With the fence over without it, turn by turn, ascending, but for turns without an answer without it."""
        return sorted(held / free for held, free in zip(self.held, self.free, strict=True) if free)


@dataclass(frozen=True, slots=True)
class Findings:
    """An experiment: what was asked, on which machine, what came of it, and what a reader has to know (`notes`)."""

    title: str
    settings: dict[str, Any]
    machine: dict[str, str]
    combinations: tuple[Combination, ...]
    aggressors: dict[str, str]
    notes: tuple[str, ...]
    throughput: tuple[Throughput, ...] = field(default=())
    held: dict[str, Any] = field(default_factory=dict)
    """What the server says of what holds the aggressor, as in `fence` of GET /admin/partitions."""
    costs: tuple[Cost, ...] = field(default=())

    @property
    def verdicts(self) -> list[Verdict]:
        """One a combination."""
        return [combination.verdict() for combination in self.combinations]

    @property
    def phases(self) -> list[Phase]:
        """Every phase once, in order."""
        found = {id(phase): phase for combination in self.combinations for phase in combination.phases}
        return sorted(found.values(), key=lambda phase: phase.began)


HEADING = f"""\
{"":22} {"p99, ms: medians over rounds":^28}  {"under load / alone":^22} {"control":>8}
{"victim / aggressor":22} {"alone":>8} {"loaded":>9} {"control":>9}  {"p50":>6} {"p99":>7} {"p99.9":>7} {"p99":>8}  verdict"""


def line(verdict: Verdict) -> str:
    """One line of the table."""
    control = milliseconds(verdict.control.p99) if verdict.control else "-"
    ratios = verdict.ratios
    name, alone, under = f"{verdict.victim} / {verdict.aggressor}", verdict.alone.p99, verdict.under.p99
    return (
        f"{name:22} {milliseconds(alone):>8} {milliseconds(under):>9} {control:>9}  "
        f"{times(ratios['p50']):>6} {times(ratios['p99']):>7} {times(ratios['p999']):>7} "
        f"{times(verdict.control_ratio):>8}  {verdict.word}"
    )


def few(verdicts: Sequence[Verdict]) -> list[str]:
    """A warning for each victim that was asked too seldom for a p99 that means much."""
    fewest = {victim: min(one.fewest for one in verdicts if one.victim == victim) for victim in {v.victim: 0 for v in verdicts}}
    return [
        f"{victim}: few samples: as few as {count} in a phase, so its p99 is one of the slowest two; give it more --seconds"
        for victim, count in fewest.items()
        if count < ENOUGH
    ]


def table(findings: Findings) -> str:
    """The whole table, and below it what every verdict rests on where it is not a plain success."""
    verdicts = findings.verdicts
    why = [f"{one.victim} / {one.aggressor}: {one.word}: {one.why}" for one in verdicts if one.word != "isolated"]
    total = [
        f"throughput of {one.name}: {one.partitions:,.0f} a second on partitions, {one.plain:,.0f} without: {one.ratio:.2f}"
        for one in findings.throughput
    ]
    return "\n".join([HEADING, *map(line, verdicts), *why, *few(verdicts), *total])


def document(findings: Findings) -> dict[str, Any]:
    """Everything but the single samples, for programs. What is not a number is null."""
    found: dict[str, Any] = _plain(
        {
            "title": findings.title,
            "settings": findings.settings,
            "machine": findings.machine,
            "verdicts": [asdict(verdict) for verdict in findings.verdicts],
            "combinations": [_combination(combination) for combination in findings.combinations],
            "held": findings.held,
            "costs": [asdict(one) | {"ratios": one.ratios} for one in findings.costs],
            "throughput": [asdict(one) | {"ratio": one.ratio} for one in findings.throughput],
            "notes": findings.notes,
        }
    )
    return found


def milliseconds(microseconds: float) -> str:
    """Three digits or so; a dash for what is not a number."""
    value = microseconds / 1e3
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if value < 0.1 else times(value)


def times(ratio: float) -> str:
    """A ratio as it stands in tables."""
    return "-" if math.isnan(ratio) else f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def busiest(combination: Combination, kind: str) -> list[dict[str, Any]]:
    """Throughput of the aggressors in the phases of a kind, by name: the mean rate and megabytes a second."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for phase in combination.of(kind):
        for row in phase.busy:
            rows.setdefault(row["name"], []).append(row)
    return [{"name": name, "rate": _mean(some, "rate"), "megabytes": _mean(some, "megabytes")} for name, some in rows.items()]


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return float(sum(row[key] for row in rows) / len(rows))


def _combination(combination: Combination) -> dict[str, Any]:
    rounds = {kind: [_phase(phase) for phase in combination.of(kind)] for kind in (*KINDS, OWN, CONTROL_OWN)}
    about = {"victim": combination.victim, "aggressor": combination.aggressor, "bound": combination.bound}
    return {**about, "p99_growth": asdict(combination.growth), "rounds": rounds}


def _phase(phase: Phase) -> dict[str, Any]:
    found: Figures = figures(phase.samples)
    own = {"round": phase.round, "began": phase.began, "busy": phase.busy, "client_late_p99": phase.own, "wrong": phase.wrong}
    return asdict(found) | own


def _plain(value: Any) -> Any:
    """The value, or None where JSON has no number for it."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
