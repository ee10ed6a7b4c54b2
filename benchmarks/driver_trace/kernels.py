"""`python -m benchmarks.driver_trace.kernels`: what a cache of kernels that contexts share saves (on a GPU, with CUPTI).

A small engine is run on one partition as in `benchmarks.loading`. On another, contexts of a model, whose plan and kernels are
in the cache on disk, are made and run with each shape of the warm-up: with a cache of kernels of their own, with that of the
context before, with threads that may use one or two cores, and with other strategies for dynamic shapes. Printed for each
step: its seconds and CPU seconds, the driver's calls that load kernels, and the neighbour's latency.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import NamedTuple, NoReturn

from engines import Builds, CacheFolder, load_engine
from engines.cuda.buffers import zeroed_buffers
from engines.settings import RuntimeSettings
from engines.tensorrt.engine import TensorRTEngine
from engines.tensorrt.instance import contexts_of
from engines.tensorrt.kernel_cache import RuntimeCache
from engines.tensorrt.plan import LoadedPlan
from engines.thread_priority import lower_priority
from greenlane.load.figures import percentile
from partitions import Device, Partition, open_device
from partitions.cuda.device import CudaPartition
from partitions.cuda.kernel_loads import find_cupti

from ..inside import quiet
from ..loading import CORES, SETTINGS, Watcher
from ..nets import MOST_ROWS, NETS, write_all
from ..seat import open_seat
from .library import DriverCall, Trace

MODULES = ("cuModuleLoadData", "cuLibraryLoadData")


class Step(NamedTuple):
    """What was done, when, by `time.perf_counter`, and the process's CPU seconds."""

    name: str
    begin: float
    end: float
    cpu: float


class Steps:
    """Makes contexts, on a thread of its own, and notes how long each step took. What it makes lives until the process ends."""

    def __init__(self, folder: Path, device: Device, builds: Builds, loader: ThreadPoolExecutor) -> None:
        self.done: list[Step] = []
        self._folder = folder
        self._device = device
        self._builds = builds
        self._loader = loader
        self._kept: list[object] = []

    def load(self, model: str, settings: RuntimeSettings) -> LoadedPlan:
        """The model's plan. Blocks."""
        path = self._folder / model / "1" / "model.onnx"
        engine = self._loader.submit(load_engine, path, self._device, settings, MOST_ROWS, self._builds).result()
        assert isinstance(engine, TensorRTEngine)
        self._kept.append(engine)
        return engine.loaded

    def context(self, name: str, loaded: LoadedPlan, partition: Partition, kernels: RuntimeCache | None) -> RuntimeCache:
        """Make a context and run the warm-up; with these kernels, or others. Returns them. Blocks."""
        assert isinstance(partition, CudaPartition)
        with self._step(name):
            made = self._loader.submit(partition.run, lambda: self._make(name, loaded, partition, kernels)).result()
        sleep(0.1)
        return made

    def use_cores(self, cores: Sequence[int]) -> None:
        """From now on the loading thread, and those that it starts, use these."""
        self._loader.submit(os.sched_setaffinity, 0, cores).result()

    def _make(self, name: str, loaded: LoadedPlan, partition: CudaPartition, kernels: RuntimeCache | None) -> RuntimeCache:
        stream = partition.stream
        if kernels is None:
            with self._step(f"{name}: create and deserialize"):
                kernels = loaded.open_kernel_cache()
                kernels.materialize(loaded.plan.create_runtime_config().create_runtime_cache, loaded.plan)
        with self._step(f"{name}: context"):
            context = contexts_of(loaded, kernels).open(False, 0, stream)
        context.set_shapes(loaded.shapes(0, "max"))
        shapes = (*loaded.shapes(0, "max"), *context.output_shapes())
        sizes = [max(1, spec.nbytes(shape)) for spec, shape in zip(loaded.specs, shapes, strict=True)]
        buffers = zeroed_buffers(loaded.device, sizes, stream)
        for each in loaded.warm_up_shapes(0):
            with self._step(f"{name}: first run of {each[0][0]}"):
                context.set_shapes(each)
                context.set_addresses([int(buffer.handle) for buffer in buffers])
                loaded.check_execution(context.execute(stream))
                stream.sync()
        with self._step(f"{name}: save"):
            kernels.save()
        self._kept += [context, buffers, kernels]
        return kernels

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        begin, cpu = perf_counter(), process_time()
        yield
        self.done.append(Step(name, begin, perf_counter(), process_time() - cpu))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.driver_trace.kernels", description="Kernels that contexts share."
    )
    parser.add_argument("--models", default="tiny,mob", metavar="NAME,...", help="of benchmarks.nets; default: tiny,mob")
    parser.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    models = options.models.split(",")
    if options.fill:
        run(options.fill, models, fill, tracing=False)
    if options.measure:
        run(options.measure, models, cases, tracing=True)
    with tempfile.TemporaryDirectory(prefix="greenlane-kernels-") as temporary:
        command = [sys.executable, "-m", "benchmarks.driver_trace.kernels", "--models", options.models]
        environment = {**os.environ, "CUDA_CACHE_PATH": f"{temporary}/driver"}
        for step in ("--fill", "--measure"):
            subprocess.run([*command, step, temporary], env=environment, check=True)
    return 0


