"""The limits on latency while something changes, in one place, and whether they were met. Pure.

Times are in milliseconds. "Over" is the slowest answer during the change less the slowest of all quiet phases of the same
tenant; a ratio is of two p99s, during the change and in the quiet phase just before it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from greenlane.load.figures import Samples, percentile
from greenlane.load.jobs import SlowAnswer

SLOWEST = 12
"""How many of the slowest answers of a change are kept."""
MET, MISSED, NOT_EXERCISED = "met", "missed", "not exercised"


@dataclass(frozen=True, slots=True)
class Goal:
    """One thing that a phase is measured by; `least` is whether the limit is the least instead of the most."""

    phase: str
    name: str
    what: str
    limit: float
    unit: str = "ms"
    least: bool = False

    def __str__(self) -> str:
        return f"{'>=' if self.least else '<='} {self.limit:g}{f' {self.unit}' if self.unit else ''}"

    def holds(self, value: float) -> bool:
        """Whether this value is within the limit; NaN is not."""
        return value >= self.limit if self.least else value <= self.limit


GOALS = (
    Goal("repartition", "over", "a tenant that keeps its share, slowest answer over its quiet worst", 5),
    Goal("repartition", "movers", "the movers, slowest answer over their longest work in flight", 10),
    Goal("repartition", "put", "a PUT with kernels on disk, most", 1.5, "s"),
    Goal("reload", "ratio", "p99 beside load, unload and reload, over alone", 1.3, ""),
    Goal("reload", "over", "slowest answer over quiet worst", 5),
    Goal("build", "ratio", "p99 beside a build of another's ONNX, over alone", 1.3, ""),
    Goal("build", "over", "slowest answer over quiet worst", 5),
    Goal("retrain", "ratio", "p99 beside the load of new weights of a served network, over alone", 1.3, ""),
    Goal("retrain", "over", "slowest answer over quiet worst", 5),
    Goal("rows", "own", "first 3, 5, 6, 7 rows, slowest over the largest warm batch", 20),
    Goal("rows", "over", "the neighbour's slowest answer over its quiet worst", 2),
    Goal("bodies", "ratio", "p99 beside bodies of all sizes, over alone", 1.3, ""),
    Goal("bodies", "worst", "the neighbour's slowest answer", 5),
    Goal("stream", "ratio", "p99 beside weights that are streamed, over alone", 1.3, ""),
    Goal("stream", "worst", "the neighbour's slowest answer", 5),
    Goal("depth", "ratio", "four clients in the process, over the engine back to back", 0.97, "", least=True),
    Goal("cold", "ready", "part of the cold starts that got ready", 1, "", least=True),
)
"""The table of issue 11, "How fast", for an H100, and `retrain` and `stream`."""


@dataclass(frozen=True, slots=True)
class Felt:
    """The latency of one tenant during one change. Milliseconds; `wrong` answers differ from the first one to a request."""

    tenant: str
    count: int
    p50: float
    p99: float
    worst: float
    quiet_count: int
    quiet_p99: float
    quiet_worst: float
    errors: int
    wrong: int
    failures: tuple[str, ...] = ()
    """Answers to the first requests that failed, from the quiet phase and the change and what was between."""
    slowest: tuple[SlowAnswer, ...] = ()
    """The slowest answers of the change, the slowest first, with `due` in seconds from the change's beginning."""

    @property
    def ratio(self) -> float:
        """How many times its p99 is that of the quiet phase before."""
        return self.p99 / self.quiet_p99

    def over(self, quiet_worst: float) -> float:
        """By how much its slowest answer is slower than the slowest of all quiet phases."""
        return self.worst - quiet_worst


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `value` is NaN where nothing was measured."""

    goal: Goal
    about: str
    value: float
    verdict: str
    why: str = ""


def felt(
    tenant: str,
    samples: Samples,
    quiet: tuple[float, float],
    change: tuple[float, float],
    wrong: int,
    failures: Sequence[str] = (),
    slowest: Sequence[SlowAnswer] = (),
) -> Felt:
    """Take the samples of a quiet interval and of a change, seconds from the beginning, apart.

    Whatever waited while the change was on counts to the change, also what was due before; what is neither counts nowhere.
    """
    before = [row for row in _rows(samples) if quiet[0] <= row[0] and row[0] + row[1] / 1e6 < quiet[1]]
    during = [row for row in _rows(samples) if _within(row[0], row[1] / 1e6, change)]
    slow = [each._replace(due=each.due - change[0]) for each in slowest if _within(each.due, each.latency / 1e3, change)]
    calm, times = sorted(row[1] / 1e3 for row in before), sorted(row[1] / 1e3 for row in during)
    errors = sum(row[2] != 200 for row in (*before, *during))
    return Felt(
        tenant,
        len(times),
        percentile(times, 0.5),
        percentile(times, 0.99),
        percentile(times, 1),
        len(calm),
        percentile(calm, 0.99),
        percentile(calm, 1),
        errors,
        wrong,
        tuple(failures),
        tuple(sorted(slow, reverse=True)[:SLOWEST]),
    )


def judge(
    goals: Sequence[Goal],
    measured: Mapping[tuple[str, str], Mapping[str, float]],
    flaws: Mapping[str, str],
    idle: Mapping[str, str],
) -> list[Row]:
    """A row for every goal and everybody it was measured of, in the goals' order.

    `measured` gives values by phase, the goal's name, and whom it is about. `flaws` says by phase why nothing there counts as
    met: errors, wrong answers, changes that did not happen; so what was not measured because of them is missed. `idle` says
    by phase why nothing was tried.
    """
    rows: list[Row] = []
    for goal in goals:
        if goal.phase in idle:
            rows.append(Row(goal, "", math.nan, NOT_EXERCISED, idle[goal.phase]))
            continue
        values = measured.get((goal.phase, goal.name)) or {"": math.nan}
        rows += [_row(goal, about, value, flaws.get(goal.phase, "")) for about, value in values.items()]
    return rows


def _row(goal: Goal, about: str, value: float, flaw: str) -> Row:
    if flaw:
        return Row(goal, about, value, MISSED, flaw)
    if math.isnan(value):
        return Row(goal, about, value, NOT_EXERCISED, "nothing was measured")
    return Row(goal, about, value, MET if goal.holds(value) else MISSED)


def _within(due: float, took: float, interval: tuple[float, float]) -> bool:
    """Whether any of an answer's time is in the interval. Seconds."""
    return due <= interval[1] and due + took >= interval[0]


def _rows(samples: Samples) -> list[tuple[float, float, int]]:
    return list(zip(samples.due, samples.latency, samples.status, strict=True))
