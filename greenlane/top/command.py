"""Runs `greenlane top`: a table of the rates between two looks, drawn again and again where there is a terminal."""

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

from greenlane.options import DEFAULT_URL, checked, positive, server_url

from .rates import DeviceRates, ModelRates, Moving, Rates, TenantRates, between
from .source import KEY, Look, Unreachable, look

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
    url = checked(partial(server_url, key=KEY))
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, type=url, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--interval", type=positive, default=2.0, metavar="SECONDS", help="time between two tables (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="show one interval and end")
    parser.add_argument("--json", action="store_true", help="objects in place of tables")
    parser.add_argument("--no-models", action="store_true", help="tenants only")
    found, unknown = parser.parse_known_args(arguments)
    if any(word.partition("=")[0] == "--url" for word in unknown):
        parser.error(f"unexpected --url; the server is a word by itself: {program} URL")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    key = os.environ.get(KEY) or None
    return Options(found.url, key, found.interval, found.once, found.json, not found.no_models)


def main(arguments: Sequence[str], program: str) -> int:
    """Run a command line, and return the exit status."""
    options = parse(arguments, program)
    ask = partial(look, options.url, options.key)
    try:
        if options.once or options.json or not sys.stdout.isatty():
            return _print(options, ask)
        ask()  # Better an error before the screen is taken than on it.
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


_HEAD = (
    *("TENANT", "DEVICE", "SHARE", "USED%", "IDLE%", "LENT%", "BORROWED", "RUN/S", "REQ/S", "P99", "WAIT", "REFUSED/S"),
    *("MEMORY", "WATTS", "MOVES", "PCIE", "NARROW/S"),
)
_SPARED = (
    "IDLE%",
    "LENT%",
    "BORROWED",
    "NARROW/S",
    "MEMORY",
    "WATTS",
    "PCIE",
    "MOVES",
    "DEVICE",
    "RUN/S",
    "SHARE",
    "WAIT",
    "REFUSED/S",
    "P99",
)
"""Columns that are left out where there is no room for all, the first ones first; DEVICE before all where there is one."""
_LEFT = 2
"""Columns that are aligned to the left."""


def lines(rates: Rates, models: bool = True, width: int | None = None) -> list[str]:
    """Devices, then a row for each tenant, and for each of its models if `models`.

    In a terminal of `width` characters, of which the last stays empty, the least important columns are left out, and a line
    says how many; None is no limit.

    The busiest tenants come first, and so do the busiest of a tenant's models. Those that are as busy, as far as the table
    shows it, are in order of their names and versions, so that rows do not change places for less.
    """
    shown = [_device(each) for each in rates.devices]
    state = "" if rates.ready else ", NOT READY"
    rows: list[Sequence[str]] = [_HEAD]
    for tenant in sorted(rates.tenants, key=lambda each: (-_shown(each), each.tenant, each.device)):
        if tenant.share or tenant.granted or tenant.used:
            rows.append(_tenant(tenant))
            rows += [_model(each, tenant) for each in sorted(tenant.models, key=_rank) if models]
    spared = _SPARED if len(rates.devices) > 1 else ("DEVICE", *_SPARED)
    note, table = _narrowed(_without_empty(rows), spared, width)
    return [f"greenlane {rates.until}, over {rates.seconds:.1f} s{state}", *shown, note, *_aligned(table)]


def _shown(each: TenantRates | ModelRates) -> float:
    """Units that it used, to about what the table shows of them."""
    return round(each.used + each.borrowed, 2)


def _rank(model: ModelRates) -> tuple[float, str, int, str]:
    return -_shown(model), model.name, len(model.version), model.version


def _device(device: DeviceRates) -> str:
    granted, used = f"{_number(device.granted)} granted", f"{_percent(device.used + device.lent, device.units)}% used"
    power = "" if device.watts is None else f", {device.watts:.0f} W ({device.idle_watts or 0:.0f} of them idle)"
    memory, pcie = _moving(device.moving, device.unit)
    moved = f", moves {memory}{f' (PCIe {pcie})' if pcie else ''}" if device.moving else ""
    return f"device {device.name}: {device.units} {device.unit}{'s' * (device.units != 1)}, {granted}, {used}{power}{moved}"


def _tenant(tenant: TenantRates) -> tuple[str, ...]:
    late = f" (reported {tenant.age:.0f} s ago)" if tenant.age > 5 else ""
    return (
        tenant.tenant + late,
        tenant.device,
        str(tenant.share),
        *(_percent(each, tenant.granted) for each in (tenant.used, tenant.idle, tenant.lent)),
        _number(tenant.borrowed),
        _number(tenant.works),
        _number(tenant.answered),
        "-" if tenant.p99 is None else _time(tenant.p99),
        str(tenant.waiting),
        _number(tenant.refused),
        _bytes(tenant.memory),
        "" if tenant.watts is None else f"{tenant.watts:.1f}",
        *_moving(tenant.moving, tenant.unit),
        "" if tenant.narrow is None else _number(tenant.narrow),
    )


def _model(model: ModelRates, tenant: TenantRates) -> tuple[str, ...]:
    watts = "" if model.watts is None else f"{model.watts:.1f}"
    used, borrowed, works = _percent(model.used, tenant.granted), _number(model.borrowed), _number(model.works)
    return (
        f"  {model.name} {model.version}",
        "",
        "",
        used,
        "",
        "",
        borrowed,
        works,
        "",
        "",
        "",
        "",
        "",
        watts,
        *_moving(model.moving, tenant.unit),
        "",
    )


def _moving(moving: Moving | None, unit: str) -> tuple[str, str]:
    """Of its memory and over PCIe, which cores have none of; with a ~ where it is estimated."""
    if moving is None:
        return "", ""
    about = "~" if moving.estimated else ""
    return about + _per_second(moving.memory), "" if unit == "core" else about + _per_second(moving.pcie)


def _without_empty(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Without columns that no row has anything in: what this device cannot say."""
    kept = [index for index in range(len(_HEAD)) if any(row[index] for row in rows[1:]) or index < _LEFT]
    return [[row[index] for index in kept] for row in rows]


def _narrowed(rows: list[list[str]], spared: Sequence[str], width: int | None) -> tuple[str, list[list[str]]]:
    """The table without columns for which there is no room, and a line about them; "" where all fit."""
    full = _width(rows)
    gone = 0
    for name in spared:
        if width is None or _width(rows) < width:
            break
        if name in rows[0]:
            at = rows[0].index(name)
            rows = [[*row[:at], *row[at + 1 :]] for row in rows]
            gone += 1
    return (f"{gone} more column{'s' * (gone != 1)} in a terminal of {full + 1}" if gone else ""), rows


def _width(rows: Sequence[Sequence[str]]) -> int:
    return max(map(len, _aligned(rows)))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if rows[0][index] in _HEAD[:_LEFT] else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole > 0 else "-"


def _number(value: float) -> str:
    return "0" if abs(value) < 0.05 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _per_second(value: float) -> str:
    for power, unit in ((12, "TB/s"), (9, "GB/s"), (6, "MB/s")):
        if value >= 10**power:
            return f"{value / 10**power:.1f} {unit}"
    return f"{value / 1000:.1f} kB/s"


def _bytes(value: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            return f"{value / (1 << power):.1f} {unit}"
    return f"{value} B" if value else ""
