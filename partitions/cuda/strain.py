"""SMs that move bytes: kernels that read and write memory of the device or the host, a few launches ahead of each other.

A launch ends in some milliseconds, so that other work on these SMs goes on in between.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from time import perf_counter
from typing import NamedTuple

from cuda.bindings import driver
from cuda.core import Buffer, Device, Event, EventOptions, Kernel, LaunchConfig, LegacyPinnedMemoryResource, Stream, launch

from ..strain import SECTOR, Strain, Strained, check_memory
from .driver import handle_return
from .kernels import Kernels

SOURCE = r"""
typedef unsigned long long u64;

__device__ __forceinline__ uint4 streamed(const uint4 *place) {
    uint4 found;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(place));
    return found;
}

extern "C" __global__ void read_memory(const uint4 *from, uint4 *to, long long count, long long times) {
    long long me = (long long)blockIdx.x * blockDim.x + threadIdx.x, all = (long long)gridDim.x * blockDim.x;
    uint4 sum = {0, 0, 0, 0};
    for (long long time = 0; time < times; time++)
        for (long long at = me; at + 3 * all < count; at += 4 * all) {
            uint4 a = streamed(from + at), b = streamed(from + at + all);
            uint4 c = streamed(from + at + 2 * all), d = streamed(from + at + 3 * all);
            sum.x ^= a.x ^ b.x ^ c.x ^ d.x;
            sum.y ^= a.y ^ b.y ^ c.y ^ d.y;
            sum.z ^= a.z ^ b.z ^ c.z ^ d.z;
            sum.w ^= a.w ^ b.w ^ c.w ^ d.w;
        }
    if (sum.x == 0x12345u && sum.y == 77u && sum.z == 0x54321u) to[0] = sum;  // So that the reads are not left out.
}

extern "C" __global__ void write_memory(const uint4 *from, uint4 *to, long long count, long long times) {
    long long me = (long long)blockIdx.x * blockDim.x + threadIdx.x, all = (long long)gridDim.x * blockDim.x;
    uint4 value = {1, 2, 3, (unsigned)me};
    for (long long time = 0; time < times; time++)
        for (long long at = me; at < count; at += all) to[at] = value;
}

extern "C" __global__ void copy_memory(const uint4 *from, uint4 *to, long long count, long long times) {
    long long me = (long long)blockIdx.x * blockDim.x + threadIdx.x, all = (long long)gridDim.x * blockDim.x;
    for (long long time = 0; time < times; time++)
        for (long long at = me; at + all < count; at += 2 * all) {
            uint4 a = from[at], b = from[at + all];
            to[at] = a;
            to[at + all] = b;
        }
}

