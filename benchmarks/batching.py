"""`python -m benchmarks.batching`: what joining the requests of many clients into batches buys on one partition.

Two servers of the same MLP (784-512-512-10), one that joins requests and one that does not.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from . import needs  # noqa: F401

# isort: split
from greenlane.load.wire import ask
from greenlane.options import count, positive, whole

from .cases import Case
from .client import client
from .models import build, model_path
from .servers import Server, greenlane
from .sidebyside import Comparison, SideBySide, heading

MODEL = "mlp"
TF32 = 2e-2
"""How far off a GPU may be that computes with ten bits of mantissa, three layers deep."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A comparison, and rows for each run of the model on either server meanwhile."""

    comparison: Comparison
    rows: float
    rows_alone: float

    def __str__(self) -> str:
        return f"{self.comparison}   {self.rows:6.1f} {self.rows_alone:6.1f}"


def compare(both: SideBySide, clients: int, rounds: int, seconds: float, tolerance: float = 1e-5) -> Joined:
    """As `SideBySide.compare`, for so many clients and answers as close."""
    before = [_counted(server) for server in (both.first, both.second)]
    comparison = both.compare(Case(MODEL, "binary", clients, tolerance), rounds, seconds)
    after = [_counted(server) for server in (both.first, both.second)]
    rows = ((late[0] - early[0]) / (late[1] - early[1]) for early, late in zip(before, after, strict=True))
    return Joined(comparison, *rows)


@contextmanager
def experiment(max_batch: int, delay: int = 0, device: str = "cpu") -> Iterator[SideBySide]:
    """Both servers, started, the joining one first; `delay` is in microseconds."""
    with tempfile.TemporaryDirectory(prefix="greenlane-batching-") as folder:
        joined, alone, plain = (Path(folder, name, "models") for name in ("joined", "alone", "plain"))
        for root in (joined, alone, plain):
            build(root)
        if device == "cuda":
            for root in (joined, alone):
                _plan(model_path(root, MODEL), max_batch)
        block = f"dynamic_batching {{ max_queue_delay_microseconds: {delay} }}"
        (joined / MODEL / "config.pbtxt").write_text(f"max_batch_size: {max_batch} {block}")
        server = partial(greenlane, in_flight=None, device=device, models=[MODEL])
        with server(joined) as ours, server(alone) as other:
            yield SideBySide(plain, ours, other)


def _plan(source: Path, max_batch: int) -> None:
    """A plan for so many rows in place of the ONNX file, which would become one for fewer."""
    from engines.tensorrt.building.builder import BuildOptions
    from engines.tensorrt.building.builder import build as build_plan

    source.with_suffix(".plan").write_bytes(build_plan(source.read_bytes(), BuildOptions(max_batch=max_batch)))
    source.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status."""
    options = _parser().parse_args(arguments)
    with experiment(options.max_batch, options.delay, options.device) as both:
        print(f"load by {client()}\n{heading('joined', 'alone')}   rows for each run")
        how = options.rounds, options.seconds, TF32 if options.device == "cuda" else 1e-5
        results = [_report(compare(both, clients, *how)) for clients in options.clients]
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batching", description="Requests joined against requests alone."
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--rounds", type=count, default=7, help="rounds on each server; default: 7")
    parser.add_argument("--seconds", type=positive, default=1.5, help="length of a round; default: 1.5")
    parser.add_argument("--clients", type=count, nargs="+", default=[1, 4, 32], help="connections; default: 1 4 32")
    parser.add_argument("--max-batch", type=count, default=32, help="the most rows that are joined; default: 32")
    parser.add_argument("--delay", type=whole, default=0, help="microseconds that requests may wait for others; default: 0")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    return parser


def _counted(server: Server) -> tuple[int, int]:
    """Rows inferred so far, and runs."""
    entry = json.loads(ask(server.port, "GET", f"/v2/models/{MODEL}/stats", {}).body)["model_stats"][0]
    return entry["inference_count"], entry["execution_count"]


def _report(result: Joined) -> Joined:
    print(result, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