def fill(steps: Steps, model: str, mine: Partition, other: Partition) -> None:
    """Build, and compile every kernel."""
    steps.context("", steps.load(model, SETTINGS), mine, None)


def cases(steps: Steps, model: str, mine: Partition, other: Partition) -> None:
    """All cases for a model."""
    loaded, every = steps.load(model, SETTINGS), sorted(os.sched_getaffinity(0))
    kernels = [steps.context(f"{model} of its own {number}", loaded, mine, None) for number in (1, 2)][-1]
    steps.context(f"{model} shared", loaded, mine, kernels)
    steps.context(f"{model} shared, other partition", loaded, other, kernels)
    for cores in (every[-1:], every[-2:]):
        steps.use_cores(cores)
        steps.context(f"{model} of its own, {len(cores)} cores", loaded, mine, None)
    steps.use_cores(every)
    for strategy in ("lazy", "none"):
        settings = SETTINGS.merge(dynamic_shapes_kernel_specialization_strategy=strategy)
        steps.context(f"{model} {strategy}", steps.load(model, settings), mine, None)


def run(
    folder: Path, models: Sequence[str], case: Callable[[Steps, str, Partition, Partition], None], tracing: bool
) -> NoReturn:
    """Do this for each model beside a neighbour, print what was traced, and end the process. Blocks."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    write_all(folder, "cuda")
    trace = Trace()
    if tracing:
        trace.record_calls(find_cupti(), least=3.0)
    builds, device = Builds(CacheFolder([folder / "cache"]), compiles=True), open_device("cuda")
    quarter = len(device.granules) // 4
    beside, mine, other = (device.carve(range(at * quarter, (at + 1) * quarter)) for at in range(3))
    tiny = load_engine(folder / "tiny" / "1" / "model.onnx", device, SETTINGS, MOST_ROWS, builds)
    watcher = Watcher(open_seat(device, tiny, beside, NETS["cuda"]["tiny"].draw(1, 1)))
    steps = Steps(folder, device, builds, ThreadPoolExecutor(1, "load", lower_priority))
    with quiet():
        watcher.start()
        sleep(0.5)
        for model in models:
            case(steps, model, mine, other)
        trace.stop()
        watcher.stop()
    calls = list(trace.calls()) if tracing else []
    for each in sorted(steps.done, key=lambda step: step.begin):
        print(described(each, watcher, calls))
    sys.stdout.flush()
    os._exit(0)  # Without freeing what was made, which takes seconds.


def described(step: Step, watcher: Watcher, calls: Sequence[DriverCall]) -> str:
    """The line about a step."""
    inside = [call for call in calls if call.thread != watcher.native_id and call.begin >= step.begin and call.end <= step.end]
    kernels = [call.ms for call in inside if call.name == "cuKernelGetFunction"]
    modules = [call.ms for call in inside if call.name in MODULES]
    rows = [row for row in watcher.rows if row[0] + row[2] / 1e3 >= step.begin and row[0] <= step.end]
    times = sorted(row[2] for row in rows)
    return (
        f"{step.name:45} {step.end - step.begin:7.3f} s CPU {step.cpu:6.3f}  "
        f"kernels {len(kernels):4} {sum(kernels):7.1f} ms max {max(kernels, default=0):5.2f}  "
        f"modules {len(modules):4} {sum(modules):6.1f} threads {len({call.thread for call in inside}):3}  "
        f"neighbour n {len(times):5} p99 {percentile(times, 0.99):6.2f} worst {max(times, default=0):6.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
