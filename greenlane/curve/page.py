"""The curve as a picture, and as one HTML page that has it and needs no other file."""

from collections.abc import Iterator
from html import escape
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from greenlane.report.page import INK, chip, document, each, pairs, picture, plain, png, table, tidy, tiles

from .curve import Curve
from .points import LESS, Point
from .text import DRAWN, conclusions, drawn_cells, short, toml, units, wanted

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
_COUNTED = (
    "What requests back to back move of the GPU's memory, read and written, and over PCIe, into the GPU and out of it, is by "
    "the GPU's own counters, which see all programs.",
)


def render(curve: Curve, drawn: bytes) -> str:
    """The page; `drawn` is the PNG of `draw`."""
    title = f"{curve.model}, batch {curve.batch}: how many {curve.unit}s it needs"
    caption = f"Left: throughput by share; the knee is where no larger share has over {LESS:.0%} more. Right: latency by share."
    lines, how = toml(curve), _HOW + (_COUNTED if curve.points[0].drawn else ())
    parts = [
        f"<header><h1>{escape(title)}</h1>{tiles(_tiles(curve))}</header>",
        f"<section><ul>{each('li', conclusions(curve))}</ul></section>",
        picture(drawn, caption),
        f"<section><h2>In numbers</h2>{_table(curve)}</section>",
        f"<section><h2>To paste into the configuration</h2><pre>{escape(lines)}</pre></section>" if lines else "",
        f"<section><h2>How it was measured</h2><ul>{each('li', how)}</ul></section>",
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
    names += DRAWN if curve.points[0].drawn else ()
    names += ["p50 at rate", "p99 at rate", "95 % interval", "requests", ""] if curve.target else []
    return table(names, map(_row, curve.points))


def _row(point: Point) -> str:
    cells = [str(point.size), f"{point.throughput:,.0f}", short(point.p50), short(point.p99), *drawn_cells(point)]
    verdict = ""
    if found := point.at_rate:
        p99 = found.p99
        interval = [short(p99.value), f"{short(p99.low)} to {short(p99.high)}", str(p99.requests)] if p99 else ["-"] * 3
        cells += [short(found.p50) if p99 else "-", *interval]
        verdict = f"<td>{chip(found.word, _TONES.get(found.word, 'bad'))}</td>"
    return f"<tr>{each('td', cells)}{verdict}</tr>"


_ALONE, _LOADED, _BAD, _UNSURE = "#9aa5b1", "#1a9c6b", "#d9622b", "#c9a227"


def draw(curve: Curve) -> bytes:
    """A PNG: throughput with its knee on the left, latencies with the target on the right."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _throughput(left, curve)
    _latency(right, curve)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks([point.size for point in curve.points])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(plain)
        axes.set_xlabel(f"{curve.unit}s, of {curve.total}")
        axes.margins(x=0.08)
        tidy(axes, "both")
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)  # No line crosses it.
    figure.suptitle(f"{curve.model}, batch {curve.batch}", x=0.01, ha="left", fontsize=12, color=INK)
    return png(figure)


def _throughput(axes: Any, curve: Curve) -> None:
    sizes = [point.size for point in curve.points]
    axes.plot(sizes, [point.throughput for point in curve.points], "o-", color=_LOADED, label="back to back")
    if found := curve.knee:
        axes.plot(found.size, found.throughput, "o", ms=14, mfc="none", mec=INK, label=f"knee: {units(found.size, curve.unit)}")
    if curve.target:
        axes.axhline(curve.target.rate, color=_BAD, linestyle="--", linewidth=1, label=f"{curve.target.rate:g} a second")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("requests a second")


def _latency(axes: Any, curve: Curve) -> None:
    sizes = [point.size for point in curve.points]
    axes.plot(sizes, [1e3 * point.p50 for point in curve.points], "o-", color=_ALONE, label="p50, one alone")
    groups = (
        ("keeps", _LOADED, "p99 at the rate: keeps the target"),
        ("misses", _BAD, "p99 at the rate: misses it"),
        ("overloaded", _BAD, "overloaded"),
        ("too noisy", _UNSURE, "p99 at the rate: too noisy"),
        ("too few", _UNSURE, "p99 at the rate: too few requests"),
        ("measured", _LOADED, "p99 at the rate"),
    )
    for word, colour, label in groups:
        if found := [point for point in curve.points if point.at_rate and point.at_rate.word == word]:
            _p99s(axes, found, colour, label, "x" if word == "overloaded" else "o")
    if curve.target and curve.target.p99:
        axes.axhline(1e3 * curve.target.p99, color=INK, linestyle="--", linewidth=1, label="target p99")
    if curve.smallest:
        axes.axvline(curve.smallest.size, color=_LOADED, linewidth=8, alpha=0.15, label="smallest share that keeps it")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(plain)
    axes.set_ylabel("latency, ms")


def _p99s(axes: Any, points: list[Point], colour: str, label: str, marker: str) -> None:
    """Draw p99 and its confidence interval for each share. An overloaded share has no p99, or its p99 grows with the time of
    measurement.
    """
    there = [(point.size, point.at_rate.p99) for point in points if point.at_rate and point.at_rate.p99]
    if not there:
        axes.plot([], [], marker, color=colour, label=f"{label}: {', '.join(str(point.size) for point in points)}")
        return
    sizes, values = [size for size, _ in there], [1e3 * p99.value for _, p99 in there]
    below, above = [1e3 * (p99.value - p99.low) for _, p99 in there], [1e3 * (p99.high - p99.value) for _, p99 in there]
    axes.errorbar(sizes, values, [below, above], fmt=marker, color=colour, capsize=4, label=label)
