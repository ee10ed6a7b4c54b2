"""`python -m benchmarks.lent_cores`: what a lent CPU core gives its borrower, and what it costs its lender.

The borrower, in this process, runs `conv` back to back on one core, and by `Executor.alternate` on that core and the lender's.
The lender, a process of its own, runs a model on its core when an open loop says so. Rounds are short, and those of all cases
follow each other. A round in which other processes used the two cores for more than `--others` of the time is done again.
Prints ratios of figures over all rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from engines import Executor, Tensor, load_engine
from greenlane.load.figures import percentile
from partitions import Partition
from partitions.cpu import CpuDevice, open_cpu

from .subjects import SUBJECTS, write

RATES = {"mlp": 200.0, "resnet": 40.0}
"""The lender's models, and how often it asks for them: inferences a second, on average."""
CASES = "alone", "home", "wide", "usual priority"
"""What the borrower does while the lender is measured; the last is `wide` where the kernel refuses SCHED_IDLE."""


class Round(NamedTuple):
    """Seconds that each inference took, from when it was due; seconds of CPU time that another process of ours used."""

    latencies: list[float]
    cpu: float = 0.0


def busy(cores: Sequence[int]) -> float:
    """Seconds that these cores have not been idle."""
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    rows = [list(map(int, line[1:9])) for line in lines if line[0] in {f"cpu{core}" for core in cores}]
    return sum(sum(row) - row[3] - row[4] for row in rows) / os.sysconf("SC_CLK_TCK")


def infer(executor: Executor, x: Tensor) -> None:
    executor.enqueue([x]).wait()


def blank(name: str) -> Tensor:
    return Tensor.of(np.zeros((1, *SUBJECTS[name].row), np.float32))


def own(name: str, path: str, core: int, seconds: float) -> None:
    """The lender: for each line on standard input a round, which is written to standard output."""
    with closing(open_cpu([core]).carve([0])) as partition, closing(load_engine(path).bind(partition)) as executor:
        partition.attach()
        x, chance = blank(name), np.random.default_rng(0)
        for _ in sys.stdin:
            found, used, due = [], time.process_time(), time.perf_counter()
            end = due + seconds
            while (due := due + chance.exponential(1 / RATES[name])) < end:
                time.sleep(max(0.0, due - time.perf_counter()))
                infer(executor, x)
                found.append(time.perf_counter() - due)
            print(json.dumps([found, time.process_time() - used]), flush=True)


class Lab:
    """The borrower's executors, on two cores of which it has one, and what it does during a round."""

    def __init__(self, device: CpuDevice, path: Path, made: ExitStack, seconds: float, rounds: int, others: float) -> None:
        self.cores = device.cores
        self.seconds = seconds
        self._rounds = rounds
        self._others = others
        self._partition: Partition = made.enter_context(closing(device.carve([0])))
        home = made.enter_context(closing(load_engine(path).bind(self._partition)))
        wide = made.enter_context(closing(device.carve([0, 1], [1])))
        self.executors: dict[str, Executor] = {"home": home, "wide": made.enter_context(closing(home.alternate(wide)))}
        with patch("os.sched_setscheduler", side_effect=PermissionError("not tried, for the comparison")):
            self.executors["usual priority"] = made.enter_context(closing(home.alternate(wide)))
        self._x = blank("conv")

    def alone(self, name: str) -> Round:
        """The borrower back to back, and the lender idle."""
        with self.borrowing(name) as latencies:
            time.sleep(self.seconds)
        return Round(latencies)

    @contextmanager
    def borrowing(self, name: str) -> Iterator[list[float]]:
        """Run inferences back to back during the block, unless `name` is "alone"; the list gets the seconds of each."""
        ended, latencies = Event(), list[float]()

        def run() -> None:
            self._partition.attach()
            while name in self.executors and not ended.is_set():
                began = time.perf_counter()
                infer(self.executors[name], self._x)
                latencies.append(time.perf_counter() - began)

        thread = Thread(target=run)
        thread.start()
        yield latencies
        ended.set()
        thread.join()

    def latencies(self, cases: Mapping[str, Callable[[], Round]]) -> dict[str, list[float]]:
        """Of all rounds of each case, ascending."""
        found: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(self._rounds):
            for name, measure in cases.items():
                found[name] += self._undisturbed(measure)
        return {name: sorted(latencies) for name, latencies in found.items()}

    def _undisturbed(self, measure: Callable[[], Round]) -> list[float]:
        while True:
            before, used, began = busy(self.cores), time.process_time(), time.perf_counter()
            found = measure()
            others = busy(self.cores) - before - (time.process_time() - used) - found.cpu
            if others <= self._others * (time.perf_counter() - began) * len(self.cores):
                return found.latencies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--others", type=float, default=0.06, help="of the time, for other processes")
    parser.add_argument("--lender", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.lender:
        own(asked.lender[0], asked.lender[1], int(asked.lender[2]), asked.seconds)
        return
    device = open_cpu(sorted(os.sched_getaffinity(0))[:2])
    with ExitStack() as made:
        root = Path(made.enter_context(tempfile.TemporaryDirectory()))
        write(root, {"conv", *RATES}, plans=False)
        lab = Lab(device, root / "conv" / "1" / "model.onnx", made, asked.seconds, asked.rounds, asked.others)
        found = lab.latencies({name: partial(lab.alone, name) for name in ("home", "wide")})
        home, wide = (sum(latencies) / len(latencies) for latencies in found.values())
        print(f"borrower, lender idle: wide {home / wide:.2f} of home", flush=True)
        for model in RATES:
            compare(lab, model, root / model / "1" / "model.onnx")


def compare(lab: Lab, model: str, path: Path) -> None:
    """Print the lender's figures beside the borrower over those alone."""
    command = [sys.executable, "-m", "benchmarks.lent_cores", "--seconds", str(lab.seconds), "--lender", model]
    with subprocess.Popen(
        [*command, path, str(lab.cores[1])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as lender:

        def measure(case: str) -> Round:
            with lab.borrowing(case):
                print("go", file=lender.stdin, flush=True)
                return Round(*json.loads(lender.stdout.readline() if lender.stdout else ""))

        measure("alone")
        found = lab.latencies({case: partial(measure, case) for case in CASES})
        lender.communicate()
    p50, p99 = ({case: percentile(latencies, at) for case, latencies in found.items()} for at in (0.5, 0.99))
    count, us = len(found["alone"]), {"p50": p50["alone"] * 1e6, "p99": p99["alone"] * 1e6}
    print(f"lender, {model}, alone, {count} inferences: p50 {us['p50']:.0f} us, p99 {us['p99']:.0f} us")
    for case in CASES[1:]:
        print(
            f"  beside the borrower, {case}: p50 {p50[case] / p50['alone']:.2f}, p99 {p99[case] / p99['alone']:.2f} of alone",
            flush=True,
        )


if __name__ == "__main__":
    main()
