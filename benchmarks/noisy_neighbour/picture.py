"""The picture: for each aggressor and server, which part of the victim's requests took longer than so many milliseconds."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from greenlane.report.page import INK, plain, png, tidy

from ..plots import cumulative
from .measure import Phase
from .plan import Which
from .summary import counted

COLOURS = ("#1a9c6b", "#d9622b", "#5b6ee1", "#b4569c")
DASHES: Mapping[Which, Any] = {"alone": (0, (2, 1.5)), "beside": "solid"}


def draw(phases: Sequence[Phase], about: Mapping[str, Any]) -> bytes:
    """A PNG file. Rounds that other programs disturbed are left out."""
    kinds, servers, quiet = list(about["settings"]["aggressors"]), list(about["servers"]), about["settings"]["quiet"]
    figure = Figure(figsize=(3.9 * len(kinds) + 0.3, 3.9), layout="constrained")
    row = figure.subplots(1, len(kinds), sharex=True, sharey=True, squeeze=False)[0]
    for axes, kind in zip(row, kinds, strict=True):
        for server, colour in zip(servers, COLOURS, strict=False):
            mine = [one for one in phases if (one.turn.server, one.turn.aggressor) == (server, kind)]
            rounds = list(counted(mine, quiet))
            for which, dash in DASHES.items():
                found = [latency / 1e3 for by in rounds for latency in by[which].samples.latency]
                style = {"color": colour, "linestyle": dash, "linewidth": 1.6, "label": f"{server}, {which}"}
                axes.step(*cumulative(found), where="post", **style)
        _style(axes, kind)
    row[0].set_ylabel("part of the requests that took longer")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    return png(figure)


def _style(axes: Any, kind: str) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(plain)
    axes.set_yscale("log")
    axes.set_ylim(5e-4, 1.3)
    axes.set_yticks([1, 0.1, 0.01, 0.001], ["all", "10 %", "1 %", "0.1 %"])
    axes.axhline(0.01, color=INK, linewidth=0.6, linestyle=":")
    axes.set_title(f"beside {kind}", loc="left", fontsize=10, color=INK)
    axes.set_xlabel("latency of the victim, ms")
    tidy(axes, "both")
