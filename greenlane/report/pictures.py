"""Pictures as PNG files, drawn by matplotlib without a display. `require` says what to install where that is missing."""

import io
from importlib.util import find_spec
from typing import Any

from partitions.installing import install_command

INK, FAINT = "#1f2933", "#e4e7eb"


class NoPictures(ImportError):
    """matplotlib is not installed."""


def require(what: str) -> None:
    """Raise NoPictures, naming `what` needs it, unless pictures can be drawn. Imports nothing."""
    if find_spec("matplotlib") is None:
        raise NoPictures(f"{what} needs matplotlib, which is not installed; run {install_command('plots')}, or leave it out")


def png(figure: Any) -> bytes:
    """A figure of matplotlib as a PNG of 64 colours: a third of the bytes, for repositories."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # matplotlib needs it too.

    drawn, small = io.BytesIO(), io.BytesIO()
    FigureCanvasAgg(figure).print_figure(drawn, dpi=120, facecolor="white")
    Image.open(drawn).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    return small.getvalue()


def plain(value: float, _: float) -> str:
    """A tick's label: 100 and not 10 to the power of 2."""
    return f"{value:g}"


def tidy(axes: Any, grid: str) -> None:
    """Axes without a box around them; `grid` is "x", "y" or "both"."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, which="both", color=FAINT)
    axes.grid(axis=grid, color=FAINT)
    axes.set_axisbelow(True)
