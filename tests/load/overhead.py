"""`python -m tests.load.overhead`: what Greenlane costs beyond a bare ASGI application that runs the same sessions.

Both serve the same requests under the same uvicorn, in turns, so that whatever else the machine does meets both alike. The
ratio is Greenlane's requests a second over the bare application's, of two rounds side by side; the table has medians.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from .bare import session
from .cases import CASES, Case, check, request, tensor
from .client import drive
from .models import build, model_path
from .servers import Server, bare, greenlane

WARM_UP = 0.3
"""Seconds of load before the first round of each case."""
TARGET = 1000.0
"""Microseconds of CPU that an image may cost beyond its model."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Requests a second, latency in microseconds, and microseconds of the server's CPU for each request."""

    rate: float
    p50: float
    p99: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.rate:8,.0f} {self.p50:8,.0f} {self.p99:8,.0f} {self.cpu:7,.0f}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One case on both servers; `ratio` is the median over rounds of Greenlane's rate over the bare one's."""

    case: Case
    greenlane: Figures
    bare: Figures
    ratio: float

    def __str__(self) -> str:
        return f"{self.case!s:19} {self.greenlane}   {self.bare}   {self.ratio:5.2f}"


@dataclass(frozen=True, slots=True)
class Experiment:
    """Both servers with their models in `root`, ready for load."""

    root: Path
    greenlane: Server
    bare: Server

    def compare(self, case: Case, rounds: int, seconds: float, tell: Callable[[str], None] = lambda _: None) -> Comparison:
        """Check the answers of both, then drive them in turns. Blocks. Raises ValueError for a wrong answer, or LoadFailed."""
        both = (self.greenlane, self.bare)
        for server in both:
            check(case, *server.ask(request(case)), self.root)
            drive(server.port, request(case), case.connections, WARM_UP)
        pairs: list[tuple[Figures, Figures]] = []
        for turn in range(rounds):
            tell(f"{case}: round {turn + 1} of {rounds}")
            found = {server.name: _round(server, case, seconds) for server in (both if turn % 2 else both[::-1])}
            pairs.append((found["greenlane"], found[self.bare.name]))
        ours, theirs = zip(*pairs, strict=True)
        return Comparison(case, _medians(ours), _medians(theirs), median(a.rate / b.rate for a, b in pairs))


@contextmanager
def experiment(in_flight: int | None = None, asgi: bool = False, beside: Server | None = None) -> Iterator[Experiment]:
    """Both servers, started; `in_flight` is the tenant's, None the server's default; `asgi` as for `servers.greenlane`.

    `beside` is another server of the same models, which runs already, in place of the bare application.
    """
    with tempfile.TemporaryDirectory(prefix="greenlane-load-") as folder:
        root = Path(folder, "models")
        build(root)
        with greenlane(root, in_flight, asgi) as ours, nullcontext(beside) if beside else bare(root) as theirs:
            yield Experiment(root, ours, theirs)


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
    cases = [case for case in CASES if options.only in str(case)]
    beside = Server("beside", options.pid, options.beside) if options.beside else None
    with experiment(options.in_flight, options.asgi, beside) as both:
        print(_HEADING.format(both.bare.name))
        results = [_tell(both.compare(case, options.rounds, options.seconds, _progress)) for case in cases]
        images = [result for result in results if result.case.model == "image"]
        model = model_microseconds(both.root, "image")
        for result in images:
            print(_beyond(result, model))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


_COLUMNS = f"{'req/s':>8} {'p50 us':>8} {'p99 us':>8} {'CPU us':>7}"
_HEADING = f"""\
{"":19} {"greenlane":^34}   {{:^34}}
{"case-connections":19} {_COLUMNS}   {_COLUMNS}   ratio"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.load.overhead", description="Greenlane against a bare application.")
    parser.add_argument("--rounds", type=int, default=5, help="rounds on each server for each case; default: 5")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a round; default: 1.5")
    names = ", ".join(map(str, CASES))
    parser.add_argument("--only", default="", metavar="TEXT", help=f"only cases with this in their names: {names}")
    parser.add_argument("--in-flight", type=int, metavar="N", help="the tenant's in_flight; default: the server's")
    parser.add_argument("--asgi", action="store_true", help="Greenlane as uvicorn server.app:app, not as python -m server")
    parser.add_argument(
        "--beside", type=int, metavar="PORT", help="compare with the server that listens there, of the same models"
    )
    parser.add_argument("--pid", type=int, default=0, help="that server's process, for its CPU time")
    parser.add_argument("--write-models", metavar="FOLDER", help="only write the models there, for such a server to serve")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    return parser


def _round(server: Server, case: Case, seconds: float) -> Figures:
    before = server.cpu_seconds()
    load = drive(server.port, request(case), case.connections, seconds)
    return Figures(load.rate, load.p50, load.p99, (server.cpu_seconds() - before) * 1e6 / load.requests)


def _medians(rounds: Sequence[Figures]) -> Figures:
    return Figures(*(median(getattr(figures, name) for figures in rounds) for name in Figures.__slots__))


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:60}\r", end="", file=sys.stderr, flush=True)


def _tell(result: Comparison) -> Comparison:
    print(result, flush=True)
    return result


def _beyond(result: Comparison, model: float) -> str:
    ours, theirs = result.greenlane.cpu - model, result.bare.cpu - model
    verdict = "within" if ours < TARGET else "OVER"
    return (
        f"{result.case}: the model takes {model:,.0f} us of CPU; beyond it Greenlane takes {ours:,.0f} us, "
        f"{verdict} the target of {TARGET:,.0f}, and the other {theirs:,.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
