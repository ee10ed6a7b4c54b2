"""The curve as one HTML page that needs no other file."""

from collections.abc import Iterator
from html import escape

from greenlane.report.page import chip, document, each, pairs, picture, table, tiles

from .curve import Curve
from .points import LESS, Point
from .text import conclusions, short, toml, units, wanted

_TONES = {"keeps": "good", "measured": "mute", "too noisy": "mute", "too few": "mute"}
_HOW = (
    "Each share is carved and the model bound to it as in the server; requests are tensors in page-locked memory, so copies to "
    "and from a GPU are included. HTTP and JSON are not, and neighbours neither: each share is measured alone on the device.",
    "Throughput: requests back to back. Alone: one request after another, without a queue.",
    "At a rate: requests are due at random (Poisson), run in order, and latency counts from when each is due. They are not "
    "joined to batches.",
    "The interval of a p99 has it with 95 %; requests that queue behind each other make it wider. A share keeps the target if "
    "all of the interval does.",
)


def render(curve: Curve, drawn: bytes) -> str:
    """The page; `drawn` is the PNG of `pictures.draw`."""
    title = f"{curve.model}, batch {curve.batch}: how many {curve.unit}s it needs"
    caption = f"Left: throughput by share; the knee is where no larger share has over {LESS:.0%} more. Right: latency by share."
    lines = toml(curve)
    parts = [
        f"<header><h1>{escape(title)}</h1>{tiles(_tiles(curve))}</header>",
        f"<section><ul>{each('li', conclusions(curve))}</ul></section>",
        picture(drawn, caption),
        f"<section><h2>In numbers</h2>{_table(curve)}</section>",
        f"<section><h2>To paste into the configuration</h2><pre>{escape(lines)}</pre></section>" if lines else "",
        f"<section><h2>How it was measured</h2><ul>{each('li', _HOW)}</ul></section>",
        f"<section><h2>On what</h2>{pairs({'device': curve.device, **curve.machine})}</section>",
    ]
    return document(title, parts)


def _tiles(curve: Curve) -> Iterator[tuple[str, str]]:
    if curve.target and curve.target.p99:
        share = units(curve.smallest.size, curve.unit) if curve.smallest else "none"
        yield share, f"the smallest share that keeps {wanted(curve.target)}"
    bend = curve.knee
    yield units(bend.size, curve.unit) if bend else "none", "the knee: more bring little"
    fastest = max(curve.points, key=lambda point: point.throughput)
    yield f"{fastest.throughput:,.0f}/s", f"the most, on {units(fastest.size, curve.unit)}"


def _table(curve: Curve) -> str:
    names = [f"{curve.unit}s", "requests/s", "p50 alone", "p99 alone"]
    names += ["p50 at rate", "p99 at rate", "95 % interval", "requests", ""] if curve.target else []
    return table(names, map(_row, curve.points))


def _row(point: Point) -> str:
    cells = [str(point.size), f"{point.throughput:,.0f}", short(point.p50), short(point.p99)]
    verdict = ""
    if found := point.at_rate:
        p99 = found.p99
        interval = [short(p99.value), f"{short(p99.low)} to {short(p99.high)}", str(p99.requests)] if p99 else ["-"] * 3
        cells += [short(found.p50) if p99 else "-", *interval]
        verdict = f"<td>{chip(found.word, _TONES.get(found.word, 'bad'))}</td>"
    return f"<tr>{each('td', cells)}{verdict}</tr>"
