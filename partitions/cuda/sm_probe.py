"""Finds the SMs that a stream runs on, with a kernel whose blocks report their SM and run long enough to fill every SM."""

from ctypes import c_uint32
from threading import Lock

from cuda.core import Buffer, Device, Kernel, LaunchConfig, LegacyPinnedMemoryResource, Stream, launch

from .kernels import Kernels

SOURCE = r"""
extern "C" __global__ void where_am_i(unsigned *seen, long long cycles) {
    const long long start = clock64();
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (threadIdx.x == 0) seen[blockIdx.x] = sm;
    while (clock64() - start < cycles);
}
"""

# Two blocks of 1024 threads fill an SM, so four for each SM come in two waves; 100,000 cycles are some 60 microseconds,
# in which every block of a wave has found its SM.
THREADS = 1024
BLOCKS_FOR_EACH_SM = 4
CYCLES = 100_000


class SmProbe:
    """The kernel and the memory it writes to, made once for a device. One call at a time runs; others wait."""

    def __init__(self, kernel: Kernel, seen: Buffer) -> None:
        self._kernel = kernel
        self._seen = seen
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<SmProbe for up to {self._seen.size // BLOCKS_FOR_EACH_SM // 4} SMs>"

    def run(self, stream: Stream, sms: int) -> frozenset[int]:
        """Launch enough blocks to fill this many SMs, block until they have run, and return the SMs that they ran on."""
        blocks = BLOCKS_FOR_EACH_SM * sms
        with self._lock:
            launch(stream, LaunchConfig(grid=blocks, block=THREADS), self._kernel, self._seen, CYCLES)
            stream.sync()
            return frozenset((c_uint32 * blocks).from_address(int(self._seen.handle)))

    def close(self) -> None:
        """Free the memory; nothing may be running."""
        self._seen.close()


def open_probe(device: Device, kernels: Kernels, sms: int) -> SmProbe:
    """A probe of a device of this many SMs, which must be current in the calling thread. `kernels` are the device's.

    Blocks for a good part of a second where the kernel is not compiled yet. Raises PartitionError, CUDAError.
    """
    (kernel,) = kernels.compiled(device, SOURCE, ("where_am_i",), "the kernel that finds a partition's SMs")
    return SmProbe(kernel, LegacyPinnedMemoryResource().allocate(BLOCKS_FOR_EACH_SM * sms * 4))
