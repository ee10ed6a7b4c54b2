"""The findings as JSON, for programs. What is not a number is null. VERSION changes where a field gets another meaning."""

import math
from dataclasses import asdict
from typing import Any

from greenlane.load.figures import figures, merged
from greenlane.load.intervals import Interval
from greenlane.load.rules import BOUND, Growth

from .attacks import WHAT
from .confinement import Located
from .findings import Findings
from .lending import BOUND as LENDING_BOUND
from .lending import STATES, Lent, Level
from .measure import Measured, Result
from .plan import PHASES
from .survey import Surveyed

VERSION = 1


def document(findings: Findings) -> dict[str, Any]:
    """Everything but the single requests."""
    words = findings.words
    found: dict[str, Any] = _plain(
        {
            "version": VERSION,
            "verdict": findings.word,
            "exit_status": findings.status,
            "configuration": findings.source,
            "seconds": round(findings.seconds, 1),
            "bound": LENDING_BOUND if findings.lending else BOUND,
            "machine": dict(findings.machine),
            "server_ended": findings.ended or None,
            "partitions": [_located(each) for each in findings.located],
            "tenants": [_tenant(each) for each in findings.tenants],
            "pairs": [_pair(each) | {"verdict": words[each.pair]} for each in findings.measured],
            "unfenced": [_pair(each) | {"counts": findings.memory} for each in findings.unfenced],
            "lending": [_lent(each) | {"verdict": words[each.pair]} for each in findings.lending],
            "untried": [{"victim": p.victim, "aggressor": p.aggressor, "why": why} for p, why in findings.untried.items()],
        }
    )
    return found


def _located(each: Located) -> dict[str, Any]:
    own = {"cores": each.own, "verdict": each.own_word, "why": each.own_why}
    return {"tenant": each.tenant, "unit": each.unit, "units": each.units, "verdict": each.word, "why": each.why, "models": own}


def _tenant(each: Surveyed) -> dict[str, Any]:
    models = [
        {
            "name": one.model.name,
            "seconds_small": one.small.seconds,
            "seconds_large": one.large.seconds,
            "bytes_large": one.model.nbytes(one.large.form),
        }
        for one in each.drivable
    ]
    return {"name": each.name, "device": each.device, "size": each.size, "models": models, "not_asked": each.undriven}


def _pair(each: Measured) -> dict[str, Any]:
    return {
        "victim": each.pair.victim,
        "aggressor": each.pair.aggressor,
        "model": each.model,
        "requests_a_second": each.rate,
        "client_late_p99_seconds": each.late,
        "other_programs": round(each.others, 3),
        "failures": each.failures,
        "fenced": each.fenced,
        "attacks": [_result(result) for result in each.results],
    }


def _lent(each: Lent) -> dict[str, Any]:
    return {
        "lender": each.pair.victim,
        "borrower": each.pair.aggressor,
        "model": each.model,
        "lend_seconds": each.limit,
        "other_programs": round(each.others, 3),
        "borrowed": {**each.borrowed._asdict(), "home": dict(each.borrowed.home)},
        "first_after_idling": {"verdict": each.first.word, "why": each.first.why, "late_microseconds": _interval(each.late)},
        "loads": [_level(level) for level in each.levels],
    }


def _level(level: Level) -> dict[str, Any]:
    return {
        "load": level.load,
        "requests_a_second": level.rate,
        "verdict": level.ruling.word,
        "why": level.ruling.why,
        "growth": _growth(level.growth),
        "borrower_answers_a_second": dict(level.borrower),
        "microseconds": {state: asdict(figures(merged(level.rounds[state]))) for state in STATES},
    }


def _result(result: Result) -> dict[str, Any]:
    kind = result.attack.other.kind
    return {
        "attack": kind,
        "what": WHAT[kind],
        "verdict": result.ruling.word,
        "why": result.ruling.why,
        "models": {"aggressor": result.attack.other.model, "control": result.attack.own.model},
        "growth": _growth(result.held),
        "control_growth": _growth(result.shared),
        "aggressor_busy": result.busy,
        "aggressor_answers_a_second": dict(result.rates),
        "aggressor_statuses": dict(result.statuses),
        **({"gigabytes_per_second": {"alone": result.attack.other.rate, **result.moved}} if result.moved else {}),
        "microseconds": {which: asdict(result.figures(which)) for which in PHASES},
        "rounds": {which: [_rounded(samples.latency) for samples in result.rounds[which]] for which in PHASES},
    }


def _growth(growth: Growth) -> dict[str, Any]:
    return {"quantile": growth.quantile, "median": _interval(growth.median), "tail": _interval(growth.tail)}


def _interval(interval: Interval) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(interval).items()}


def _rounded(latencies: list[float]) -> dict[str, Any]:
    return {"count": len(latencies), "worst": round(max(latencies, default=math.nan), 1)}


def _plain(value: Any) -> Any:
    """The value, or None where JSON has no number for it."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