extern "C" __global__ void read_sectors(const uint4 *from, uint4 *to, long long count, long long times) {
    u64 me = (u64)blockIdx.x * blockDim.x + threadIdx.x, state = me * 0x9E3779B97F4A7C15ull + 1;
    unsigned sum = 0;
    for (long long time = 0; time < times; time++) {
        u64 places[8];
        for (int each = 0; each < 8; each++) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            places[each] = ((state >> 32) * (u64)(count / 2)) >> 32;
        }
        for (int each = 0; each < 8; each++) {
            unsigned found;
            asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(found) : "l"(from + 2 * places[each]));
            sum ^= found;
        }
    }
    if (sum == 0x1234567u) to[0].x = sum;
}
"""
NAMES = ("read_memory", "write_memory", "copy_memory", "read_sectors")
HELD = {"write_memory": 1, "read_memory": 4}
"""Blocks of passes over PCIe that are held back: so many fill nearly all of the bus, and no kernel waits for them (H100)."""
THREADS = 512
UNIT = 16
"""Bytes of a uint4."""
ROUND = 4
"""Units that a thread of `read_memory` has in flight; lengths are a multiple of what all threads have."""
AT_ONCE = 8
"""Sectors that a thread of `read_sectors` has in flight."""
FAR = 16
"""How many times what the last cache holds memory is, which then has hardly any of it."""
HOST = 8 << 20
"""Bytes that a pass moves over PCIe, as a work with large outputs does, in a sixth of a millisecond: no pace divides a pass."""
AHEAD = 2
"""Launches in flight."""


class Way(NamedTuple):
    """How a kind is done: a kernel's name, on how many blocks for each SM, how many times over what it has in a launch.

    `source` and `target` are how many times the bytes of the last cache the two have, 0 for next to nothing; `host` is whether
    the one that has something is the host's.
    """

    kernel: str
    blocks: int
    times: int
    source: float = 0.0
    target: float = 0.0
    host: bool = False


WAYS: dict[Strain, Way] = {
    "memory copy": Way("copy_memory", 4, 2, FAR / 2, FAR / 2),
    "memory read": Way("read_memory", 4, 2, FAR),
    "memory write": Way("write_memory", 4, 2, target=FAR),
    "random sectors": Way("read_sectors", 4, 32, FAR),
    "L2": Way("read_memory", 4, 40, 0.8),
    "PCIe out": Way("write_memory", 2, 1, target=1, host=True),
    "PCIe in": Way("read_memory", 2, 1, 1, host=True),
}
"""On an H100 (50 MB of L2) these kernels reach 3.0 TB/s of memory, 0.86 in sectors, 8.2 of L2 and 50 GB/s over PCIe."""


class Place(NamedTuple):
    """Where a pass runs: a stream, of so many SMs, and whether it is held back."""

    stream: Stream
    sms: int
    held: bool = False


def strain(
    device: Device, kernels: Kernels, home: Place, kind: Strain, seconds: float, decide: Callable[[int], Place]
) -> Strained:
    """Launch this kind for so long, each pass where `decide` says, given the bytes that it moves. Blocks.

    The device must be current in the calling thread. The memory is that of `home`, and freed before it returns, and so it is if
    something fails. Raises PartitionError, CUDAError.
    """
    end, way = perf_counter() + seconds, WAYS[kind]
    kernel = dict(zip(NAMES, kernels.compiled(device, SOURCE, NAMES, "the kernels that strain memory"), strict=True))[
        way.kernel
    ]
    step = ROUND * way.blocks * home.sms * THREADS * UNIT
    cache = device.properties.l2_cache_size
    wanted = [HOST if way.host and part else round(part * cache) for part in (way.source, way.target)]
    length = max(step, max(wanted) // step * step)
    sizes = [part and length for part in wanted]
    if not way.host:
        check_memory(kind, sum(sizes), int(handle_return(driver.cuMemGetInfo())[0]))
    with ExitStack() as left:
        buffers = [left.enter_context(closing(_memory(device, home.stream, size, way.host))) for size in sizes]
        left.callback(home.stream.sync)  # Before anything is freed.
        home.stream.sync()  # As other streams use it too.

        def start(place: Place) -> int:
            blocks = _blocks(way, place)
            _launch(place.stream, kernel, blocks, buffers, length, way.times)
            return _moved(way, length, blocks)

        at_home = _moved(way, length, _blocks(way, home))
        return _launched(device, start, lambda: decide(at_home), end)


def _blocks(way: Way, place: Place) -> int:
    return HELD[way.kernel] if way.host and place.held else way.blocks * place.sms


def _memory(device: Device, stream: Stream, nbytes: int, host: bool) -> Buffer:
    if host and nbytes:
        return LegacyPinnedMemoryResource().allocate(nbytes)
    return device.allocate(max(nbytes, UNIT), stream=stream)


def _moved(way: Way, length: int, blocks: int) -> int:
    """Bytes that a launch moves."""
    if way.kernel == "read_sectors":
        return blocks * THREADS * AT_ONCE * SECTOR * way.times
    return length * way.times * (2 if way.source and way.target else 1)


def _launch(stream: Stream, kernel: Kernel, blocks: int, buffers: list[Buffer], length: int, times: int) -> None:
    launch(stream, LaunchConfig(grid=blocks, block=THREADS), kernel, *buffers, length // UNIT, times)


def _launched(device: Device, start: Callable[[Place], int], decide: Callable[[], Place], end: float) -> Strained:
    """Launch again whenever one of AHEAD has ended, until `end`, and at least once. `start` returns the bytes that it moves.

    It sleeps meanwhile: a core that waits busily would be one less for the threads of other tenants.
    """
    sleeping = EventOptions(blocking_sync=True)
    with ExitStack() as left:
        free = deque(left.enter_context(closing(device.create_event(sleeping))) for _ in range(AHEAD))
        flying, began, nbytes, last = deque[Event](), perf_counter(), 0, decide()
        left.callback(_wait, flying)  # Also on other streams than the memory's.
        while not nbytes or perf_counter() < end:
            if not free:
                flying[0].sync()
                free.append(flying.popleft())
            place = decide() if nbytes else last
            if nbytes and perf_counter() >= end:
                break
            if place.stream is not last.stream or place.held != last.held:
                _wait(flying)
                free.extend(flying)
                flying.clear()
            nbytes, last = nbytes + start(place), place
            flying.append(free.popleft())
            place.stream.record(flying[-1])
        _wait(flying)
        return Strained(nbytes, perf_counter() - began)


def _wait(events: Iterable[Event]) -> None:
    for each in events:
        each.sync()
