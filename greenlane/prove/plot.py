"""One pair as a picture: SVG, which a page holds without a library. Latency to the right, logarithmic; a row for each phase."""

import math
from collections.abc import Iterator
from html import escape

from greenlane.load.figures import Figures, figures

from .measure import Measured, Result
from .plan import PHASES, Which
from .text import milliseconds

COLOURS: dict[Which, str] = {"alone": "#7b8794", "beside": "#12855c", "control": "#d0571f"}
LABELS: dict[Which, str] = {"alone": "alone", "beside": "beside it", "control": "control"}
WIDTH, LEFT, RIGHT, ROW, GROUP, TOP, BOTTOM = 860, 172, 92, 20, 14, 12, 34


def draw(measured: Measured) -> str:
    """The median (small dot), the p99 (large dot) and each round's p99 (faint), of every phase."""
    rows = [(result, which) for result in measured.results for which in PHASES]
    every = [one for result, which in rows for one in _values(result, which)]
    low, high = min(every, default=1.0), max(every, default=10.0)
    low, high = 10 ** math.floor(math.log10(low) * 2) if low <= 0 else low / 1.25, high * 1.25
    height = TOP + len(rows) * ROW + len(measured.results) * GROUP + BOTTOM

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low) / math.log(high / low)

    parts, y = list(_grid(low, high, x, height)), float(TOP)
    for result in measured.results:
        parts.append(f'<text x="0" y="{y + ROW * 1.5 + 4:.0f}" class="kind">{escape(result.attack.other.kind)}</text>')
        for which in PHASES:
            parts += _row(result, which, x, y + ROW / 2)
            y += ROW
        y += GROUP
    label = escape(f"Latency of {measured.pair}")
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _values(result: Result, which: Which) -> list[float]:
    whole = result.figures(which)
    return [one for one in (whole.p50, whole.p99, *_rounds(result, which)) if not math.isnan(one)]


def _rounds(result: Result, which: Which) -> list[float]:
    return [figures(samples).p99 for samples in result.rounds[which] if len(samples)]


def _row(result: Result, which: Which, x: object, y: float) -> Iterator[str]:
    at = x if callable(x) else float
    whole: Figures = result.figures(which)
    yield f'<text x="{LEFT - 10}" y="{y + 4:.1f}" class="phase">{LABELS[which]}</text>'
    if math.isnan(whole.p99):
        return
    colour, left, right = COLOURS[which], at(whole.p50), at(whole.p99)
    for one in _rounds(result, which):
        yield f'<circle cx="{at(one):.1f}" cy="{y:.1f}" r="3" fill="{colour}" opacity="0.4"/>'
    yield f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}" stroke-width="3"/>'
    yield f'<circle cx="{left:.1f}" cy="{y:.1f}" r="3.5" fill="#fff" stroke="{colour}" stroke-width="2"/>'
    yield f'<circle cx="{right:.1f}" cy="{y:.1f}" r="6" fill="{colour}"/>'
    yield f'<text x="{WIDTH}" y="{y + 4:.1f}" class="value">{milliseconds(whole.p99)} ms</text>'


def _grid(low: float, high: float, x: object, height: int) -> Iterator[str]:
    at = x if callable(x) else float
    bottom = height - BOTTOM
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for step in (1, 2, 5):
            value = step * 10.0**exponent
            if low <= value <= high:
                place = f"{at(value):.1f}"
                yield f'<line x1="{place}" x2="{place}" y1="0" y2="{bottom}" class="grid"/>'
                yield f'<text x="{place}" y="{bottom + 18}" class="tick">{value / 1e3:g} ms</text>'
