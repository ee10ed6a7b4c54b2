"""Runs `greenlane top`."""

import argparse
import curses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from greenlane.options import checked, positive

from .rates import Rates, between
from .source import KEY, Look, Unreachable, look
from .table import lines

DEFAULT_URL = "http://127.0.0.1:8000"
_EXAMPLES = f"""\
examples:
  {{program}}                               the server on this machine's port 8000
  {{program}} http://10.0.0.7:8000          another one, with its admin key in {KEY}
  {{program}} --once                        one table, for a pipe
  {{program}} --json | jq .tenants          an object each time, one a line

columns: SHARE cores or SMs of the tenant; USED, IDLE and LENT in percent of them; BORROWED cores or SMs of others, on average;
RUN/S runs of models; REQ/S answered requests, P99 of them from the complete body to the encoded answer; WAIT requests that
wait now; REFUSED/S refused, also for a limit, or too late; MEMORY of the device; WATTS of it by use, without its idle power;
MOVES bytes of its memory a second, PCIE bytes over PCIe, with ~ where they are estimated; NARROW/S runs that were held to fewer
granules for a share of bandwidth.

keys: q ends, m shows and hides models, space stops and goes on.

exit status: 0 shown; 1 the server cannot be reached, or refuses; 2 the command line is wrong
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What is shown of which server; `interval` in seconds."""

    url: str
    key: str | None
    interval: float
    once: bool
    json: bool
    models: bool


def parse(arguments: Sequence[str], program: str) -> Options:
    """Ends the process with status 2, and a sentence, for a wrong command line."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Show what each tenant has and uses, live.",
        epilog=_EXAMPLES.format(program=program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, type=checked(_url), help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--interval", type=positive, default=2.0, metavar="SECONDS", help="time between two tables (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="show one interval and end")
    parser.add_argument("--json", action="store_true", help="objects in place of tables")
    parser.add_argument("--no-models", action="store_true", help="tenants only")
    found = parser.parse_args(arguments)
    key = os.environ.get(KEY) or None
    return Options(found.url, key, found.interval, found.once, found.json, not found.no_models)


def _url(text: str) -> str:
    """Raises ValueError."""
    text = text if "://" in text else f"http://{text}"
    scheme, _, rest = text.partition("://")
    if scheme not in ("http", "https") or not rest.strip("/") or not _has_port(text):
        raise ValueError(f"{text!r}; expected the address of a server, such as {DEFAULT_URL}")
    return text.rstrip("/")


def _has_port(text: str) -> bool:
    """Whether an address can be read, and its port, if it has one, is a port."""
    try:
        return urlsplit(text).port != 0
    except ValueError:
        return False


def main(arguments: Sequence[str], program: str) -> int:
    """Run a command line, and return the exit status."""
    options = parse(arguments, program)
    ask = partial(look, options.url, options.key)
    try:
        if options.once or options.json or not sys.stdout.isatty():
            return _print(options, ask)
        ask()  # Better an error before the screen is taken than on it.
        from .command import show

        show(ask, options.interval, options.models)
    except Unreachable as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0 if not options.once else 130
    except BrokenPipeError:  # What reads the pipe has ended, such as `head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print(options: Options, ask: Callable[[], Look], sleep: Callable[[float], object] = time.sleep) -> int:
    """Tables or objects, one after another, or only one. Raises Unreachable."""
    before = ask()
    while True:
        sleep(options.interval)
        after = ask()
        if rates := between(before, after):
            print(json.dumps(asdict(rates)) if options.json else "\n".join(_table(rates, options)), flush=True)
            if options.once:
                return 0
        before = after


def _table(rates: Rates, options: Options) -> list[str]:
    return lines(rates, options.models) + ([] if options.once else [""])


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
