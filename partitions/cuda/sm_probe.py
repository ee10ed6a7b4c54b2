"""Finds the SMs that a stream runs on, or when it had all of them: blocks of a kernel fill SMs and report both."""

from collections.abc import Sequence
from ctypes import c_int64
from threading import Lock
from typing import NamedTuple

from cuda.core import Buffer, Device, Kernel, LaunchConfig, LegacyPinnedMemoryResource, Stream, launch

from .kernels import Kernels

SOURCE = r"""
extern "C" __global__ void where_am_i(long long *seen, long long nanoseconds) {
    if (threadIdx.x == 0) {
        long long began, now;
        unsigned sm;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - began < nanoseconds);
        seen[3 * blockIdx.x] = sm;
        seen[3 * blockIdx.x + 1] = began;
        seen[3 * blockIdx.x + 2] = now;
    }
    __syncthreads();
}
"""

# On an SM of 2048 threads two blocks have room, so four for each SM come in two waves; in 60 microseconds every block of a
# wave has found its SM.
THREADS = 1024
WAVES = 2
LOOK = 60e-6
"""Seconds."""
MOST_FOR_EACH_SM = 4
ROW = 24


class Block(NamedTuple):
    """A block of the kernel: its SM, and when it began and ended, in nanoseconds of the GPU's clock (%globaltimer)."""

    sm: int
    began: int
    ended: int


class SmProbe:
    """The kernel and the memory it writes to, made once for a device. One call at a time runs; others wait."""

    def __init__(self, kernel: Kernel, seen: Buffer, together: int) -> None:
        self._kernel = kernel
        self._seen = seen
        self._together = together
        self._lock = Lock()

    def run(self, stream: Stream, sms: int) -> frozenset[int]:
        """Launch enough blocks to fill this many SMs, block until they have run, and return the SMs that they ran on."""
        return frozenset(block.sm for block in self._run(stream, WAVES * self._together * sms, LOOK))

    def fill(self, stream: Stream, sms: int, seconds: float) -> Sequence[Block]:
        """Launch exactly as many blocks as this many SMs have room for, each for so long, and block until they have run.

        No other kernel of such blocks gets an SM meanwhile.
        """
        return self._run(stream, self._together * sms, seconds)

    def _run(self, stream: Stream, blocks: int, seconds: float) -> Sequence[Block]:
        with self._lock:
            launch(stream, LaunchConfig(grid=blocks, block=THREADS), self._kernel, self._seen, round(seconds * 1e9))
            stream.sync()
            rows = (c_int64 * 3 * blocks).from_address(int(self._seen.handle))
            return [Block(*row) for row in rows]

    def close(self) -> None:
        """Free the memory; nothing may be running."""
        self._seen.close()


def open_probe(device: Device, kernels: Kernels, sms: int) -> SmProbe:
    """A probe of a device of this many SMs, which must be current in the calling thread. `kernels` are the device's.

    Blocks for a good part of a second where the kernel is not compiled yet. Raises PartitionError, CUDAError.
    """
    (kernel,) = kernels.compiled(device, SOURCE, ("where_am_i",), "the kernel that finds a partition's SMs")
    together = min(device.properties.max_threads_per_multiprocessor // THREADS, MOST_FOR_EACH_SM // WAVES)
    return SmProbe(kernel, LegacyPinnedMemoryResource().allocate(MOST_FOR_EACH_SM * sms * ROW), together)
