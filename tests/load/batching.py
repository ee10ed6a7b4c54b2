"""`python -m tests.load.batching`: what joining the requests of many clients into batches buys on one partition.

Two servers of the same MLP (784-512-512-10), one that joins requests and one that does not, are driven in turns, so that
whatever else the machine does meets both alike. A ratio is of two rounds side by side; the table has medians.
"""

import argparse
import http.client
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from .cases import Case, check, request
from .client import drive
from .models import build
from .servers import Server, greenlane

MODEL = "mlp"
WARM_UP = 0.5
"""Seconds of load before the first round."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Requests a second, latency in microseconds, microseconds of the server's CPU for a request, and rows for each run."""

    rate: float
    p50: float
    p99: float
    cpu: float
    rows: float

    def __str__(self) -> str:
        return f"{self.rate:8,.0f} {self.p50:8,.0f} {self.p99:8,.0f} {self.cpu:7,.0f} {self.rows:6.1f}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """So many clients on both servers; `ratio` is the median over rounds of the joining one's rate over the other's."""

    clients: int
    joined: Figures
    alone: Figures
    ratio: float

    def __str__(self) -> str:
        return f"{self.clients:7} {self.joined}   {self.alone}   {self.ratio:5.2f}"


@dataclass(frozen=True, slots=True)
class Experiment:
    """Both servers with their models in `root`, ready for load."""

    root: Path
    joined: Server
    alone: Server

    def compare(self, clients: int, rounds: int, seconds: float) -> Comparison:
        """Check the answers of both, then drive them in turns. Blocks. Raises ValueError for a wrong answer, or LoadFailed."""
        case, both = Case(MODEL, "binary", clients), (self.joined, self.alone)
        for server in both:
            check(case, *server.ask(request(case)), self.root)
            drive(server.port, request(case), clients, WARM_UP)
        pairs: list[tuple[Figures, Figures]] = []
        for turn in range(rounds):
            found = {server.port: _round(server, case, seconds) for server in (both if turn % 2 else both[::-1])}
            pairs.append((found[self.joined.port], found[self.alone.port]))
        joined, alone = zip(*pairs, strict=True)
        return Comparison(clients, _medians(joined), _medians(alone), median(a.rate / b.rate for a, b in pairs))


@contextmanager
def experiment(max_batch: int, delay: int = 0) -> Iterator[Experiment]:
    """Both servers, started; `delay` is in microseconds."""
    with tempfile.TemporaryDirectory(prefix="greenlane-batching-") as folder:
        joined, alone = Path(folder, "joined", "models"), Path(folder, "alone", "models")
        build(joined)
        build(alone)
        block = f"dynamic_batching {{ max_queue_delay_microseconds: {delay} }}"
        (joined / MODEL / "config.pbtxt").write_text(f"max_batch_size: {max_batch} {block}")
        with greenlane(joined, None) as ours, greenlane(alone, None) as other:
            yield Experiment(joined, ours, other)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status."""
    options = _parser().parse_args(arguments)
    with experiment(options.max_batch, options.delay) as both:
        print(_HEADING)
        results = [_tell(both.compare(clients, options.rounds, options.seconds)) for clients in options.clients]
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


_COLUMNS = f"{'req/s':>8} {'p50 us':>8} {'p99 us':>8} {'CPU us':>7} {'rows':>6}"
_HEADING = f"{'':7} {'joined':^41}   {'alone':^41}\n{'clients':>7} {_COLUMNS}   {_COLUMNS}   ratio"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.load.batching", description="Requests joined against requests alone."
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds on each server; default: 7")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a round; default: 1.5")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 32], help="connections; default: 1 4 32")
    parser.add_argument("--max-batch", type=int, default=32, help="the most rows that are joined; default: 32")
    parser.add_argument("--delay", type=int, default=0, help="microseconds that requests may wait for others; default: 0")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    return parser


def _round(server: Server, case: Case, seconds: float) -> Figures:
    cpu, (rows, runs) = server.cpu_seconds(), _counted(server)
    load = drive(server.port, request(case), case.connections, seconds)
    after, (rows_after, runs_after) = server.cpu_seconds(), _counted(server)
    cost = (after - cpu) * 1e6 / load.requests
    return Figures(load.rate, load.p50, load.p99, cost, (rows_after - rows) / (runs_after - runs))


def _counted(server: Server) -> tuple[int, int]:
    """Rows inferred so far, and runs."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", f"/v2/models/{MODEL}/stats")
    entry = json.loads(connection.getresponse().read())["model_stats"][0]
    connection.close()
    return entry["inference_count"], entry["execution_count"]


def _medians(rounds: Sequence[Figures]) -> Figures:
    return Figures(*(median(getattr(figures, name) for figures in rounds) for name in Figures.__slots__))


def _tell(result: Comparison) -> Comparison:
    print(result, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
