"""`python -m benchmarks.lending`: what lending gives a borrower and costs its lender, over HTTP, on two cores or on a GPU.

acme has half of the device and a burst of the whole, and asks for batches on a few connections, back to back. globex has the
other half, lends it, and is asked by an open loop, at several loads. Servers without lending and with it run at the same time,
and each round asks one of them after the other, so that what else the machine does meets both alike; on a GPU also one of a
single tenant that has the whole device, which says what the borrower could have at most. Prints ratios over the server without
lending: medians of rounds, and of pooled latencies.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from greenlane.load import machine, wire
from greenlane.load.figures import percentile
from greenlane.load.jobs import Ask, ClosedLoop, OpenLoop, Seen, Tally
from greenlane.load.processes import poisson, run

from . import nets, subjects
from .asks import binary, inference, tensor
from .watched_server import server_process

CASES = "rigid", "lent"
WHOLE = "whole device"


class Pair(NamedTuple):
    """What the borrower asks for, and what the lender is asked for; `name` is for people."""

    name: str
    borrowed: Ask
    owned: Ask


@dataclass(frozen=True)
class Setting:
    """A device, the granules of each tenant's half, and the models."""

    device: str
    half: int
    lend: str
    pairs: Sequence[Pair]
    connections: int = 1
    """Of the borrower."""
    settings: str = ""
    """Further lines of the borrower's section."""

    def config(self, case: str, root: Path, lend: str) -> str:
        """The configuration file of a case."""
        lends = case not in ("rigid", WHOLE)
        lines = ["[server]", "port = 0", 'max_body = "64MiB"', self.device, "[models]", f'repository = "{root}"']
        lines += ["[tenants.acme]", f"granules = {self.half * (1 + (case == WHOLE))}", 'models = ["*"]', self.settings]
        lines += [f"burst = {2 * self.half}"] if lends else []
        if case != WHOLE:
            lines += ["[tenants.globex]", f"granules = {self.half}", 'models = ["*"]', *([f'lend = "{lend}"'] if lends else [])]
        return "\n".join(lines)


def on_cores(cores: str, root: Path) -> Setting:
    """Two cores of the CPU, and the models in `root`."""
    subjects.write(root, {"conv", "mlp"}, plans=False)
    pair = Pair("conv beside mlp", binary("conv", "acme"), binary("mlp", "globex"))
    return Setting(f'[device]\nbackend = "cpu"\ncores = "{cores}"', 1, "100ms", [pair])


