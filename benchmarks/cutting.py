"""`python -m benchmarks.cutting`: would a batch that is too long to borrow pay if it were cut? Two cores, without a server.

Batches of convolutions run on one core, and on that and a lent one, in turn. For every batch that is longer there than `--lend`
and the largest one that is not: rows a second of the whole batch at home, of the cut one at home and wide, and when that pays.
Prints the fastest tenth, as other programs only add time.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from engines import Tensor, load_engine
from greenlane.load import machine
from partitions.cpu import open_cpu

from .subjects import conv

ROWS = (1, 2, 4, 8, 16, 32)


def fastest(seconds: Sequence[float]) -> float:
    """The fastest tenth of them."""
    return sorted(seconds)[len(seconds) // 10]


def measured(
    cores: Sequence[int], path: Path, rows: Sequence[int], row: tuple[int, ...], times: int
) -> dict[int, tuple[float, float]]:
    """Seconds of one batch of so many rows at home and wide."""
    found: dict[int, tuple[float, float]] = {}
    with ExitStack() as made:
        device = open_cpu(cores)
        home = made.enter_context(closing(device.carve([0])))
        wide = made.enter_context(closing(device.carve([0, 1], [1])))
        first: Any = made.enter_context(closing(load_engine(path).bind(home)))
        second = made.enter_context(closing(first.alternate(wide)))
        home.attach()
        for count in rows:
            x = Tensor.of(np.random.default_rng(count).standard_normal((count, *row)).astype(np.float32))
            took: tuple[list[float], list[float]] = [], []
            for _ in range(times):
                for executor, seconds in zip((first, second), took, strict=True):
                    seconds.append(_once(executor, x))
            found[count] = fastest(took[0]), fastest(took[1])
    return found


def _once(executor: Any, x: Any) -> float:
    began = time.perf_counter()
    executor.enqueue([x]).wait()
    return time.perf_counter() - began


def pays(whole: float, home: float, wide: float) -> str:
    """When the cut batch has as many rows a second as the whole one: for which part of the time the lenders have to rest."""
    if home >= whole:
        return "always, also at home"
    if wide <= whole:
        return "never"
    return f"if the lenders rest for {(whole - home) / (wide - home):.0%}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cores", type=int, nargs=2, default=[0, 1])
    options.add_argument("--lend", type=float, nargs="*", default=[1.0, 2.0, 5.0, 10.0, 20.0], help="milliseconds")
    options.add_argument("--times", type=int, default=100)
    chosen = options.parse_args()
    print(*(f"{key}: {value}" for key, value in machine.describe(machine.command("benchmarks.cutting")).items()), sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        for name, network, row in (("16 channels", conv(16, 28), (1, 28, 28)), ("64 channels", conv(64, 28), (1, 28, 28))):
            path = Path(folder, "model.onnx")
            path.write_bytes(network.onnx)
            with ThreadPoolExecutor(1) as thread:  # It stays on the cores of the partition.
                found = thread.submit(measured, chosen.cores, path, ROWS, row, chosen.times).result()
            print(
                f"\n{name}: "
                + "; ".join(f"{n} rows {home * 1e3:.2f} ms, wide {wide * 1e3:.2f}" for n, (home, wide) in found.items())
            )
            for lend in chosen.lend:
                short = [rows for rows, (_, wide) in found.items() if wide * 1e3 <= lend]
                for rows, (home, wide) in found.items():
                    if short and wide * 1e3 > lend:
                        cut = max(short)
                        at_home, there = (cut / each for each in found[cut])
                        text = f"{rows / home:7.0f} rows/s, cut to {cut:2}: {at_home:7.0f} at home, {there:7.0f} wide"
                        print(f"lend {lend:g} ms, {rows:2} rows: {text}; pays {pays(rows / home, at_home, there)}")


if __name__ == "__main__":
    main()
