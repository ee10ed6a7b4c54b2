"""`python -m benchmarks.calls`: what calls of the GPU's libraries cost those who do not make them.

A GPU is needed. Beside each call one thread looks whether it gets the interpreter, and another runs a small engine on a
partition of its own `RATE` times a second. Printed are milliseconds: how long the call takes, the longest that the first
thread had to wait for the interpreter meanwhile, and the slowest inference of the second.
"""

import argparse
import json
import mmap
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from ctypes import addressof, c_char
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any, TypeVar

from engines import Builds, CacheFolder, load_engine
from partitions import Device, open_device
from partitions.cuda.pages import populate

from .inside import quiet
from .loading import SETTINGS, Watcher
from .nets import MOST_ROWS, NETS, write_all
from .seat import open_seat

T = TypeVar("T")
LOOK = 0.0002
"""Seconds from one look for the interpreter to the next."""
APART = 0.05
"""Seconds before and after a call in which nothing happens."""
MIB = 1 << 20
PINS = ((64 * MIB, MIB // 4), (64 * MIB, MIB), (64 * MIB, 4 * MIB), (512 * MIB, 512 * MIB))
"""Bytes of touched memory to register, and bytes at a time."""


class Gaps(Thread):
    """Takes the interpreter again and again; `rows` has when each sleep began, and the seconds that it took too long."""

    def __init__(self) -> None:
        super().__init__(name="gaps", daemon=True)
        self._stopped = Event()
        self.rows: list[tuple[float, float]] = []

    def run(self) -> None:
        while not self._stopped.is_set():
            began = perf_counter()
            sleep(LOOK)
            self.rows.append((began, perf_counter() - began - LOOK))

    def stop(self) -> None:
        """Returns once it has ended."""
        self._stopped.set()
        self.join()


class Record:
    """Times calls; `figures` has them in their order. `gaps` and `watcher` run meanwhile."""

    def __init__(self, gaps: Gaps, watcher: Watcher) -> None:
        self._gaps = gaps
        self._watcher = watcher
        self.figures: list[dict[str, Any]] = []

    def call(self, model: str, name: str, function: Callable[[], T]) -> T:
        """Call it, on a thread of its own, and note what that cost."""
        sleep(APART)
        done: list[T] = []
        thread = Thread(target=lambda: done.append(function()))
        began = perf_counter()
        thread.start()
        thread.join()
        ended = perf_counter()
        sleep(APART)
        gap = max((took for at, took in self._gaps.rows if at <= ended and at + took + LOOK >= began), default=0.0)
        felt = self._watcher.felt(began, ended)
        figures = {"model": model, "call": name, "takes": (ended - began) * 1e3, "interpreter": gap * 1e3}
        self.figures.append({**figures, "neighbour": felt["outputs, ms"]["worst"]})
        return done[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description="What calls of the libraries cost others.")
    parser.add_argument(
        "--models", default="mob,enc,tiny", metavar="NAME,...", help="of benchmarks.nets; default: mob,enc,tiny"
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="greenlane-calls-") as folder, measuring(Path(folder)) as (device, record):
        for _ in range(options.rounds):
            for model in options.models.split(","):
                engine_calls(record, device, Path(folder), model)
            pins(record, device)
    print(json.dumps(record.figures, indent=1))
    for model, name in dict.fromkeys((row["model"], row["call"]) for row in record.figures):
        rows = [row for row in record.figures if (row["model"], row["call"]) == (model, name)]
        least_most = (f"{min(row[key] for row in rows):.2f} to {max(row[key] for row in rows):.2f}" for key in COSTS)
        print(f"| {model} | {name} | {' | '.join(least_most)} |", file=sys.stderr)
    return 0


COSTS = ("takes", "interpreter", "neighbour")


@contextmanager
def measuring(folder: Path) -> Iterator[tuple[Device, Record]]:
    """A device, and a record whose neighbour runs `tiny` on a quarter of it."""
    write_all(folder, "cuda")
    with ExitStack() as stack:
        device = stack.enter_context(closing(open_device("cuda")))
        mine = stack.enter_context(closing(device.carve(range(len(device.granules) // 4))))
        tiny = stack.enter_context(closing(load(device, folder, "tiny")))
        watcher = Watcher(stack.enter_context(closing(open_seat(device, tiny, mine, NETS["cuda"]["tiny"].draw(1, 1)))))
        gaps = Gaps()
        with quiet():
            for thread in (watcher, gaps):
                thread.start()
                stack.callback(thread.stop)
            yield device, Record(gaps, watcher)


def load(device: Device, folder: Path, model: str) -> Any:
    """An engine of its own; built and compiled only once."""
    builds = Builds(CacheFolder([folder / "cache"]))
    return load_engine(folder / model / "1" / "model.onnx", device, SETTINGS, MOST_ROWS, builds)


def engine_calls(record: Record, device: Device, folder: Path, model: str) -> None:
    """Bind, move, close, and free what was made, piece by piece; the kernels are on disk from the second round on."""
    quarter = len(device.granules) // 4
    with ExitStack() as stack:
        here, there = (stack.enter_context(closing(device.carve(range(at * quarter, (at + 1) * quarter)))) for at in (1, 2))
        engine = record.call(model, "load a plan", lambda: load(device, folder, model))
        executor = record.call(model, "bind for the first time", lambda: engine.bind(here))
        moved = record.call(model, "move: capture 4 graphs again", lambda: engine.rebind(executor, there))
        record.call(model, "close an executor: destroy 4 graphs", executor.close)
        moved.close()
        instance = engine.pool.take()
        for context in instance.contexts.values():
            record.call(model, "free an execution context", context.close)
        record.call(model, "free a cache of kernels", instance._kernels.close)
        instance.close()
        record.call(model, "free an engine", engine.close)


def pins(record: Record, device: Device) -> None:
    """Register memory that was touched, in pieces of several sizes."""
    for whole, piece in PINS:
        memory = mmap.mmap(-1, whole)
        address = addressof(c_char.from_buffer(memory))
        populate(address, whole)

        def register(address: int = address, whole: int = whole, piece: int = piece) -> list[Any]:
            return [device.pin(address + at, piece) for at in range(0, whole, piece)]

        name = f"pin {whole // MIB} MiB, {piece / MIB:g} MiB at a time"
        for pinned in record.call("", name, register):
            pinned.close()


if __name__ == "__main__":
    sys.exit(main())
