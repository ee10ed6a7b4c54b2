"""`python -m benchmarks.pcie`: what kernels of neighbours feel of copies between the GPU and the host, by who makes them.

Tenants on other SMs copy without a pause: by one or more blocks of their SMs, with or without a turn that all tenants' blocks
take for each piece, or by the copy engines, whole or in pieces. Meanwhile a victim runs graphs of small kernels that touch no
host memory. It is what the constants in `engines/cuda/copies.py` were chosen by. Prints JSON; takes less than a minute.

A row has the rate of all copies together (GB/s), for each tenant, and by victim the p50 and p99 beside, over those alone.
`latency` has the microseconds that one copy takes by itself, `beside` what a further tenant's copy takes beside others.
"""

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, NamedTuple

from . import needs  # noqa: F401

# isort: split
from greenlane.options import positive
from tests.engines.tensors import Memory
from tests.gpu.across import register, unregister

from .engine import opened_gpu

SIZES = (4 << 10, 64 << 10, 600 << 10, 4 << 20, 38 << 20)
MOST = 38 << 20
AT_LEAST = 1 << 20
"""A launch moves as much as this, the same memory again if it is less, so that launching does not limit the rate."""
EVERYTHING = 1 << 40
TURNS = 8

SOURCE = r"""
typedef unsigned long long u64;
struct Turn { unsigned next, serving, apart[30]; };  // 0 is for those who write to the host.

__device__ void take(Turn *turn) {
    if (!threadIdx.x) {
        const unsigned mine = atomicAdd(&turn->next, 1);
        while (*reinterpret_cast<volatile unsigned *>(&turn->serving) != mine) __nanosleep(64);
    }
    __syncthreads();
}

__device__ void pass(Turn *turn) {
    __syncthreads();
    if (!threadIdx.x) *reinterpret_cast<volatile unsigned *>(&turn->serving) = turn->serving + 1;
}

// Every block copies each piece whose number is its own; `turns` 0 for none, else block n takes turn n of so many.
extern "C" __global__ void move(unsigned long long source, unsigned long long target, unsigned long long nbytes,
                                unsigned long long piece, unsigned turns, unsigned first, Turn *all,
                                unsigned fence, unsigned again) {
    constexpr unsigned AHEAD = 8;
    const uint4 *const from = reinterpret_cast<const uint4 *>(source);
    uint4 *const to = reinterpret_cast<uint4 *>(target);
    Turn *const mine = all + first + (turns ? blockIdx.x % turns : 0);
    for (unsigned n = 0; n < again; ++n)
        for (u64 start = blockIdx.x * piece; start < nbytes; start += gridDim.x * piece) {
            const u64 end = min(start + piece, nbytes) / 16;
            if (turns) take(mine);
            for (u64 at = start / 16 + threadIdx.x; at < end; at += AHEAD * blockDim.x) {
                uint4 held[AHEAD];
                for (unsigned i = 0; i < AHEAD; ++i)
                    if (at + i * blockDim.x < end) held[i] = __ldcs(from + at + i * blockDim.x);
                for (unsigned i = 0; i < AHEAD; ++i)
                    if (at + i * blockDim.x < end) to[at + i * blockDim.x] = held[i];
            }
            if (fence) __threadfence_system();
            if (turns) pass(mine);
        }
}

// Each block reads its part of so many bytes, and computes.
extern "C" __global__ void work(const float4 *data, unsigned long long nbytes, float *sink, unsigned times) {
    float sum = 0;
    for (u64 at = blockIdx.x * blockDim.x + threadIdx.x; at < nbytes / 16; at += gridDim.x * blockDim.x) {
        const float4 found = data[at];
        for (unsigned i = 0; i < times; ++i) sum = sum * found.x + found.y;
    }
    if (sum == 12345) sink[0] = sum;
}
"""


class Way(NamedTuple):
    """How a copy is made: by so many blocks of so many threads, or by an engine (0 blocks), in pieces of so many bytes."""

    blocks: int = 1
    threads: int = 512
    piece: int = 64 << 10
    turns: int = 0
    fence: bool = False

    def __str__(self) -> str:
        piece = "whole" if self.piece == EVERYTHING else f"{self.piece >> 10} KB"
        if not self.blocks:
            return f"engine, {piece}"
        rest = f", {self.turns} turns" * bool(self.turns) + ", fenced" * self.fence
        return f"{self.blocks} x {self.threads}, {piece}{rest}"


