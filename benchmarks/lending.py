"""`python -m benchmarks.lending`: what lending gives a borrower and costs its owner, over HTTP, on two cores.

acme has one core and a burst of two, and asks for a batch model on one connection, back to back. globex has the other core,
lends it, and is asked by an open loop, at several loads. Servers without lending, with it, and with lending that has no bound
(`benchmarks.unbounded`) run at the same time, and each round asks one of them after the other, so that what else the machine
does meets all of them alike. Prints ratios over the server without lending: medians of rounds, and of pooled latencies.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from greenlane.load import machine
from greenlane.load.figures import percentile
from greenlane.load.jobs import ClosedLoop, OpenLoop, Seen, Tally
from greenlane.load.processes import run
from greenlane.load.schedule import poisson
from greenlane.load.server_process import server_process

from .asks import binary
from .subjects import write

BATCH, QUICK = "conv", "mlp"
CASES = {"rigid": "server", "lent": "server", "unbounded": "benchmarks.unbounded"}
_CONFIG = """
[server]
port = 0
[device]
backend = "cpu"
cores = "{cores}"
[models]
repository = "{root}"
[tenants.acme]
cores = 1
models = ["{batch}"]
{burst}
[tenants.globex]
cores = 1
models = ["{quick}"]
{lend}
"""


class Round(NamedTuple):
    """The borrower's answers a second, and the owner's latencies in milliseconds."""

    answers: float
    latencies: list[float]


@contextmanager
def serving(case: str, folder: Path, root: Path, cores: str, lend: str) -> Iterator[int]:
    """The port of a server of this case."""
    text = _CONFIG.format(
        cores=cores,
        root=root,
        batch=BATCH,
        quick=QUICK,
        burst="" if case == "rigid" else "burst = 2",
        lend="" if case == "rigid" else f'lend = "{lend}"',
    )
    config = folder / f"{case}.toml"
    config.write_text(text)
    with server_process([sys.executable, "-m", CASES[case]], {"GREENLANE_CONFIG": str(config)}) as process:
        yield process.port


def ask(port: int, rate: float, seconds: float, seed: int) -> Round:
    """One round. A rate of 0 leaves the owner idle."""
    batch = ClosedLoop(name="acme", port=port, asks=(binary(BATCH, "acme"),), connections=1, behaviour="flood", seconds=seconds)
    arrivals = poisson(rate, seconds, seed) if rate else []
    quick = OpenLoop(port=port, ask=binary(QUICK, "globex"), arrivals=arrivals, connections=1, most=32)
    _, results = run([batch, quick] if rate else [batch])
    tally, seen = results[0], results[1] if rate else Seen()
    assert isinstance(tally, Tally)
    assert isinstance(seen, Seen)
    return Round(tally.answers / seconds, [each / 1e3 for each in seen.samples.latency])


def late(port: int, times: int) -> list[float]:
    """Milliseconds that the owner's first request after a second of idling takes, while the borrower asks."""
    batch = ClosedLoop(
        name="acme", port=port, asks=(binary(BATCH, "acme"),), connections=1, behaviour="flood", seconds=times + 0.5
    )
    arrivals = [1.0 + index for index in range(times)]
    _, results = run([batch, OpenLoop(port=port, ask=binary(QUICK, "globex"), arrivals=arrivals, connections=1, most=4)])
    assert isinstance(results[1], Seen)
    return [each / 1e3 for each in results[1].samples.latency]


def alone(port: int) -> float:
    """Milliseconds that a request of the owner takes on a server that does nothing else."""
    loop = OpenLoop(
        port=port, ask=binary(QUICK, "globex"), arrivals=[0.02 * index for index in range(100)], connections=1, most=4
    )
    (seen,) = run([loop])[1]
    assert isinstance(seen, Seen)
    return percentile(sorted(seen.samples.latency), 0.5) / 1e3


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cores", default="0-1")
    options.add_argument("--lend", default="100ms", help="the owner's `lend`")
    options.add_argument("--loads", type=float, nargs="*", default=[0.0, 0.1, 0.3, 0.6], help="of the owner's capacity")
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--seconds", type=float, default=3.0, help="of a round")
    chosen = options.parse_args()
    print(*(f"{key}: {value}" for key, value in machine.describe(machine.command("benchmarks.lending")).items()), sep="\n")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write(folder / "models", {BATCH, QUICK}, plans=False)
        serve = [stack.enter_context(serving(case, folder, folder / "models", chosen.cores, chosen.lend)) for case in CASES]
        ports = dict(zip(CASES, serve, strict=True))
        time.sleep(2)  # Wide partitions are made once all models are loaded.
        for port in ports.values():
            ask(port, 0, 2.0, 0)  # What works take is learnt.
        capacity = 1000 / median(alone(ports["rigid"]) for _ in range(3))
        print(f"owner alone: {1000 / capacity:.2f} ms a request")
        for load in chosen.loads:
            rounds: dict[str, list[Round]] = {case: [] for case in CASES}
            for number in range(chosen.rounds):
                for case, port in ports.items():
                    rounds[case].append(ask(port, load * capacity, chosen.seconds, number))
            for case in CASES:
                print(f"owner at {load:4.0%}, {case:9}: {_said(rounds[case], rounds['rigid'])}")
        firsts = {case: late(port, 4 * chosen.rounds) for case, port in ports.items()}
        for case, latencies in firsts.items():
            ordered = sorted(latencies)
            print(
                f"first request after a second, {case:9}: p50 {percentile(ordered, 0.5):.2f} ms, longest {ordered[-1]:.2f} ms"
            )


def _said(rounds: Sequence[Round], rigid: Sequence[Round]) -> str:
    """Figures, and in brackets over those of the server without lending."""
    rates = [one.answers / max(other.answers, 1e-9) for one, other in zip(rounds, rigid, strict=True)]
    text = f"borrower {median(each.answers for each in rounds):6.1f}/s ({median(rates):.2f})"
    ours, theirs = (sorted(each for one in all_ for each in one.latencies) for all_ in (rounds, rigid))
    for name, quantile in (("p50", 0.5), ("p99", 0.99)) if ours else ():
        value = percentile(ours, quantile)
        text += f", owner's {name} {value:.2f} ms ({value / percentile(theirs, quantile):.2f})"
    return text


if __name__ == "__main__":
    main()
