"""The outcome of an experiment's phases: latency of its clients, figures for people, flaws; as a table and as JSON."""

import json
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from greenlane.load.jobs import SlowAnswer

from .goals import Felt, Goal, Row, judge


@dataclass(slots=True)
class Outcome:
    """Outcome of a phase: the latency of each tenant, values by goal and whom they are about, figures for people, and flaws.

    A value that depends on all quiet phases (`over`) is filled in at the end. `unexercised` says why nothing is judged.
    """

    felt: list[Felt] = field(default_factory=list)
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    flaws: list[str] = field(default_factory=list)
    over: tuple[str, ...] = ()
    unexercised: str = ""

    def value(self, goal: str, about: str, value: float) -> None:
        """Note one value."""
        self.values.setdefault(goal, {})[about] = value

    def expect(self, statuses: Sequence[int], what: str) -> None:
        """Note a flaw if any of these is not 200."""
        if bad := [status for status in statuses if status != 200]:
            self.flaws.append(f"{len(bad)} of {len(statuses)} {what} were answered with {sorted(set(bad))}")

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {
            "felt": [asdict(each) | {"ratio": each.ratio} for each in self.felt],
            "figures": self.figures,
            "flaws": self.flaws,
            "unexercised": self.unexercised,
        }


def judge_all(
    goals: Sequence[Goal], phases: Sequence[str], outcomes: Mapping[str, Outcome], quiet_worst: Mapping[str, float]
) -> list[Row]:
    """A row for every goal of these phases. Errors and wrong answers in a phase are flaws of all of its goals."""
    measured: dict[tuple[str, str], dict[str, float]] = {}
    flaws: dict[str, str] = {}
    idle = {phase: "was not asked for" for phase in phases if phase not in outcomes}
    for phase, outcome in outcomes.items():
        bad = [_faults(f) for f in outcome.felt if f.errors or f.wrong]
        if text := "; ".join(outcome.flaws + bad):
            flaws[phase] = text
        elif outcome.unexercised:
            idle[phase] = outcome.unexercised
        measured.update({(phase, goal): values for goal, values in outcome.values.items()})
        for each in outcome.felt:
            if each.tenant in outcome.over and each.tenant in quiet_worst:
                over = measured.setdefault((phase, "over"), {})
                over[each.tenant] = max(each.over(quiet_worst[each.tenant]), over.get(each.tenant, float("-inf")))
    return judge(goals, measured, flaws, idle)


def table(facts: Mapping[str, str], outcomes: Mapping[str, Outcome], rows: Sequence[Row]) -> str:
    """For people: the machine, what was felt, the figures, the verdicts."""
    lines = [*(f"{name}: {value}" for name, value in facts.items()), ""]
    lines.append(
        f"{'phase':12} {'tenant':6} {'n':>7} {'p50':>8} {'p99':>8} {'worst':>8}   "
        f"{'quiet n':>7} {'p99':>8} {'worst':>8}  {'p99 ratio':>9} {'worst over':>10} {'errors':>6} {'wrong':>5}"
    )
    for phase, outcome in outcomes.items():
        for f in outcome.felt:
            lines.append(
                f"{phase:12} {f.tenant:6} {f.count:7} {f.p50:8.2f} {f.p99:8.2f} {f.worst:8.2f}   "
                f"{f.quiet_count:7} {f.quiet_p99:8.2f} {f.quiet_worst:8.2f}  {f.ratio:9.2f} {f.over(f.quiet_worst):10.2f} "
                f"{f.errors:6} {f.wrong:5}"
            )
    lines.append("times in ms; here 'worst over' is over the quiet phase just before\n")
    for phase, outcome in outcomes.items():
        for f in outcome.felt:
            lines += [f"{phase}: {f.tenant}, slowest: {_described(slow)}" for slow in f.slowest[:4]]
    for phase, outcome in outcomes.items():
        lines += [f"{phase}: {name}: {_short(value)}" for name, value in outcome.figures.items()]
    lines.append("")
    for row in rows:
        measured = "" if math.isnan(row.value) else f"{row.value:.3g} {row.goal.unit}".strip()
        why = f"  ({row.why.splitlines()[-1][:160]})" if row.why else ""
        lines.append(
            f"{row.verdict:13} {row.goal.phase:12} {row.about:10} {measured:>10} {row.goal!s:>10}  {row.goal.what}{why}"
        )
    return "\n".join(lines)


def as_json(facts: Mapping[str, str], outcomes: Mapping[str, Outcome], rows: Sequence[Row]) -> dict[str, Any]:
    """For a file; None where there is no number."""
    verdicts = [
        {"phase": row.goal.phase, "what": row.goal.what, "about": row.about, "limit": str(row.goal), "why": row.why}
        | {"value": row.value, "verdict": row.verdict}
        for row in rows
    ]
    phases = {name: outcome.as_json() for name, outcome in outcomes.items()}
    return _finite({"machine": dict(facts), "verdicts": verdicts, "phases": phases})  # type: ignore[no-any-return]


def failed() -> Outcome:
    """Outcome of a phase that raised the exception that is being handled."""
    return Outcome(flaws=[traceback.format_exc()[-3000:]])


def progress(text: str) -> None:
    """Say how far it is."""
    print(text[:1000], file=sys.stderr, flush=True)


def _finite(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, default=str)[:400]


def _described(slow: SlowAnswer) -> str:
    return (
        f"{slow.latency:.2f} ms, due at {slow.due:.3f} s, sent {slow.sent:.2f} ms later, "
        f"queued {slow.queued:.2f}, executed {slow.executed:.2f} ms"
    )


def _faults(felt: Felt) -> str:
    said = f" ({'; '.join(felt.failures)})" if felt.failures else ""
    return f"{felt.tenant}: {felt.errors} errors{said}, {felt.wrong} wrong answers"
