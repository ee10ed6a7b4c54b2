"""The raw data of a run as files: every request of the victim, every phase, and what was asked on which machine.

- `requests.csv.gz`: the phase's number, when the request was due (ms from the phase's beginning), microseconds from then to the
  answer, and the status (0: none came)
- `phases.csv`: the fields of `Phase` but for the requests
- `run.json`: the settings, the servers and the machine
"""

import csv
import gzip
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from greenlane.load.figures import Samples

from .measure import Phase
from .plan import Turn

REQUESTS, PHASES, RUN = "requests.csv.gz", "phases.csv", "run.json"
_COLUMNS = ("phase", "round", "server", "aggressor", "attempt", "which", "began_s", "late_us", "others", "load", "statuses")


def write(folder: Path, phases: Sequence[Phase], about: Mapping[str, Any]) -> None:
    """Write all three files; those that are there are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    requests, rows = io.StringIO(), io.StringIO()
    every, each = csv.writer(requests, lineterminator="\n"), csv.writer(rows, lineterminator="\n")
    every.writerow(("phase", "due_ms", "latency_us", "status"))
    each.writerow(_COLUMNS)
    for number, one in enumerate(phases):
        each.writerow((number, *_row(one)))
        for due, latency, status in zip(one.samples.due, one.samples.latency, one.samples.status, strict=True):
            every.writerow((number, round(due * 1e3), round(latency), status))
    (folder / REQUESTS).write_bytes(gzip.compress(requests.getvalue().encode(), 9, mtime=0))
    (folder / PHASES).write_text(rows.getvalue(), encoding="utf-8")
    (folder / RUN).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> tuple[list[Phase], dict[str, Any]]:
    """What was written there."""
    samples: dict[int, Samples] = {}
    with gzip.open(folder / REQUESTS, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            one = samples.setdefault(int(row["phase"]), Samples())
            one.add(int(row["due_ms"]) / 1e3, float(row["latency_us"]), int(row["status"]))
    with (folder / PHASES).open(encoding="utf-8", newline="") as file:
        phases = [_phase(row, samples.get(int(row["phase"]), Samples())) for row in csv.DictReader(file)]
    return phases, json.loads((folder / RUN).read_text(encoding="utf-8"))


def _row(one: Phase) -> tuple[Any, ...]:
    turn, statuses = one.turn, " ".join(f"{status}:{count}" for status, count in sorted(one.statuses.items()))
    where = (turn.round, turn.server, turn.aggressor, one.attempt, one.which)
    return (*where, f"{one.began:.1f}", _number(one.late, 1), _number(one.others, 3), f"{one.load:.2f}", statuses)


def _number(value: float, digits: int) -> str:
    """Empty for what is not known."""
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _phase(row: Mapping[str, str], samples: Samples) -> Phase:
    pairs = (pair.split(":") for pair in row["statuses"].split())
    statuses = {int(status): int(count) for status, count in pairs}
    return Phase(
        Turn(int(row["round"]), row["server"], row["aggressor"]),
        int(row["attempt"]),
        row["which"],  # type: ignore[arg-type]
        float(row["began_s"]),
        samples,
        float(row["late_us"] or math.nan),
        float(row["others"] or math.nan),
        float(row["load"]),
        statuses,
    )
