"""`python -m benchmarks.overhead`: what Greenlane costs beyond a bare ASGI application that runs the same sessions.

Both serve the same requests under the same uvicorn, in turns.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median

from . import needs  # noqa: F401

# isort: split
from .bare import session
from .cases import CASES, Case, tensor
from .client import client
from .models import build, model_path
from .options import count, port, positive
from .servers import Server, bare, greenlane
from .sidebyside import Comparison, SideBySide, heading

TARGET = 1000.0
"""Microseconds of CPU that an image may cost beyond its model."""


@contextmanager
def experiment(in_flight: int | None = None, asgi: bool = False, beside: Server | None = None) -> Iterator[SideBySide]:
    """Both servers, started, Greenlane first; `in_flight` and `asgi` as for `servers.greenlane`.

    `beside` is another server of the same models, which runs already, in place of the bare application.
    """
    with tempfile.TemporaryDirectory(prefix="greenlane-load-") as folder:
        root = Path(folder, "models")
        build(root)
        with greenlane(root, in_flight, asgi) as ours, nullcontext(beside) if beside else bare(root) as theirs:
            yield SideBySide(root, ours, theirs)


def model_microseconds(root: Path, model: str, runs: int = 500) -> float:
    """CPU microseconds of one run of a model with no server around it: the median of `runs`."""
    run, x, times = session(model_path(root, model)).run, tensor(model), []
    for _ in range(runs):
        began = time.thread_time_ns()
        run(None, {"x": x})
        times.append((time.thread_time_ns() - began) / 1e3)
    return median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status."""
    options = _parser().parse_args(arguments)
    if options.write_models:
        build(Path(options.write_models))
        return 0
    beside = Server("beside", options.pid, options.beside) if options.beside else None
    with experiment(options.in_flight, options.asgi, beside) as both:
        print(f"load by {client()}\n{heading('greenlane', both.second.name)}")
        results = [_report(both.compare(case, options.rounds, options.seconds, _progress)) for case in options.only]
        images = [result for result in results if result.case.model == "image"]
        model = model_microseconds(both.root, "image")
        for result in images:
            print(_beyond(result, model))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description="Greenlane against a bare application.")
    parser.add_argument("--rounds", type=count, default=5, help="rounds on each server for each case; default: 5")
    parser.add_argument("--seconds", type=positive, default=1.5, help="length of a round; default: 1.5")
    only = f"only cases with this in their names: {', '.join(map(str, CASES))}"
    parser.add_argument("--only", type=_cases, default=CASES, metavar="TEXT", help=only)
    parser.add_argument("--in-flight", type=count, metavar="N", help="the tenant's in_flight; default: the server's")
    parser.add_argument("--asgi", action="store_true", help="Greenlane as uvicorn server.app:app, not as python -m server")
    parser.add_argument(
        "--beside", type=port, metavar="PORT", help="compare with the server that listens there, of the same models"
    )
    parser.add_argument("--pid", type=count, default=0, help="that server's process, for its CPU time")
    parser.add_argument("--write-models", metavar="FOLDER", help="only write the models there, for such a server to serve")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    return parser


def _cases(text: str) -> list[Case]:
    if not (found := [case for case in CASES if text in str(case)]):
        raise argparse.ArgumentTypeError(f"no case has {text!r} in its name; there are {', '.join(map(str, CASES))}")
    return found


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:60}\r", end="", file=sys.stderr, flush=True)


def _report(result: Comparison) -> Comparison:
    print(result, flush=True)
    return result


def _beyond(result: Comparison, model: float) -> str:
    ours, theirs = result.first.cpu - model, result.second.cpu - model
    verdict = "within" if ours < TARGET else "OVER"
    return (
        f"{result.case}: the model takes {model:,.0f} us of CPU; beyond it Greenlane takes {ours:,.0f} us, "
        f"{verdict} the target of {TARGET:,.0f}, and the other {theirs:,.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
