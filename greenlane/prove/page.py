"""The findings as one HTML page that needs nothing else, and loads nothing.

Each pair is drawn as SVG: latency to the right, logarithmic; a row for each phase.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from greenlane.load.figures import Figures, Samples, figures, merged
from greenlane.load.rules import BOUND, ENOUGH
from greenlane.report.page import chip, document, each, pairs, table
from partitions.plan import ranges

from . import lending
from .attacks import WHAT
from .findings import Findings
from .lending import STATES, Lent, State
from .measure import Measured, Result
from .plan import PHASES, Which
from .text import COUNTED, MEANS, ONLY_SAID, about, about_lending, grown, legend, milliseconds, rates, short, times

_STYLE = Path(__file__).parent / "page.css"
LENDING_NOTES = (
    "Two servers of the configuration run at the same time, of which one lends nothing. The lender is asked on both in turns, "
    "while the borrower is as busy as it can be on the same one. Requests are sent when they are due, whatever came before.",
    f"At most {lending.BOUND:g} times are allowed. Inferences of the borrower have to run on the lender's share, some of them "
    "when it has a request again: otherwise nothing was lent, and the lender's latency proves nothing.",
    "A single request after idling may be late by as much as the lender lends for (its key lend).",
)
_TONES: dict[str, str] = {"isolated": "good", "leaks": "bad", "not exercised": "mute", "too noisy": "mute"}


def render(findings: Findings) -> str:
    """The page."""
    title = f"Isolation of {findings.source}"
    parts = [
        f"<header><h1>{escape(title)}</h1>{_verdict(findings)}</header>",
        f"<section><h2>Where work ran</h2>{_located(findings)}</section>",
        *(_pair(findings, each) for each in findings.measured),
        *(_unfenced(findings, each) for each in findings.unfenced),
        *(_lent(findings, each) for each in findings.lending),
        _untried(findings),
        f"<section><h2>How to read this</h2>{_notes(findings)}</section>",
        f"<section><h2>On what</h2>{pairs(findings.machine)}</section>",
    ]
    return document(title, parts, _STYLE)


def _verdict(findings: Findings) -> str:
    counts = " ".join(f"{_chip(word)} {count}" for word, count in findings.counts.items())
    ended = f"<p>{escape(findings.ended)}</p>" if findings.ended else ""
    what = f"<b>{escape(findings.word)}</b><span>{escape(MEANS[findings.word])}</span>"
    return f'<div class="verdict {_TONES[findings.word]}">{what}</div>{ended}<p class="counts">Pairs: {counts or "none"}</p>'


def _located(findings: Findings) -> str:
    rows = [
        f"<tr>{each('td', [one.tenant, ' '.join((one.unit, ranges(one.units) or 'none'))])}"
        f"<td>{_chip(one.word)} {escape(one.why)}</td>"
        f"<td>{_chip(one.own_word) if one.own_why else ''} {escape(one.own_why)}</td></tr>"
        for one in findings.located
    ]
    return table(["tenant", "partition", "the probe's work", "the models' own work"], rows, "words")


def _pair(findings: Findings, measured: Measured) -> str:
    word = findings.words[measured.pair]
    return (
        f"<section><h2>{escape(str(measured.pair))} {_chip(word)}</h2><p>{escape(about(measured))}</p>"
        f"{_felt(measured, strains=False, judged=True)}</section>"
    )


def _unfenced(findings: Findings, measured: Measured) -> str:
    felt = _felt(measured, strains=True, judged=findings.memory)
    return (
        f"<section><h2>What partitions do not fence: {escape(str(measured.pair))}</h2><p>{escape(about(measured))}. "
        f"{COUNTED if findings.memory else ONLY_SAID}</p>{felt}</section>"
    )


def _felt(measured: Measured, strains: bool, judged: bool) -> str:
    """A picture and a table of what a victim felt of each kind of aggressor, or strain."""
    first, *last = ("strain", "GB/s alone", "beside", "why") if strains else ("aggressor", "busy", "verdict")
    heads = [first, "p99 alone, ms", "beside it", "control", "growth, with interval", "control", *last]
    rows = []
    for result in measured.results:
        kind = result.attack.other.kind
        points = [milliseconds(result.figures(which).p99) for which in PHASES]
        growths = [grown(result), short(result.shared.decisive(BOUND).value)]
        cells = each("td", [*points, *growths, *(rates(result) if strains else [f"{result.busy:.0%}"])])
        why = f'<td class="why">{_chip(result.ruling.word) if judged else ""} {escape(result.ruling.why)}</td>'
        rows.append(f'<tr><td title="{escape(WHAT[kind])}">{escape(kind)}</td>{cells}{why}</tr>')
    fenced = f"<ul>{each('li', measured.fenced)}</ul>" if measured.fenced else ""
    return f"<figure>{of_pair(measured)}</figure>{table(heads, rows)}{fenced}"


def _lent(findings: Findings, lent: Lent) -> str:
    heads = ["load", "requests a second", "p99, lending nothing, ms", "lending", "growth, with interval", "borrower", "verdict"]
    rows = []
    for level in lent.levels:
        off, on = (milliseconds(figures(merged(level.rounds[state])).p99) for state in STATES)
        grown, gained = times(level.growth.decisive(lending.BOUND)), f"{level.gained:.2f} times"
        cells = [f"{level.load:.0%}", f"{level.rate:.0f}", off, on, grown, gained]
        rows.append(f'<tr>{each("td", cells)}<td class="why">{_chip(level.ruling.word)} {escape(level.ruling.why)}</td></tr>')
    first = f"<p>{_chip(lent.first.word)} {escape(lent.first.why)}</p>"
    title = f"{lent.pair.victim} lends to {lent.pair.aggressor}"
    return (
        f"<section><h2>{escape(title)} {_chip(findings.words[lent.pair])}</h2><p>{escape(about_lending(lent))}</p>"
        f"<figure>{of_lending(lent)}</figure>{table(heads, rows)}{first}</section>"
    )


def _untried(findings: Findings) -> str:
    if not findings.untried and not any(each.undriven for each in findings.tenants):
        return ""
    lines = [f"{pair}: {why}" for pair, why in findings.untried.items()]
    lines += [f"{each.name}: {name} was not asked: {why}" for each in findings.tenants for name, why in each.undriven.items()]
    return f"<section><h2>Not tried</h2><ul>{each('li', lines)}</ul></section>"


def _notes(findings: Findings) -> str:
    if findings.lending:
        return f"<ul>{each('li', LENDING_NOTES)}</ul>"
    lines = [
        "The victim's requests are sent when they are due, whatever came of those before, and latency counts from then. "
        f"Aggressors: {legend(findings)}.",
        "Alone, beside the aggressor, and control take turns. In the control the same load goes to the victim's own partition. "
        "It has to be felt there: otherwise the result would have been the same without partitions, and is not exercised.",
        "Growth is that of the median or of the tail, whichever decides, with the interval that has 95 % of a bootstrap. "
        f"At most {BOUND:g} is allowed. With fewer than {ENOUGH} requests of a kind the tail is the p90.",
        "In the pictures: a ring is the median, a dot the p99, faint dots are the p99 of each round.",
        "Memory bandwidth, caches, power and the kernel are shared by all tenants; a partition does not limit them.",
    ]
    return f"<ul>{each('li', lines)}</ul>"


def _chip(word: str) -> str:
    return chip(word, _TONES.get(word, "mute"))


GREY, GREEN, ORANGE = "#7b8794", "#12855c", "#d0571f"
COLOURS: dict[Which, str] = {"alone": GREY, "beside": GREEN, "control": ORANGE}
LABELS: dict[Which, str] = {"alone": "alone", "beside": "beside it", "control": "control"}
LENDS: dict[State, tuple[str, str]] = {"off": ("lends nothing", GREY), "on": ("lends", GREEN)}
WIDTH, LEFT, RIGHT, ROW, GROUP, TOP, BOTTOM = 860, 192, 92, 20, 14, 12, 34


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
            parts += _drawn(row, x, y + ROW / 2)
            y += ROW
        y += GROUP
    label = escape(f"Latency of {what}")
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _drawn(row: Row, x: Callable[[float], float], y: float) -> Iterator[str]:
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
