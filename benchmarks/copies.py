"""`python -m benchmarks.copies`: what an input costs to bring to the GPU, by a partition's own SMs and by the copy engines.

Both alone, and while a neighbour on other SMs brings in 38 MB again and again, by its SMs or by the engines. It is what
`copies = "auto"` decides by (`engines/cuda/copies.py`). Times are microseconds from the call until the input has arrived.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from threading import Event, Thread
from typing import Any

from . import needs  # noqa: F401

# isort: split
from greenlane.options import count, positive
from tests.engines.tensors import Memory

from .engine import opened_gpu, prefix

SIZES = (3_136, 65_536, 602_112, 2_408_448, 8 << 20, 38_535_168, 128 << 20)
"""Bytes: a row of the MLP, an image of 224x224 and 4 and 64 of them, and what lies between and beyond."""
NEIGHBOUR = 38_535_168
WAYS = ("sm", "engine")
BESIDE = ("", *WAYS)


@dataclass(frozen=True, slots=True)
class Row:
    """One input of `nbytes` on so many SMs, brought in `way`, while a neighbour brought in its own `beside`, or did not."""

    sms: int
    nbytes: int
    way: str
    beside: str
    p50: float
    p99: float

    def __str__(self) -> str:
        case = f"{self.sms:4} {self.nbytes:12,} {self.way:>7} {self.beside or 'none':>9}"
        return f"{case} {self.p50:10,.0f} {self.p99:10,.0f} {self.nbytes / self.p50 / 1e3:6.1f}"


HEADING = f"{'SMs':>4} {'bytes':>12} {'by':>7} {'beside':>9} {'p50 us':>10} {'p99 us':>10}   GB/s"


class Carrier:
    """Brings one piece of pinned memory to a partition, in either way. One thread at a time."""

    def __init__(self, partition: Any, copies: dict[str, Any], span: tuple[int, int, int]) -> None:
        self._stream = partition.stream
        self._copies = copies
        self._span = span

    def once(self, way: str) -> float:
        """Microseconds until it is there. On an attached thread."""
        copies, (source, target, nbytes) = self._copies[way], self._span
        began = time.perf_counter()
        copies.write(copies.table([(source, target, nbytes), (target, source, 0)]))
        copies.copy_in(self._stream)
        if way == "sm":
            copies.copy_out(self._stream)
            copies.count()
        self._stream.sync()
        return (time.perf_counter() - began) * 1e6


@contextmanager
def carrier(device: Any, granules: Sequence[int], nbytes: int) -> Iterator[tuple[Any, Carrier]]:
    """A partition and its carrier of so many bytes. Blocks."""
    from engines.cuda.copies import EngineCopies, open_sm_copies

    with ExitStack() as made:
        partition = made.enter_context(closing(device.carve(granules)))
        memory = Memory(nbytes)
        made.enter_context(closing(device.pin(*memory.room[:2])))
        current = device.make_current()
        target = made.enter_context(closing(current.allocate(nbytes, stream=partition.stream)))
        copier = made.enter_context(closing(open_sm_copies(device, partition.stream, 1, 2)))
        span = (memory.room.address, int(target.handle), nbytes)
        yield partition, Carrier(partition, {"sm": copier, "engine": EngineCopies(1)}, span)


@contextmanager
def busy(partition: Any, other: Carrier, way: str) -> Iterator[None]:
    """Meanwhile `other` carries without a pause; `way` "" for not at all."""
    stop = Event()

    def run() -> None:
        partition.attach()
        while not stop.is_set():
            other.once(way)

    thread = Thread(target=run)
    if way:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if way:
            thread.join()


def rows(device: Any, sms: Sequence[int], sizes: Sequence[int], seconds: float) -> Iterator[Row]:
    """Every row. Blocks."""
    count = len(device.granules)
    with carrier(device, range(count // 2, count), NEIGHBOUR) as (beside, other):
        for wanted, nbytes in product(sms, sizes):
            granules = prefix(device.granules[: count // 2], wanted)
            with carrier(device, granules, nbytes) as (partition, own):
                for way, neighbour in product(WAYS, BESIDE):
                    with busy(beside, other, neighbour):
                        times: list[float] = partition.run(partial(_times, own, way, seconds))
                    yield Row(partition.size, nbytes, way, neighbour, median(times), quantiles(times, n=100)[98])


def _times(own: Carrier, way: str, seconds: float) -> list[float]:
    own.once(way)
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while len(times) < 20 or time.perf_counter() < ends:
        times.append(own.once(way))
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status. Raises SystemExit where there is no GPU that can be carved."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copies", description="Copies by SMs against copy engines.")
    parser.add_argument("--sms", type=count, nargs="+", default=[8, 32, 64], metavar="N", help="default: 8 32 64")
    parser.add_argument("--seconds", type=positive, default=0.15, help="of each row; default: 0.15")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(arguments)
    with opened_gpu() as device:
        print(f"{device.describe()}\n{HEADING}")
        found = [_show(row) for row in rows(device, options.sms, SIZES, options.seconds)]
        if options.json:
            text = json.dumps({"device": device.describe(), "rows": [asdict(row) for row in found]}, indent=2)
            Path(options.json).write_text(text + "\n", encoding="utf-8")
    return 0


def _show(row: Row) -> Row:
    print(row, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
