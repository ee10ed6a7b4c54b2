"""One pair as a picture: SVG, which a page holds without a library. Latency to the right, logarithmic; a row for each phase."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from greenlane.load.figures import Figures, Samples, figures, merged

from .lending import STATES, Lent, State
from .measure import Measured, Result
from .plan import PHASES, Which
from .text import milliseconds

GREY, GREEN, ORANGE = "#7b8794", "#12855c", "#d0571f"
COLOURS: dict[Which, str] = {"alone": GREY, "beside": GREEN, "control": ORANGE}
LABELS: dict[Which, str] = {"alone": "alone", "beside": "beside it", "control": "control"}
LENDS: dict[State, tuple[str, str]] = {"off": ("lends nothing", GREY), "on": ("lends", GREEN)}
WIDTH, LEFT, RIGHT, ROW, GROUP, TOP, BOTTOM = 860, 172, 92, 20, 14, 12, 34


@dataclass(frozen=True, slots=True)
class Row:
    """A phase: its name and colour, and its requests by round."""

    label: str
    colour: str
    rounds: tuple[Samples, ...]

    @property
    def points(self) -> list[float]:
        """The p99 of each round."""
        return [figures(samples).p99 for samples in self.rounds if len(samples)]

    @property
    def whole(self) -> Figures:
        """Of all rounds together."""
        return figures(merged(self.rounds))


Groups = Sequence[tuple[str, Sequence[Row]]]
"""Rows that belong together, by what they are about."""


def of_pair(measured: Measured) -> str:
    """A victim beside each kind of aggressor."""
    return draw(str(measured.pair), [(one.attack.other.kind, _phases(one)) for one in measured.results])


def of_lending(lent: Lent) -> str:
    """A lender at each load, with and without lending."""
    groups = [
        (f"load {level.load:.0%}", [Row(*LENDS[state], level.rounds[state]) for state in STATES]) for level in lent.levels
    ]
    return draw(str(lent.pair), groups)


def _phases(result: Result) -> list[Row]:
    return [Row(LABELS[which], COLOURS[which], result.rounds[which]) for which in PHASES]


def draw(what: str, groups: Groups) -> str:
    """The median (a ring), the p99 (a dot) and each round's p99 (faint dots), of every phase."""
    every = [one for _, rows in groups for row in rows for one in (row.whole.p50, row.whole.p99, *row.points) if one > 0]
    low, high = min(every, default=1.0) / 1.25, max(every, default=10.0) * 1.25
    height = TOP + sum(len(rows) * ROW + GROUP for _, rows in groups) + BOTTOM

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low) / math.log(high / low)

    parts, y = list(_grid(low, high, x, height)), float(TOP)
    for name, rows in groups:
        parts.append(f'<text x="0" y="{y + ROW * len(rows) / 2 + 4:.0f}" class="kind">{escape(name)}</text>')
        for row in rows:
            parts += _row(row, x, y + ROW / 2)
            y += ROW
        y += GROUP
    label = escape(f"Latency of {what}")
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _row(row: Row, x: Callable[[float], float], y: float) -> Iterator[str]:
    whole = row.whole
    yield f'<text x="{LEFT - 10}" y="{y + 4:.1f}" class="phase">{escape(row.label)}</text>'
    if math.isnan(whole.p99):
        return
    left, right = x(whole.p50), x(whole.p99)
    yield f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{row.colour}" stroke-width="3"/>'
    for one in row.points:
        yield f'<circle cx="{x(one):.1f}" cy="{y:.1f}" r="3.5" fill="{row.colour}" fill-opacity="0.45" stroke="#fff"/>'
    yield f'<circle cx="{left:.1f}" cy="{y:.1f}" r="3.5" fill="#fff" stroke="{row.colour}" stroke-width="2"/>'
    yield f'<circle cx="{right:.1f}" cy="{y:.1f}" r="6" fill="{row.colour}"/>'
    yield f'<text x="{WIDTH}" y="{y + 4:.1f}" class="value">{milliseconds(whole.p99)} ms</text>'


def _grid(low: float, high: float, x: Callable[[float], float], height: int) -> Iterator[str]:
    bottom = height - BOTTOM
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for step in (1, 2, 5):
            value = step * 10.0**exponent
            if low <= value <= high:
                place = f"{x(value):.1f}"
                yield f'<line x1="{place}" x2="{place}" y1="0" y2="{bottom}" class="grid"/>'
                yield f'<text x="{place}" y="{bottom + 18}" class="tick">{value / 1e3:g} ms</text>'
