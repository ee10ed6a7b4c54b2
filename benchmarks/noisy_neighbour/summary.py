"""From raw data to figures and tables. Pure, and the same for the same data."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from greenlane.load.figures import Samples, figures
from greenlane.load.intervals import Interval
from greenlane.load.rules import grown

from .measure import Phase, disturbed
from .plan import PHASES, Which

AHEAD = 0.3
"""Seconds by which an aggressor begins before the victim; its answers of that time count."""


def summary(phases: Sequence[Phase], about: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of each server beside each aggressor, over all rounds that no other program disturbed."""
    settings = about["settings"]
    rows = [
        _row(server, kind, [one for one in phases if (one.turn.server, one.turn.aggressor) == (server, kind)], settings)
        for kind in settings["aggressors"]
        for server in about["servers"]
    ]
    others = [one.others for one in phases if not math.isnan(one.others)]
    result: dict[str, Any] = _plain(
        {
            "rows": rows,
            "others": median(others) if others else math.nan,
            "load": [min((one.load for one in phases), default=math.nan), max((one.load for one in phases), default=math.nan)],
        }
    )
    return result


def tables(found: Mapping[str, Any]) -> str:
    """The same for people, in Markdown: how many times latency grew, latencies in ms, and what the aggressors got done."""
    grew = ["beside", "server", "p50 grew", "p99 grew", "p99 grew in a round"]
    times = ["beside", "server", "p50, ms", "p99, ms", "p99.9, ms", "slowest, ms", "failed", "requests, in rounds"]
    done = ["aggressor", "server", "alone, answers a second", "beside the victim", "refused"]
    kinds = (grew, _growth), (times, _latencies), (done, _rates)
    return "\n\n".join(_table(names, [cells(row) for row in found["rows"]]) for names, cells in kinds)


def _row(server: str, kind: str, phases: Sequence[Phase], settings: Mapping[str, Any]) -> dict[str, Any]:
    rounds = list(counted(phases, settings["quiet"]))
    alone, beside = ([by[which].samples for by in rounds] for which in ("alone", "beside"))
    growth = grown(alone, beside, 0.99)
    lasted = (settings["seconds"] + AHEAD) * len(rounds)
    answers = {which: sum(by[which].statuses.get(200, 0) for by in rounds) for which in ("aggressor", "beside")}
    loud = [by[which] for by in rounds for which in ("aggressor", "beside")]
    ratios = [figures(b).p99 / figures(a).p99 for a, b in zip(alone, beside, strict=True)]
    return {
        "server": server,
        "aggressor": kind,
        "rounds": len(rounds),
        "rounds_left_out": len({one.turn.round for one in phases}) - len(rounds),
        "alone": _figures(alone),
        "beside": _figures(beside),
        "growth": {"p50": _interval(growth.median), "p99": _interval(growth.tail)},
        "p99_growth_of_rounds": {"median": _quartile(ratios, 2), "half": [_quartile(ratios, 1), _quartile(ratios, 3)]},
        "rate": {
            "alone": answers["aggressor"] / lasted if lasted else math.nan,
            "beside": answers["beside"] / lasted if lasted else math.nan,
        },
        "refused": sum(count for one in loud for status, count in one.statuses.items() if status != 200),
        "late_us": round(median(by[which].late for by in rounds for which in ("alone", "beside"))) if rounds else math.nan,
    }


def counted(phases: Sequence[Phase], quiet: float) -> Iterator[dict[Which, Phase]]:
    """Of one server and aggressor the phases of each round: their last attempts, unless one of these was disturbed."""
    for number in sorted({one.turn.round for one in phases}):
        of = [one for one in phases if one.turn.round == number]
        last = {one.which: one for one in sorted(of, key=lambda one: one.attempt)}
        if len(last) == len(PHASES) and not any(disturbed(one, quiet) for one in last.values()):
            yield last


def _figures(rounds: Sequence[Samples]) -> dict[str, float]:
    """Of all requests of these rounds together, in milliseconds."""
    whole = Samples()
    for samples in rounds:
        for row in zip(samples.due, samples.latency, samples.status, strict=True):
            whole.add(*row)
    found = figures(whole)
    times = {name: round(getattr(found, name) / 1e3, 3) for name in ("p50", "p99", "p999", "worst")}
    return {"count": found.count, "failed": found.failed, **times}


def _quartile(ratios: Sequence[float], which: int) -> float:
    return round(float(np.quantile(ratios, which / 4)), 2) if ratios else math.nan


def _interval(interval: Interval) -> list[float]:
    return [round(value, 2) for value in (interval.value, interval.low, interval.high)]


def _growth(row: Mapping[str, Any]) -> list[str]:
    found, half = row["growth"], row["p99_growth_of_rounds"]
    return [
        row["aggressor"],
        row["server"],
        _times(found["p50"]),
        _times(found["p99"]),
        _times([half["median"], *half["half"]]),
    ]


def _latencies(row: Mapping[str, Any]) -> list[str]:
    alone, beside = row["alone"], row["beside"]
    cells = [f"{_few(alone[name])} → {_few(beside[name])}" for name in ("p50", "p99", "p999", "worst")]
    counts = [f"{alone['failed']} → {beside['failed']}", f"{beside['count']:,} in {row['rounds']}"]
    return [row["aggressor"], row["server"], *cells, *counts]


def _rates(row: Mapping[str, Any]) -> list[str]:
    return [row["aggressor"], row["server"], _few(row["rate"]["alone"]), _few(row["rate"]["beside"]), f"{row['refused']:,}"]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


def _times(interval: Sequence[float | None]) -> str:
    value, low, high = interval
    return "not measured" if value is None else f"{value:.2f} ({low:.2f} to {high:.2f})"


def _few(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _plain(value: Any) -> Any:
    """The value, or None where JSON has no number for it."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value
