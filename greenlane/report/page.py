"""One HTML page that needs no other file: style and pictures are inside it, drawn by matplotlib without a display."""

import io
from base64 import b64encode
from collections.abc import Iterable, Mapping
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from partitions.installing import install_command

_FOLDER = Path(__file__).parent
STYLE = _FOLDER / "style.css"
"""The style of a page of tiles, pictures and tables."""


def document(title: str, parts: Iterable[str], style: Path = STYLE) -> str:
    """The whole page; `parts` are HTML, everything else here escapes what it is given. `style` adds to what all pages have."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body, styles = "\n".join(parts), "".join(each.read_text(encoding="utf-8") for each in (_FOLDER / "base.css", style))
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{styles}</style></head>\n<body>\n{body}\n</body></html>\n'


def tiles(numbers: Iterable[tuple[str, str]]) -> str:
    """The few figures that matter most, each with what it is. The figures are HTML."""
    cells = "".join(f"<div><b>{number}</b><span>{escape(what)}</span></div>" for number, what in numbers)
    return f'<div class="tiles">{cells}</div>'


def picture(png: bytes, caption: str) -> str:
    """A picture with its caption."""
    data, text = b64encode(png).decode(), escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def pairs(facts: Mapping[str, Any]) -> str:
    """Facts by their headings."""
    return f"<dl>{''.join(f'<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>' for key, value in facts.items())}</dl>"


def each(tag: str, texts: Iterable[str]) -> str:
    """An element for each text."""
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def table(heads: Iterable[str], rows: Iterable[str], kind: str = "") -> str:
    """A table, which is as wide as it has to be; `rows` are HTML, and `kind` is its class."""
    head, body = each("th", heads), "".join(rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def chip(word: str, tone: str) -> str:
    """A word on a colour: "good", "bad" or "mute"."""
    return f'<span class="chip {tone}">{escape(word)}</span>'


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
