"""`python -m benchmarks.overhead`: what Greenlane costs beyond a bare ASGI application that runs the same sessions.

Both serve the same requests in turns. With `--checkout` the other server is the Greenlane of another revision, and with
`--greenlane` the one that is measured is that of another checkout, such as a compiled one.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median

from . import needs  # noqa: F401

# isort: split
from greenlane.options import checked, count, port, positive

from .bare import session
from .cases import CASES, Case, tensor
from .client import client
from .models import build, model_path
from .options import cores
from .servers import PYTHON, Server, bare, greenlane
from .sidebyside import Comparison, SideBySide, heading
from .watched_server import restricted

TARGET = 1000.0
"""Microseconds of CPU that an image may cost beyond its model."""


@contextmanager
def experiment(
    in_flight: int | None = None,
    asgi: bool = False,
    beside: Server | None = None,
    checkout: Path | None = None,
    server_cores: Collection[int] = (),
    measured: Path | None = None,
) -> Iterator[SideBySide]:
    """Both servers, started, Greenlane first; `in_flight` and `asgi` as for `servers.greenlane`.

    In place of the bare application the other one is `beside`, a server of the same models that runs already, or the
    Greenlane of another `checkout`. The one that is `measured` is this Greenlane, or that of another checkout too. With
    `server_cores` the servers run there, and this process on all other cores.
    """
    with tempfile.TemporaryDirectory(prefix="greenlane-load-") as folder:
        root = Path(folder, "models")
        build(root)
        other = greenlane(root, in_flight, checkout=checkout) if checkout else bare(root)
        with ExitStack() as servers:
            with restricted(server_cores):
                ours = servers.enter_context(greenlane(root, in_flight, asgi, checkout=measured))
                theirs = servers.enter_context(nullcontext(beside) if beside else other)
            with restricted(os.sched_getaffinity(0) - set(server_cores)):
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
    options = _options(arguments)
    if options.write_models:
        build(Path(options.write_models))
        return 0
    beside = Server("beside", options.pid, options.beside) if options.beside else None
    measured, cores = options.greenlane, options.server_cores
    with experiment(options.in_flight, options.asgi, beside, options.checkout, cores, measured) as both:
        print(f"load by {client()}\n{heading(both.first.name, both.second.name)}")
        results = [_report(both.compare(case, options.rounds, options.seconds, _progress)) for case in options.only]
        images = [result for result in results if result.case.model == "image"]
        model = model_microseconds(both.root, "image")
        for result in images:
            print(_beyond(result, model))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description="Greenlane against a bare application.")
    parser.add_argument("--rounds", type=count, default=5, help="rounds on each server for each case; default: 5")
    parser.add_argument("--seconds", type=positive, default=1.5, help="length of a round; default: 1.5")
    only = f"only cases with this in their names: {', '.join(map(str, CASES))}"
    parser.add_argument("--only", type=_cases, default=CASES, metavar="TEXT", help=only)
    parser.add_argument("--in-flight", type=count, metavar="N", help="the tenant's in_flight; default: the server's")
    parser.add_argument("--asgi", action="store_true", help="Greenlane as uvicorn server.app:app, not as python -m server")
    parser.add_argument(
        "--greenlane",
        type=_checkout,
        metavar="FOLDER",
        help="measure the Greenlane installed in FOLDER/.venv, such as a compiled one; default: this one",
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--beside", type=port, metavar="PORT", help="compare with the server that listens there, of the same models"
    )
    other.add_argument(
        "--checkout",
        type=_checkout,
        metavar="FOLDER",
        help="compare with the Greenlane installed in FOLDER/.venv, such as another revision; both as python -m server",
    )
    parser.add_argument("--pid", type=count, default=0, help="that server's process, for its CPU time")
    parser.add_argument(
        "--server-cores",
        type=checked(cores),
        default=(),
        metavar="CORES",
        help="where both servers run, and the client elsewhere",
    )
    parser.add_argument("--write-models", metavar="FOLDER", help="only write the models there, for such a server to serve")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(arguments)
    if options.checkout and options.asgi:
        parser.error("--asgi: --checkout runs `python -m server` only, which is no match for `uvicorn server.app:app`")
    mine = os.sched_getaffinity(0)
    if options.server_cores and not (mine > set(options.server_cores)):
        parser.error(f"--server-cores: expected some of {sorted(mine)}, and a core left for the client")
    return options


def _checkout(text: str) -> Path:
    if not (folder := Path(text).resolve()).joinpath(PYTHON).exists():
        raise argparse.ArgumentTypeError(f"{folder / PYTHON} does not exist; `scripts/install cpu` in {folder} makes it")
    return folder


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
