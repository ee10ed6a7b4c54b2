"""The live table in a terminal: drawn again after each look, and when a key is pressed or the terminal changes its size."""

import curses
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .rates import Rates, between
from .source import Look, Unreachable
from .table import lines

_KEYS = "q ends, m: models, space: stop"


def show(look: Callable[[], Look], interval: float, models: bool) -> None:
    """Blocks until q is pressed. A server that does not answer is asked again. Raises KeyboardInterrupt."""
    curses.wrapper(_run, look, interval, models)


def _run(window: Any, look: Callable[[], Look], interval: float, models: bool) -> None:
    with suppress(curses.error):  # Not every terminal can hide its cursor.
        curses.curs_set(0)
    curses.use_default_colors()
    before: Look | None = None
    rates: Rates | None = None
    problem, stopped, due = "", False, 0.0
    while True:
        if not stopped and time.monotonic() >= due:
            due = time.monotonic() + interval
            try:
                after = look()
                rates = (between(before, after) if before else None) or rates
                before, problem = after, ""
            except Unreachable as error:
                before, problem = None, str(error)
        _draw(window, rates, problem, models, stopped)
        window.timeout(-1 if stopped else max(1, int(1000 * (due - time.monotonic()))))
        key = window.getch()
        if key in (ord("q"), ord("Q")):
            return
        if key in (ord("m"), ord("M")):
            models = not models
        elif key == ord(" "):
            stopped = not stopped


def _draw(window: Any, rates: Rates | None, problem: str, models: bool, stopped: bool) -> None:
    height, width = window.getmaxyx()
    window.erase()
    text = [*problem.splitlines(), ""] if problem else []
    table = lines(rates, models, width) if rates else [] if problem else ["asking ..."]
    head = next((len(text) + index for index, line in enumerate(table) if line.startswith("TENANT")), -1)
    for row, line in enumerate([*text, *table][: height - 1]):
        emphasis = curses.A_REVERSE if row == head else curses.A_BOLD if row < len(text) else curses.A_NORMAL
        _put(window, row, line.ljust(width) if row == head else line, width, emphasis)
    _put(window, height - 1, f"{'stopped; ' if stopped else ''}{_KEYS}", width, curses.A_DIM)
    window.refresh()


def _put(window: Any, row: int, line: str, width: int, emphasis: int) -> None:
    with suppress(curses.error):  # The terminal may have become smaller meanwhile.
        window.addnstr(row, 0, line, max(0, width - 1), emphasis)
