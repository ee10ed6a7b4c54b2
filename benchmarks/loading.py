"""`python -m benchmarks.loading`: what a neighbour in the same process feels while a model is loaded for the first time.

A GPU is needed. On one partition a small engine is run `RATE` times a second; on another one a model is built and bound,
its kernels compiled in this process, and in the next round by another process (`building.kernels`). Every round is
a process of its own, with empty caches. Printed are milliseconds from call to outputs, and of the call alone, which waits for
the driver's locks: in a quiet time before, while a child process builds or compiles, and while this process binds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, sleep
from typing import Any

from engines import Builds, CacheFolder, Engine, RuntimeSettings, load_engine
from engines.tensorrt.building.kernels import KernelsRequest
from engines.thread_priority import lower_priority
from greenlane.load.figures import percentile
from greenlane.options import count
from partitions import open_device

from .inside import quiet
from .nets import MOST_ROWS, NETS, write_all
from .seat import Seat, open_seat

RATE = 500.0
CALM = 2.0
"""Seconds of quiet before the load."""
CORES = 6
"""The process may use so many, as the device's process of a server of three tenants on 16 cores."""
SETTINGS = RuntimeSettings(copies="auto", warm_up="usual")


class Watcher(Thread):
    """Asks all the time, on a thread of its partition; `rows` has when, milliseconds of the call, and until the outputs."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(name="watcher", daemon=True)
        self._seat = seat
        self._stopped = Event()
        self.rows: list[tuple[float, float, float]] = []

    def run(self) -> None:
        self._seat.partition.attach()
        while not self._stopped.is_set():
            began = perf_counter()
            work = self._seat.enqueue()
            called = perf_counter()
            work.wait()
            ended = perf_counter()
            self.rows.append((began, (called - began) * 1e3, (ended - began) * 1e3))
            sleep(max(0.0, began + 1 / RATE - perf_counter()))

    def stop(self) -> None:
        """Returns once it has ended."""
        self._stopped.set()
        self.join()

    def felt(self, begin: float, end: float) -> dict[str, Any]:
        """Figures of the calls that were going on in this interval, by `time.perf_counter`."""
        rows = [row for row in self.rows if row[0] + row[2] / 1e3 >= begin and row[0] <= end]
        found: dict[str, Any] = {"seconds": end - begin, "calls": len(rows)}
        for name, column in (("call, ms", 1), ("outputs, ms", 2)):
            ascending = sorted(row[column] for row in rows)
            found[name] = {key: percentile(ascending, part) for key, part in (("p50", 0.5), ("p99", 0.99), ("worst", 1.0))}
        return found


class TimedBuilds(Builds):
    """Notes when kernels were compiled by another process, by `time.perf_counter`."""

    def __init__(self, cache: CacheFolder, compiles: bool) -> None:
        super().__init__(cache, compiles=compiles)
        self.spans: dict[str, tuple[float, float]] = {}

    def compile_kernels(self, request: KernelsRequest, gpu: int) -> None:
        began = perf_counter()
        super().compile_kernels(request, gpu)
        self.spans["a child compiles"] = (began, perf_counter())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status."""
    options = _parser().parse_args(arguments)
    if options.one:
        model, where, folder = options.one
        print(json.dumps(one_round(model, where, Path(folder))))
        return 0
    found = []
    for number, model, where in product(range(options.rounds), options.models.split(","), ("here", "apart")):
        found.append({"round": number + 1, "model": model, "compiled": where, **_apart(model, where)})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=2))
    return 0


def _apart(model: str, where: str) -> dict[str, Any]:
    """A round in a process of its own, whose driver keeps nothing of what was compiled before. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="greenlane-loading-") as folder:
        command = [sys.executable, "-m", "benchmarks.loading", "--one", model, where, folder]
        environment = {**os.environ, "CUDA_CACHE_PATH": f"{folder}/driver"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        return dict(json.loads(done.stdout))


def one_round(model: str, where: str, folder: Path) -> dict[str, Any]:
    """Load a model for the first time, its kernels compiled `here` or `apart`; what was felt, by what was going on. Blocks."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    write_all(folder, "cuda")
    builds = TimedBuilds(CacheFolder([folder / "cache"]), compiles=where == "apart")
    with ExitStack() as stack:
        stack.callback(builds.close)
        device = stack.enter_context(closing(open_device("cuda")))
        quarter = len(device.granules) // 4
        mine, theirs = (stack.enter_context(closing(device.carve(range(at * quarter, (at + 1) * quarter)))) for at in range(2))

        def load(name: str) -> Engine:
            path = folder / name / "1" / "model.onnx"
            return stack.enter_context(closing(load_engine(path, device, SETTINGS, MOST_ROWS, builds)))

        tiny = load("tiny")
        watcher = Watcher(stack.enter_context(closing(open_seat(device, tiny, mine, NETS["cuda"]["tiny"].draw(1, 1)))))
        builds.spans.clear()
        with quiet(), ThreadPoolExecutor(1, "load", lower_priority) as loader:
            watcher.start()
            times = [perf_counter()]
            sleep(CALM)
            times.append(perf_counter())
            engine = loader.submit(load, model).result()
            times.append(perf_counter())
            stack.enter_context(closing(loader.submit(engine.bind, theirs).result()))
            times.append(perf_counter())
            watcher.stop()
    spans = {"quiet": (times[0], times[1]), "a child builds": (times[1], times[2]), **builds.spans}
    bound_from = builds.spans.get("a child compiles", (0.0, times[2]))[1]
    return {name: watcher.felt(*span) for name, span in {**spans, "this process binds": (bound_from, times[3])}.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description="What is felt of another's first load.")
    parser.add_argument("--models", default="mob,enc", metavar="NAME,...", help="of benchmarks.nets; default: mob,enc")
    parser.add_argument("--rounds", type=count, default=2, help="default: 2")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "WHERE", "FOLDER"), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
