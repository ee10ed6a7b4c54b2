"""Runs `greenlane top`."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from .options import Options, parse
from .rates import Rates, between
from .source import Look, Unreachable, look
from .table import lines


def main(arguments: Sequence[str], program: str) -> int:
    """Run a command line, and return the exit status."""
    options = parse(arguments, program)
    ask = partial(look, options.url, options.key)
    try:
        if options.once or options.json or not sys.stdout.isatty():
            return _print(options, ask)
        ask()  # Better an error before the screen is taken than on it.
        from .screen import show

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
