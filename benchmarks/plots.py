"""The findings as pictures: p99 bars, the distribution of latencies, and what happened when. PNG, drawn without a display."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure

from greenlane.report.page import INK, plain, png, tidy

from .findings import Findings, times
from .verdicts import ALONE, CONTROL, CONTROL_ALONE, UNDER, Combination, Phase, Verdict

COLOURS = {ALONE: "#9aa5b1", UNDER: "#1a9c6b", CONTROL_ALONE: "#d9c2b4", CONTROL: "#d9622b"}
LABELS = {ALONE: "alone", UNDER: "its own partition, under load", CONTROL: "one partition for all, under load"}


def draw(findings: Findings) -> dict[str, bytes]:
    """Every picture by its name: `bars`, `distributions`, `timeline`."""
    pictures: dict[str, Callable[[Findings], Figure]] = {"bars": bars, "distributions": distributions, "timeline": timeline}
    return {name: png(picture(findings)) for name, picture in pictures.items()}


def cumulative(values: Iterable[float], points: int = 400) -> tuple[list[float], list[float]]:
    """Latencies and the part of requests slower than each, for a plot: every step where there are few, thinned where many."""
    ascending = sorted(values)
    count = len(ascending)
    picked = sorted({*range(0, count, max(1, count // points)), *range(max(0, count - points // 4), count)})
    return [ascending[index] for index in picked], [(count - index) / count for index in picked]


def bars(findings: Findings) -> Figure:
    """The victim's p99 of every combination: alone, in its own partition, and without one."""
    verdicts = findings.verdicts
    figure = Figure(figsize=(11, 1.1 + 0.62 * len(verdicts)), layout="constrained")
    axes = figure.subplots()
    for kind, shift in ((ALONE, -0.27), (UNDER, 0.0), (CONTROL, 0.27)):
        rows = [(y + shift, value) for y, one in enumerate(verdicts) if (value := _p99(one, kind)) is not None]
        places, values = [y for y, _ in rows], [value for _, value in rows]
        axes.barh(places, values, 0.25, color=COLOURS[kind], label=LABELS[kind], zorder=2)
    for y, one in enumerate(verdicts):
        _mark(axes, y, _p99(one, UNDER), one.ratios["p99"], COLOURS[UNDER])
        _mark(axes, y + 0.27, _p99(one, CONTROL), one.control_ratio, COLOURS[CONTROL])
    axes.set_yticks(range(len(verdicts)), _names(verdicts), fontsize=11)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(plain)
    axes.margins(x=0.08)
    axes.set_xlabel("p99 of the victim, ms (logarithmic); the number is how many times its p99 alone on the same server")
    tidy(axes, "x")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=11)
    return figure


def distributions(findings: Findings) -> Figure:
    """For every combination, the part of requests that took longer than so many milliseconds, all rounds together."""
    count = len(findings.combinations)
    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.7 * columns + 0.4, 2.6 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, combination in zip(grid.flat, findings.combinations, strict=False):
        _distribution(axes, combination)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("latency, ms")
    for axes in grid[:, 0]:
        axes.set_ylabel("slower than that")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False)
    return figure


def timeline(findings: Findings) -> Figure:
    """Every request of the victim in one round, when it was due: in its own partition above, without one below."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharey=True)
    phases = findings.phases
    middle = sorted({phase.round for phase in phases})[len({phase.round for phase in phases}) // 2]
    owners = {id(p): _name(c, findings) for c in findings.combinations for p in c.phases}
    rows = (upper, (ALONE, UNDER), "its own partition"), (lower, (CONTROL_ALONE, CONTROL), "one partition for all")
    for axes, kinds, title in rows:
        _strip(axes, [p for p in phases if p.kind in kinds and p.round == middle], owners)
        axes.set_title(title, loc="left", fontsize=11, color=INK)
    lower.set_xlabel("seconds of measurement, one round; grey is the victim alone")
    return figure


def _distribution(axes: Any, combination: Combination) -> None:
    for kind in (ALONE, CONTROL, UNDER):
        latencies = [value / 1e3 for phase in combination.of(kind) for value in phase.samples.latency]
        if latencies:
            axes.step(*cumulative(latencies), where="post", color=COLOURS[kind], label=LABELS[kind], linewidth=1.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(plain)
    axes.set_yscale("log")
    axes.set_yticks([1, 0.1, 0.01, 0.001], ["all", "10 %", "1 %", "0.1 %"])
    axes.axhline(0.01, color=INK, linewidth=0.6, linestyle=":")
    axes.set_title(f"{combination.victim} / {combination.aggressor}", loc="left", fontsize=10, color=INK)
    tidy(axes, "both")


def _strip(axes: Any, phases: Sequence[Phase], owners: dict[int, str]) -> None:
    """Phases side by side, in order; those under load with a band and a name."""
    at = 0.0
    for phase in phases:
        width = max(phase.samples.due, default=0.0) + 0.05
        points = [at + due for due in phase.samples.due]
        axes.scatter(points, [value / 1e3 for value in phase.samples.latency], s=3, color=COLOURS[phase.kind], linewidths=0)
        if phase.kind in (UNDER, CONTROL):
            axes.axvspan(at, at + width, color=COLOURS[phase.kind], alpha=0.08, linewidth=0)
            _label(axes, at, owners[id(phase)])
        at += width + 0.1
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(plain)
    axes.margins(y=0.25)
    axes.set_ylabel("latency, ms")
    axes.margins(x=0.01)
    tidy(axes, "y")


def _label(axes: Any, at: float, text: str) -> None:
    box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}
    axes.text(at + 0.05, 0.98, text, transform=axes.get_xaxis_transform(), fontsize=7.5, va="top", rotation=90, bbox=box)


def _name(combination: Combination, findings: Findings) -> str:
    """The victim's name too where there are several."""
    several = len({one.victim for one in findings.combinations}) > 1
    return f"{combination.victim} / {combination.aggressor}" if several else combination.aggressor


def _names(verdicts: Sequence[Verdict]) -> list[str]:
    several = len({one.victim for one in verdicts}) > 1
    return [f"{one.victim} / {one.aggressor}" if several else one.aggressor for one in verdicts]


def _p99(verdict: Verdict, kind: str) -> float | None:
    found = {ALONE: verdict.alone, UNDER: verdict.under, CONTROL: verdict.control}[kind]
    return None if found is None else found.p99 / 1e3


def _mark(axes: Any, y: float, value: float | None, ratio: float, colour: str) -> None:
    if value is not None:
        text = f"{times(ratio)}\N{MULTIPLICATION SIGN}"
        axes.annotate(text, (value, y), (4, 0), textcoords="offset points", va="center", fontsize=9, color=colour)
