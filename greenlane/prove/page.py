"""The findings as one HTML page that needs nothing else, and loads nothing."""

from html import escape
from pathlib import Path

from greenlane.load.figures import figures, merged
from greenlane.load.rules import BOUND, ENOUGH
from greenlane.report.page import chip, document, each, pairs, table
from partitions.plan import ranges

from . import lending
from .attacks import WHAT
from .findings import Findings
from .lending import STATES, Lent
from .measure import Measured, Result
from .plot import of_lending, of_pair
from .text import COUNTED, MEANS, ONLY_SAID, about, about_lending, legend, milliseconds, rates, short, times

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
    rows = [_row(result) for result in measured.results]
    heads = ["aggressor", "p99 alone, ms", "beside it", "control", "growth, with interval", "control", "busy", "verdict"]
    return (
        f"<section><h2>{escape(str(measured.pair))} {_chip(word)}</h2><p>{escape(about(measured))}</p>"
        f"<figure>{of_pair(measured)}</figure>{table(heads, rows)}</section>"
    )


def _row(result: Result) -> str:
    points = [milliseconds(result.figures(which).p99) for which in ("alone", "beside", "control")]
    grown = [f"{times(result.held.decisive(BOUND))}", short(result.shared.decisive(BOUND).value), f"{result.busy:.0%}"]
    name = f'<td title="{escape(WHAT[result.attack.other.kind])}">{escape(result.attack.other.kind)}</td>'
    why = f'<td class="why">{_chip(result.ruling.word)} {escape(result.ruling.why)}</td>'
    return f"<tr>{name}{each('td', [*points, *grown])}{why}</tr>"


def _unfenced(findings: Findings, measured: Measured) -> str:
    rows = []
    for result in measured.results:
        kind = result.attack.other.kind
        points = [milliseconds(result.figures(which).p99) for which in ("alone", "beside", "control")]
        grown = [times(result.held.decisive(BOUND)), short(result.shared.decisive(BOUND).value), *rates(result)]
        word = _chip(result.ruling.word) if findings.memory else ""
        why = f'<td class="why">{word} {escape(result.ruling.why)}</td>'
        rows.append(f'<tr><td title="{escape(WHAT[kind])}">{escape(kind)}</td>{each("td", [*points, *grown])}{why}</tr>')
    heads = [
        "strain",
        "p99 alone, ms",
        "beside it",
        "control",
        "growth, with interval",
        "control",
        "GB/s alone",
        "beside",
        "why",
    ]
    return (
        f"<section><h2>What partitions do not fence: {escape(str(measured.pair))}</h2><p>{escape(about(measured))}. "
        f"{COUNTED if findings.memory else ONLY_SAID}</p><figure>{of_pair(measured)}</figure>{table(heads, rows)}</section>"
    )


def _lent(findings: Findings, lent: Lent) -> str:
    heads = ["load", "requests a second", "p99, lending nothing, ms", "lending", "growth, with interval", "borrower", "verdict"]
    rows = []
    for level in lent.levels:
        off, on = (milliseconds(figures(merged(level.rounds[state])).p99) for state in STATES)
        cells = [
            f"{level.load:.0%}",
            f"{level.rate:.0f}",
            off,
            on,
            times(level.growth.decisive(lending.BOUND)),
            f"{level.gained:.2f} times",
        ]
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