ENGINE = Way(0, 0, EVERYTHING)
IN_MEGABYTES = Way(0, 0, 1 << 20)
TODAY = Way(32, 512, 8 << 10)
ONE = Way()
ONE_BY_TURN = Way(turns=1)
FOUR_BY_TURN = Way(4, turns=4)

OUT = (TODAY, Way(12, 512, 8 << 10), Way(2), ONE, ONE_BY_TURN, ENGINE, IN_MEGABYTES)
IN = (TODAY, Way(12, 512, 8 << 10), Way(4), FOUR_BY_TURN, ONE, ENGINE, IN_MEGABYTES)
ONE_TENANT = tuple(Way(blocks, threads) for blocks, threads in ((1, 128), (1, 256), (1, 1024), (2, 256), (4, 128), (8, 64)))
FENCED = tuple(Way(blocks, 512, piece << 10, fence=True) for blocks in (1, 2, 4) for piece in (8, 32))
SHARED = (ONE, *(Way(piece=piece << 10, turns=1) for piece in (16, 64, 256)), Way(threads=256, turns=1), IN_MEGABYTES)
READ_SHARED = (Way(4), *(Way(4, piece=piece << 10, turns=4) for piece in (16, 64, 256)), Way(2, turns=2), IN_MEGABYTES)


class Runs(NamedTuple):
    """What is launched again and again on a stream, and how many bytes that moves."""

    launch: Callable[[], object]
    stream: Any
    nbytes: int = 0


