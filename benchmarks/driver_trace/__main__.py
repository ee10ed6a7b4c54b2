"""`python -m benchmarks.driver_trace`: what a load does in the driver, and which of its calls a neighbour's launches wait for.

On a GPU, with CUPTI. On one partition a small engine is run as in `benchmarks.loading`; on another one a model, whose plan
and kernels are in the cache, is loaded, bound `--binds` times, and closed again. Printed for each step: its seconds and
CPU seconds, the neighbour's latency, the driver's calls of other threads by name, those that went on during the neighbour's
slowest launches, and where the CPU time went. Times under a tracer are longer than without; `--without-trace` compares.
`--paced` binds as a server does that serves meanwhile, with pauses between loads of kernels, which takes CUPTI for itself.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import get_native_id
from time import perf_counter, process_time, sleep, thread_time
from typing import NamedTuple

from engines import Builds, CacheFolder, Engine, Executor, load_engine
from engines.thread_priority import lower_priority
from greenlane.load import machine
from greenlane.load.figures import percentile
from greenlane.options import count
from partitions import Partition, open_device
from partitions.cuda.kernel_loads import KERNEL_LOADS, find_cupti

from ..inside import quiet
from ..loading import CORES, SETTINGS, Watcher
from ..nets import MOST_ROWS, NETS, write_all
from ..seat import open_seat
from .library import DriverCall, Sample, Trace

CALM = 1.0
SLOW = 1.0
"""Milliseconds from which a launch of the neighbour is looked into."""
MOST = 12
"""Lines of a list."""


class Step(NamedTuple):
    """What was done, when, by `time.perf_counter`, and its CPU seconds: of the process and of the thread that did it."""

    name: str
    begin: float
    end: float
    cpu: float
    own: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status."""
    options = _parser().parse_args(arguments)
    if options.fill:
        load(options, Path(options.fill))
        return 0
    print(*(f"{key}: {value}" for key, value in machine.describe(machine.command("benchmarks.driver_trace")).items()), sep="\n")
    with tempfile.TemporaryDirectory(prefix="greenlane-trace-") as temporary:
        folder = options.cache or Path(temporary)
        os.environ["CUDA_CACHE_PATH"] = f"{folder}/driver"
        if not (folder / options.model / "filled").exists():
            command = [sys.executable, "-m", "benchmarks.driver_trace", "--model", options.model, "--binds", "1"]
            command += ["--without-trace", "--fill", str(folder)]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            (folder / options.model / "filled").touch()
        load(options, folder)
    return 0


