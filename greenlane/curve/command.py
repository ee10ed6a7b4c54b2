"""`greenlane curve`: measures, and shows what was found."""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from signal import SIGINT, default_int_handler, signal
from threading import Event, current_thread, main_thread
from typing import Any

from engines import EngineError
from greenlane.load.machine import Others, describe
from greenlane.report.page import NoPictures, require
from partitions import PartitionError
from server.command_line import configuration_file
from server.config.tables import ConfigError

from ..options import check_writable
from . import subject, text
from .curve import Curve, Impossible, check_seconds, points, shares
from .measure import Effort, Interrupted
from .options import Options, Target
from .points import Point


def run(options: Options, command: str) -> int:
    """Measure, print, and return the exit status, as the command's help says; `command` is the command line."""
    options = replace(options, config=configuration_file(options.config))
    said = sys.stderr if options.json == "-" else sys.stdout  # Standard output is the JSON document's alone.
    try:
        with redirect_stdout(said), _interrupts() as interrupted:
            status, document = _run(options, command, interrupted)
    except (ConfigError, EngineError, Impossible, NoPictures, OSError, PartitionError) as error:
        print(f"greenlane: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"greenlane: there is no memory for such shapes; give smaller ones: {error}".rstrip(": "), file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt):
        return 128 + SIGINT
    finally:
        gc.unfreeze()
    if options.json:
        _write_json(document, options.json)
    return status


@contextmanager
def _interrupts() -> Iterator[Event]:
    """An event that Ctrl-C sets, so that nothing is in flight when executors are closed; a second one ends at once."""
    interrupted = Event()

    def stop(*_: object) -> None:
        interrupted.set()
        signal(SIGINT, default_int_handler)

    if current_thread() is not main_thread():
        yield interrupted
        return
    before = signal(SIGINT, stop)
    try:
        yield interrupted
    finally:
        signal(SIGINT, before)


def _run(options: Options, command: str, interrupted: Event) -> tuple[int, dict[str, Any]]:
    if options.plot or options.html:
        require("--plot" if options.plot else "--html")
    check_writable(options.plot, options.html, options.json)
    effort = Effort(options.seconds, options.seed, interrupted)
    gc.freeze()  # What was imported is not looked at again, so that collections are short.
    if options.everything:
        from .whole import plan  # It is not needed for one model.

        return plan(options, command, effort)
    curve = _measure(options, command, effort)
    for line in text.conclusions(curve):
        print(line)
    if lines := text.toml(curve):
        print(f"\n{lines}")
    _draw(curve, options)
    return _status(curve), text.as_json(curve)


def _measure(options: Options, command: str, effort: Effort) -> Curve:
    target = Target(options.rate, options.p99) if options.rate else None
    if target:
        check_seconds(target, options.seconds)
    with subject.opened(options) as (device, counters, found):
        effort = replace(effort, counters=counters)
        granules, notes = shares(options.shares, device)
        name = name_of_file(Path(str(options.model))) if isinstance(found, subject.FileSubject) else str(options.model)
        print(f"{name}, batch {options.batch}, on {device.describe()}", flush=True)
        others = Others(sorted(os.sched_getaffinity(0)), True)
        heading = text.heading(target, device.unit, options.bandwidth)
        measured = tuple(points(device, granules, found.bind, target, effort, _printer(heading)))
        return Curve(
            name,
            options.batch,
            device.describe(),
            device.unit,
            sum(device.granules),
            measured,
            target,
            notes + text.busy_cores(others.share()),
            describe(command),
        )


def _printer(heading: str) -> Callable[[Point], None]:
    """Prints points as they are found, below this heading: not before the first, as what was asked for may be refused."""
    lines = [heading]

    def show(point: Point) -> None:
        print("\n".join([*lines, text.row(point)]), flush=True)
        lines.clear()

    return show


def _status(curve: Curve) -> int:
    """0 if what was asked for is known, 1 if that is not clear, 2 if no share keeps the target."""
    if curve.target is None or curve.target.p99 is None or curve.smallest:
        return 0
    unclear = any(point.at_rate and point.at_rate.word in ("too noisy", "too few") for point in curve.points)
    return 1 if unclear else 2


def _draw(curve: Curve, options: Options) -> None:
    if not (options.plot or options.html):
        return
    from . import page  # matplotlib may not be installed.

    drawn = page.draw(curve)
    outputs: list[tuple[Path | None, Callable[[], bytes]]] = [
        (options.plot, lambda: drawn),
        (options.html, lambda: page.render(curve, drawn).encode()),
    ]
    for path, content in outputs:
        if path:
            path.write_bytes(content())
            print(f"wrote {path}")


def _write_json(document: dict[str, Any], where: str) -> None:
    content = json.dumps(document, indent=2, allow_nan=False)
    if where == "-":
        print(content)
    else:
        Path(where).write_text(content + "\n", encoding="utf-8")
        print(f"wrote {where}")


def name_of_file(path: Path) -> str:
    """The model that a file is: that of its folder where this is a version's of a repository, as in NAME/1/model.onnx."""
    folder = path.resolve().parent
    return folder.parent.name if folder.name.isdecimal() else path.stem