class Bench:
    """A GPU with a victim's partition and some of tenants that copy. One thread."""

    def __init__(self, device: Any, tenants: int, opened: ExitStack) -> None:
        from cuda.core import LaunchConfig, launch

        self._config, self._launch = LaunchConfig, launch
        self.device = device
        count = len(device.granules)
        self.victim = opened.enter_context(closing(device.carve(range(count // 2))))
        self.victim.attach()
        each = (count - count // 2) // tenants
        begins = [count // 2 + number * each for number in range(tenants)]
        self.tenants = [opened.enter_context(closing(device.carve(range(begin, begin + each)))) for begin in begins]
        self.current = device.make_current()
        self._move, self._work = device.kernels.compiled(self.current, SOURCE, ("move", "work"), "the kernels to measure")
        self.host = [Memory(MOST) for _ in self.tenants]
        for memory in self.host:
            register(*memory.room[:2])  # At once, where `CudaDevice.pin` does it in pieces, which end a copy engine's call.
            opened.callback(unregister, memory.room.address)
        stream = self.victim.stream
        allocated = [self.current.allocate(size, stream=stream) for size in (*[MOST] * tenants, 256 << 20, 128 * TURNS)]
        for buffer in allocated:
            opened.enter_context(closing(buffer))
            buffer.fill(0, stream=stream)
        stream.sync()
        *self.memory, self._data, self._turns = allocated
        self._events = [self.current.create_event() for _ in range(3 * tenants + 1)]
        self._opened = opened

    def copies(self, tenant: int, way: Way, nbytes: int, out: bool, again: bool = True) -> Runs:
        """Copies of so many bytes by this tenant; unless `again`, one for each launch."""
        import numpy as np

        partition = self.tenants[tenant]
        inside, outside = int(self.memory[tenant].handle), self.host[tenant].room.address
        source, target = (inside, outside) if out else (outside, inside)
        times = -(-AT_LEAST // nbytes) if again else 1
        if not way.blocks:
            by_engine = partial(self._by_engine, source, target, nbytes, way.piece, times, partition.stream)
            return Runs(by_engine, partition.stream, nbytes * times)
        config = self._config(grid=way.blocks, block=way.threads)
        addresses = (np.uint64(source), np.uint64(target), np.uint64(nbytes), np.uint64(way.piece))
        turns = (np.uint32(way.turns), np.uint32(not out), self._turns)
        given = (*addresses, *turns, np.uint32(way.fence), np.uint32(times))
        return Runs(lambda: self._launch(partition.stream, config, self._move, *given), partition.stream, nbytes * times)

    def product(self, tenant: int, nbytes: int, out: bool) -> Runs:
        """Copies as the server makes them by SMs: both kernels, and nothing to copy the other way."""
        from engines.cuda.copies import open_sm_copies

        stream = self.tenants[tenant].stream
        copier = self._opened.enter_context(closing(open_sm_copies(self.device, stream, 1, 2)))
        inside, outside = int(self.memory[tenant].handle), self.host[tenant].room.address
        table = copier.table([(outside, inside, 0 if out else nbytes), (inside, outside, nbytes if out else 0)])

        def launch() -> None:
            copier.write(table)
            copier.copy_in(stream)
            copier.copy_out(stream)
            copier.count()

        return Runs(launch, stream, nbytes)

    def _by_engine(self, source: int, target: int, nbytes: int, piece: int, times: int, stream: Any) -> None:
        from cuda.bindings import driver

        from partitions.cuda.driver import handle_return

        for _ in range(times):
            for start in range(0, nbytes, piece):
                size = min(piece, nbytes - start)
                handle_return(driver.cuMemcpyAsync(target + start, source + start, size, stream.handle))

    def victims(self) -> dict[str, Runs]:
        """Graphs of one kernel of some 10 us, of 40 such, and of one that reads 128 MB."""
        shapes = {"one": (1, 1 << 20, 64), "forty": (40, 1 << 20, 64), "reads": (1, 128 << 20, 1)}
        return {name: self._graph(*shape) for name, shape in shapes.items()}

    def _graph(self, kernels: int, nbytes: int, times: int) -> Runs:
        import numpy as np

        from engines.cuda.capture import capture

        config = self._config(grid=4 * self.victim.size, block=256)
        arguments = (self._data, np.uint64(nbytes), self._data, np.uint32(times))

        def submit(side: Any) -> str:
            for _ in range(kernels):
                self._launch(side.stream, config, self._work, *arguments)
            return ""

        graph = capture(self.victim, submit)
        self._opened.callback(graph.close)
        return Runs(lambda: graph.launch(self.victim.stream), self.victim.stream)

    def measure(
        self, hogs: Sequence[Runs], other: Runs | None, seconds: float, gap: float = 0.0004
    ) -> tuple[list[float], list[float]]:
        """GB/s of each hog, two launches ahead, and microseconds of `other`, one at a time with a random pause after each."""
        random, clock = Random(1), time.perf_counter
        flights: list[deque[Any]] = [deque() for _ in hogs]
        done, times, launched = [0] * len(hogs), list[float](), [0] * len(hogs)
        *events, end_event = self._events
        running, started = False, 0.0
        began = clock()
        due, ends = began + 0.002, began + seconds
        while (now := clock()) < ends or (other and len(times) < 20 and now < ends + 2):
            if other and not running and now >= due:
                started = clock()
                other.launch()
                other.stream.record(end_event)
                running = True
            if other and running and end_event.is_done:
                times.append((clock() - started) * 1e6)
                running, due = False, clock() + random.expovariate(1 / gap)
            for number, hog in enumerate(hogs):
                flight = flights[number]
                while flight and flight[0].is_done:
                    flight.popleft()
                    done[number] += 1
                if len(flight) < 2:
                    hog.launch()
                    event = events[3 * number + launched[number] % 3]
                    launched[number] += 1
                    hog.stream.record(event)
                    flight.append(event)
        took = clock() - began
        for each in (*hogs, *([other] if other else [])):
            each.stream.sync()
        return [count * hog.nbytes / took / 1e9 for count, hog in zip(done, hogs, strict=True)], times[2:] or times


class Measuring:
    """The rows of a report."""

    def __init__(self, bench: Bench, seconds: float) -> None:
        self._bench = bench
        self._seconds = seconds
        self._victims = bench.victims()
        self.alone = {name: self._times((), victim, 3) for name, victim in self._victims.items()}

    def _times(self, hogs: Sequence[Runs], other: Runs, factor: float = 1) -> tuple[float, float]:
        _, times = self._bench.measure(hogs, other, self._seconds * factor)
        return median(times), quantiles(times, n=100)[98]

    def felt(self, ways: Sequence[tuple[Way, bool]], nbytes: int) -> dict[str, Any]:
        """What victims feel while each tenant copies in its own way, out or in."""
        hogs = [self._bench.copies(tenant, way, nbytes, out) for tenant, (way, out) in enumerate(ways)]
        return self._row([f"{'out' if out else 'in'} by {way}" for way, out in ways], nbytes, hogs)

    def product(self, tenants: int, nbytes: int, out: bool) -> dict[str, Any]:
        """The same while so many copy as the server does."""
        hogs = [self._bench.product(tenant, nbytes, out) for tenant in range(tenants)]
        return self._row([f"{'out' if out else 'in'} by the server's kernels"] * tenants, nbytes, hogs)

    def _row(self, ways: Sequence[str], nbytes: int, hogs: Sequence[Runs]) -> dict[str, Any]:
        rates, _ = self._bench.measure(hogs, None, self._seconds)
        row: dict[str, Any] = {
            "ways": ways,
            "nbytes": nbytes,
            "rate": round(sum(rates), 1),
            "rates": [round(rate, 1) for rate in rates],
        }
        for name, victim in self._victims.items():
            beside = self._times(hogs, victim)
            row[name] = [round(with_hogs / alone, 2) for with_hogs, alone in zip(beside, self.alone[name], strict=True)]
        return row

    def latency(self, way: Way, out: bool, nbytes: int, beside: Sequence[tuple[Way, int]] = ()) -> list[float]:
        """p50 and p99 of one copy by the last tenant, while the first ones copy out in these ways and sizes."""
        hogs = [self._bench.copies(tenant, each, size, out) for tenant, (each, size) in enumerate(beside)]
        own = self._bench.copies(len(self._bench.tenants) - 1, way, nbytes, out, again=False)
        return [round(each, 1) for each in self._times(hogs, own)]


def report(bench: Bench, seconds: float) -> dict[str, Any]:
    """All of it. Blocks."""
    began = time.perf_counter()
    measuring = Measuring(bench, seconds)
    found: dict[str, Any] = {"device": bench.device.describe(), "alone": measuring.alone}
    found["latency"] = {
        ("out" if out else "in"): {str(way): {size: measuring.latency(way, out, size) for size in SIZES} for way in ways}
        for out, ways in ((True, OUT), (False, IN))
    }
    found["one tenant"] = [
        measuring.felt([(way, out)], size) for out, ways in ((True, OUT), (False, IN)) for size in SIZES for way in ways
    ]
    found["one block"] = [measuring.felt([(way, True)], 4 << 20) for way in (*ONE_TENANT, *FENCED)]
    tenants = len(bench.tenants)
    found["product"] = [
        measuring.product(count, size, out)
        for out in (True, False)
        for size in (4096, 600 << 10, 4 << 20)
        for count in (1, tenants)
    ]
    found["tenants"] = [
        measuring.felt([(way, out)] * count, 4 << 20)
        for out, ways in ((True, SHARED), (False, READ_SHARED))
        for count in (2, tenants)
        for way in ways
    ]
    both = [(ONE_BY_TURN, True), (FOUR_BY_TURN, False)] * (tenants // 2)
    found["both"] = [measuring.felt(both, 4 << 20), measuring.felt([(ONE, True), (Way(4), False)] * (tenants // 2), 4 << 20)]
    found["small"] = [measuring.felt([(ONE, True)] * tenants, size) for size in (4 << 10, 8 << 10, 16 << 10)]
    found["beside"] = {
        f"out by {way} beside {tenants - 1} of {other}": {
            size: measuring.latency(way, True, size, [(other, 4 << 20)] * (tenants - 1)) for size in SIZES[:3]
        }
        for way, other in ((ONE, ONE_BY_TURN), (ONE_BY_TURN, ONE_BY_TURN), (ONE, TODAY), (TODAY, TODAY), (ONE, ONE))
    }
    found["seconds"] = round(time.perf_counter() - began, 1)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status. Raises SystemExit where there is no GPU that can be carved."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pcie", description="What neighbours feel of copies.")
    parser.add_argument("--seconds", type=positive, default=0.08, help="of each figure; default: 0.08")
    parser.add_argument("--json", metavar="FILE", help="write the report there as well")
    options = parser.parse_args(arguments)
    with opened_gpu() as device, ExitStack() as opened:
        found = report(Bench(device, 4, opened), options.seconds)
        text = _lines(found)
        print(text)
        if options.json:
            Path(options.json).write_text(text + "\n", encoding="utf-8")
    return 0


def _lines(found: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    parts = []
    for key, value in found.items():
        rows = value if isinstance(value, list) else None
        body = "[\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n ]" if rows else json.dumps(value)
        parts.append(f" {json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}"


if __name__ == "__main__":
    sys.exit(main())