def on_gpu(granules: int, root: Path, mps: str) -> Setting:
    """The first `granules` of a GPU: batches of an encoder, a MobileNet and convolutions beside long works and short ones.

    HTTP carries 2 MB each way for a batch of `enc`, 5 MB for one of `mob`, and 0.2 MB for one of `conv`.
    """
    nets.write_all(root, "cuda")
    if not (root / "conv").exists():
        subjects.write(root, {"conv"}, plans=True)
    kinds = nets.NETS["cuda"]

    def ask(model: str, tenant: str, rows: int) -> Ask:
        return inference(model, tenant, tensor(model, rows) if model == "conv" else kinds[model].draw(rows, 1))

    names = (("enc", 8, "enc"), ("conv", 16, "enc"), ("conv", 16, "tiny"), ("mob", 8, "mob"))
    pairs = [
        Pair(f"{one} b{rows} beside {other}", ask(one, "acme", rows), ask(other, "globex", 1)) for one, rows, other in names
    ]
    return Setting(f'[device]\nbackend = "cuda"\nmps = "{mps}"', granules // 2, "1ms", pairs, 6, "http_processes = 3")


class Round(NamedTuple):
    """The borrower's answers a second, and the lender's latencies in milliseconds."""

    answers: float
    latencies: list[float]


@contextmanager
def serving(case: str, folder: Path, text: str) -> Iterator[int]:
    """The port of a server of this case."""
    config = folder / f"{case}.toml"
    config.write_text(text)
    with server_process([sys.executable, "-m", "server"], {"GREENLANE_CONFIG": str(config)}) as process:
        yield process.port


def started(stack: ExitStack, folder: Path, texts: Mapping[str, str]) -> dict[str, int]:
    """The ports of a server for each case: the first builds and compiles, the others find that done and start together."""

    def start(case: str) -> int:
        return stack.enter_context(serving(case, folder, texts[case]))

    first, *others = texts
    ports = {first: start(first)}
    with ThreadPoolExecutor() as threads:
        return ports | dict(zip(others, threads.map(start, others), strict=True))


@dataclass(frozen=True)
class Asking:
    """Asks the servers of a setting for one pair."""

    pair: Pair
    connections: int

    def round(self, port: int, rate: float, seconds: float, seed: int) -> Round:
        """One round. A rate of 0 leaves the lender idle."""
        batch = self._borrower(port, seconds)
        arrivals = poisson(rate, seconds, seed) if rate else []
        quick = OpenLoop(port=port, ask=self.pair.owned, arrivals=arrivals, connections=1, most=32)
        _, results = run([batch, quick] if rate else [batch])
        tally, seen = results[0], results[1] if rate else Seen()
        assert isinstance(tally, Tally)
        assert isinstance(seen, Seen)
        if tally.statuses.keys() != {200} or seen.failures:
            raise RuntimeError(f"{self.pair.name}: answers {tally.statuses}; failures {seen.failures}")
        return Round(tally.answers / seconds, [each / 1e3 for each in seen.samples.latency])

    def late(self, port: int, times: int) -> list[float]:
        """Milliseconds that the lender's first request after a second of idling takes, while the borrower asks."""
        batch = self._borrower(port, times + 0.5)
        arrivals = [1.0 + index for index in range(times)]
        _, results = run([batch, OpenLoop(port=port, ask=self.pair.owned, arrivals=arrivals, connections=1, most=4)])
        assert isinstance(results[1], Seen)
        return [each / 1e3 for each in results[1].samples.latency]

    def alone(self, port: int) -> list[float]:
        """Milliseconds that requests of the lender take on a server that does nothing else, in ascending order."""
        arrivals = [0.01 * index for index in range(100)]
        (seen,) = run([OpenLoop(port=port, ask=self.pair.owned, arrivals=arrivals, connections=1, most=4)])[1]
        assert isinstance(seen, Seen)
        return sorted(each / 1e3 for each in seen.samples.latency)

    def _borrower(self, port: int, seconds: float) -> ClosedLoop:
        return ClosedLoop(
            name="acme",
            port=port,
            asks=(self.pair.borrowed,),
            connections=self.connections,
            behaviour="flood",
            seconds=seconds,
        )


def measure(asking: Asking, ports: Mapping[str, int], loads: Sequence[float], rounds: int, seconds: float, firsts: int) -> None:
    """Print the figures of one pair."""
    print(f"\n{asking.pair.name}")
    for port in ports.values():
        asking.round(port, 0, 1.0, 0)  # What works take is learnt.
    shared = {case: port for case, port in ports.items() if case != WHOLE}
    for case, port in shared.items():
        quiet = asking.alone(port)
        print(f"no one borrows,{case:>10}: lender's p50 {percentile(quiet, 0.5):.2f} ms")
    capacity = 1000 / median(percentile(asking.alone(ports["rigid"]), 0.5) for _ in range(3))
    for load in loads:
        asked = shared if load else ports
        found: dict[str, list[Round]] = {case: [] for case in asked}
        for number in range(rounds):
            for case, port in asked.items():
                found[case].append(asking.round(port, load * capacity, seconds, number))
        for case in asked:
            print(f"lender at {load:4.0%}, {case:>12}: {_said(found[case], found['rigid'])}", flush=True)
    for case, port in shared.items():
        print(f"borrower,{case:>10}: {_borrowed(port)} went wide so far")
    latencies = {case: sorted(asking.late(port, firsts)) for case, port in shared.items()} if firsts else {}
    for case, ordered in latencies.items():
        print(f"first request after a second, {case:>10}: p50 {percentile(ordered, 0.5):.2f} ms, longest {ordered[-1]:.2f} ms")


def _borrowed(port: int) -> int:
    """How many inferences of the borrower's ran on granules of the lender's; 0 if it has no wide partition."""
    found = json.loads(wire.ask(port, "GET", "/admin/partitions").body)
    return int(found["partitions"]["acme"].get("wide", {}).get("launches", 0))


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.lending", description=__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--cores", default="0-1", help="of the CPU")
    options.add_argument("--granules", type=int, default=15, help="of the GPU; default: 15, as an H100 has them")
    options.add_argument("--mps", action="store_true", help="a device process for each tenant; with --device cuda")
    options.add_argument("--lend", help="the lender's `lend`; default: 100ms on cores, 1ms on a GPU")
    options.add_argument("--loads", type=float, nargs="*", default=[0.0, 0.1, 0.3, 0.6], help="of the lender's capacity")
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--seconds", type=float, default=3.0, help="of a round")
    options.add_argument("--firsts", type=int, default=32, help="first requests after a second of idling")
    options.add_argument("--pairs", type=int, nargs="*", help="which pairs, from 0; default: all")
    options.add_argument("--without", nargs="*", default=[], choices=[*CASES, WHOLE], help="servers to leave out")
    options.add_argument("--repository", type=Path, help="where models are made, or are already; default: a temporary folder")
    chosen = options.parse_args()
    print(*(f"{key}: {value}" for key, value in machine.describe(machine.command("benchmarks.lending")).items()), sep="\n")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root = chosen.repository or folder / "models"
        setting = (
            on_cores(chosen.cores, root)
            if chosen.device == "cpu"
            else on_gpu(chosen.granules, root, "on" if chosen.mps else "off")
        )
        all_cases = (*CASES, WHOLE) if chosen.device == "cuda" else CASES
        cases = [case for case in all_cases if case not in chosen.without]
        texts = {case: setting.config(case, root, chosen.lend or setting.lend) for case in cases}
        ports = started(stack, folder, texts)
        time.sleep(2)  # Wide partitions are made once all models are loaded.
        for number, pair in enumerate(setting.pairs):
            if chosen.pairs is None or number in chosen.pairs:
                asking = Asking(pair, setting.connections)
                measure(asking, ports, chosen.loads, chosen.rounds, chosen.seconds, chosen.firsts)


def _said(rounds: Sequence[Round], rigid: Sequence[Round]) -> str:
    """Figures, and in brackets over those of the server without lending."""
    rates = [one.answers / max(other.answers, 1e-9) for one, other in zip(rounds, rigid, strict=True)]
    text = f"borrower {median(each.answers for each in rounds):6.1f}/s ({median(rates):.2f})"
    ours, theirs = (sorted(each for one in all_ for each in one.latencies) for all_ in (rounds, rigid))
    for name, quantile in (("p50", 0.5), ("p99", 0.99)) if ours else ():
        value = percentile(ours, quantile)
        text += f", lender's {name} {value:.2f} ms ({value / percentile(theirs, quantile):.2f})"
    return text


if __name__ == "__main__":
    main()