def load(options: argparse.Namespace, folder: Path) -> None:
    """Load, bind and close in this process, and print what that did. Blocks."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    write_all(folder, "cuda")
    trace, steps = Trace(), list[Step]()
    if options.paced:
        KERNEL_LOADS.open()
    elif not options.without_trace:
        trace.record_calls(find_cupti(), least=5.0)
    with ExitStack() as stack:
        builds = Builds(CacheFolder([folder / "cache"]), compiles=True)
        stack.callback(builds.close)
        device = stack.enter_context(closing(open_device("cuda")))
        quarter = len(device.granules) // 4
        mine, theirs = (stack.enter_context(closing(device.carve(range(at * quarter, (at + 1) * quarter)))) for at in range(2))
        loader = stack.enter_context(ThreadPoolExecutor(1, "load", lower_priority))
        paths = {name: folder / name / "1" / "model.onnx" for name in ("tiny", options.model)}
        tiny = stack.enter_context(closing(load_engine(paths["tiny"], device, SETTINGS, MOST_ROWS, builds)))
        watcher = Watcher(stack.enter_context(closing(open_seat(device, tiny, mine, NETS["cuda"]["tiny"].draw(1, 1)))))

        @contextmanager
        def step(name: str) -> Iterator[None]:
            begin, cpu, own = perf_counter(), process_time(), loader.submit(thread_time).result()
            try:
                yield
            finally:
                own = loader.submit(thread_time).result() - own
                steps.append(Step(name, begin, perf_counter(), process_time() - cpu, own))

        with quiet():
            watcher.start()
            sleep(0.2)
            with step("quiet"):
                sleep(CALM)
            if not (options.without_trace or options.paced):
                trace.record_samples()
            with step("load"):
                path = paths[options.model]
                engine = loader.submit(load_engine, path, device, SETTINGS, MOST_ROWS, builds).result()
            executors = []
            for number in range(options.binds):
                with step(f"bind {number + 1}"):
                    executors.append(loader.submit(bind, engine, theirs).result())
                sleep(0.1)
            with step("close executors"):
                for executor in executors:
                    loader.submit(executor.close).result()
            sleep(0.1)
            with step("close the engine"):
                loader.submit(engine.close).result()
            trace.stop()
            watcher.stop()
        thread = loader.submit(get_native_id).result()
    calls = sorted(trace.calls(), key=lambda call: call.begin)
    samples = list(trace.samples())
    if options.paced:
        loads, took, waited = KERNEL_LOADS.counts()
        print(
            f"paced: {loads} loads of kernels took {took / 1e6:.0f} ms, and waited {waited / 1e9:.0f} s, all threads together"
        )
    for each in steps:
        print("\n".join(described(each, watcher, calls, samples, thread)))


def bind(engine: Engine, partition: Partition) -> Executor:
    """As a model is bound while tenants are served."""
    with KERNEL_LOADS.background():
        return engine.bind(partition)


def described(step: Step, watcher: Watcher, calls: Sequence[DriverCall], samples: Sequence[Sample], loader: int) -> list[str]:
    """The lines about a step."""
    lines = [f"\n== {step.name}: {step.end - step.begin:.3f} s, CPU {step.cpu:.3f} s, of the loading thread {step.own:.3f} s"]
    rows = [row for row in watcher.rows if row[0] + row[2] / 1e3 >= step.begin and row[0] <= step.end]
    times = sorted(row[2] for row in rows)
    lines.append(f"neighbour: {len(rows)} launches, p50 {percentile(times, 0.5):.3f}, p99 {percentile(times, 0.99):.3f}, "
                 f"longest {percentile(times, 1):.3f} ms")  # fmt: skip
    others = [call for call in calls if call.thread != watcher.native_id and call.end > step.begin and call.begin < step.end]
    groups: dict[str, list[float]] = {}
    for call in others:
        groups.setdefault(f"{call.name}{'' if call.thread == loader else ' (another thread)'}", []).append(call.ms)
    for name, took in sorted(groups.items(), key=lambda item: -sum(item[1]))[:MOST]:
        lines.append(f"  {name}: {len(took)} calls, {sum(took):.1f} ms, longest {max(took):.2f} ms")
    lines += [line for row in sorted(rows, key=lambda row: -row[2])[:MOST] if row[2] >= SLOW for line in _slow(row, others)]
    during = [sample for sample in samples if step.begin <= sample.when <= step.end and sample.thread != watcher.native_id]
    lines += [f"  CPU: {share:.0%} {where}" for where, share in _shares(during)]
    return lines


def _slow(row: tuple[float, float, float], calls: Sequence[DriverCall]) -> Iterator[str]:
    """A slow launch of the neighbour, and the other threads' calls that went on for much of it."""
    begin, call, took = row
    yield f"  launch of {took:.2f} ms ({call:.2f} in the call)"
    for each in calls:
        together = (min(each.end, begin + took / 1e3) - max(each.begin, begin)) * 1e3
        if together > 0.2 * took:
            yield f"    beside {each.name} of {each.ms:.2f} ms, {together:.2f} ms of it"


def _shares(samples: Sequence[Sample]) -> Iterator[tuple[str, float]]:
    """The most frequent (innermost library, innermost driver function, libraries from outside) with their part."""
    found = Counter(_where(sample) for sample in samples)
    for where, number in found.most_common(MOST):
        yield where, number / len(samples)


def _where(sample: Sample) -> str:
    """Where a thread was: in which library, under which function of the driver, called by which libraries."""
    frames = sample.stack[2:]  # The handler, and the frame that the kernel makes for it.
    libraries = [library.split(".so")[0] for library, _ in frames]
    outer = [library for at, library in enumerate(libraries) if at == 0 or libraries[at - 1] != library]
    function = next((name for library, name in frames if library.startswith("libcuda") and name.startswith("cu")), "")
    names = [name for _, name in frames[:6] if name and name != function]
    return f"{' < '.join(outer[:5])}{f' in {function}' if function else ''}{f' ({names[0][:60]})' if names else ''}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.driver_trace", description="What a load does in the driver.")
    parser.add_argument("--model", choices=("tiny", "mob", "enc"), default="mob", help="of benchmarks.nets; default: mob")
    parser.add_argument("--binds", type=count, default=3, help="default: 3; only the first takes what one process needs once")
    parser.add_argument("--without-trace", action="store_true", help="neither CUPTI nor samples")
    parser.add_argument("--paced", action="store_true", help="leave pauses between loads of kernels; without a trace")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep models, plans and kernels here")
    parser.add_argument("--fill", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
