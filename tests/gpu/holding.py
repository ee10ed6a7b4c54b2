"""A kernel that fills every SM of a partition, to find out where other kernels run, and one that reads the GPU's memory.

Both are launched on further streams of a partition (`make_stream`), so that they have the partition's SMs and the partition's
own stream stays free for the kernels under test.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import numpy as np

from tests.engines.tensors import Memory

SOURCE = r"""
typedef unsigned long long u64;

__device__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ unsigned multiprocessor() {
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return sm;
}

// Blocks that fill the SMs stay until the gate is opened, or for so long; no other kernel gets a thread meanwhile.
extern "C" __global__ void __launch_bounds__(1024, 2) hold(long long gate_at, long long rows_at, long long most) {
    volatile unsigned *gate = (volatile unsigned *)gate_at, *rows = (volatile unsigned *)rows_at;
    if (threadIdx.x == 0) {
        const u64 began = nanoseconds();
        rows[blockIdx.x] = multiprocessor() + 1;
        __threadfence_system();
        while (!gate[0] && nanoseconds() - began < (u64)most) __nanosleep(2000);
        if (!gate[0]) gate[1] = 1;
        __threadfence_system();
    }
    __syncthreads();
}

extern "C" __global__ void fetch(long long from_at, long long to_at, long long nbytes) {
    volatile unsigned char *from = (volatile unsigned char *)from_at, *to = (volatile unsigned char *)to_at;
    for (long long at = threadIdx.x; at < nbytes; at += blockDim.x) to[at] = from[at];
    __threadfence_system();
}
"""
GIVE_UP_NS = 10_000_000_000
_PATIENCE = 10.0


class Kernels:
    """The kernels, compiled for a device. Raises PartitionError and RuntimeError as NVRTC does."""

    def __init__(self, device: Any) -> None:
        from cuda.core import Program, ProgramOptions

        here = device.make_current()
        compiled = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{here.arch}")).compile("cubin")
        self._device = device
        self._hold, self._fetch = compiled.get_kernel("hold"), compiled.get_kernel("fetch")
        self._half = int(here.properties.max_threads_per_multiprocessor) // 2

    @contextmanager
    def held(self, partition: Any, most: int = GIVE_UP_NS) -> Iterator["Held"]:
        """Every thread of the partition's SMs is taken, until `Held.release` or the block's end, at most so many nanoseconds.

        The SMs have to be idle.
        """
        blocks = 2 * partition.size
        board = _Board(self._device, blocks + 2)
        with _sides([partition]) as (stream,):
            held = Held(board)
            self._launch(self._hold, stream, blocks, self._half, board.at, board.at + 8, most)
            try:
                _wait_until(lambda: board.words[2:].all())
                held.sms = frozenset(int(word) - 1 for word in board.words[2:])
                yield held
            finally:
                held.release()
                stream.sync()
                board.close()

    @contextmanager
    def reading(self, partition: Any, most: int) -> Iterator[Callable[[int, int], np.ndarray]]:
        """Gives a function that reads so many bytes at an address of the GPU, up to `most`, by an SM of this partition.

        A copy engine would do that after the copies that were submitted to it before, which may wait for taken SMs.
        """
        board = _Board(self._device, -(-most // 4))
        with _sides([partition]) as (stream,):

            def read(address: int, nbytes: int) -> np.ndarray:
                self._launch(self._fetch, stream, 1, 1024, address, board.at, nbytes)
                stream.sync()
                return board.words.view(np.uint8)[:nbytes].copy()

            try:
                read(board.at, 1)  # So that the kernel is loaded.
                yield read
            finally:
                board.close()

    def _launch(self, kernel: Any, stream: Any, blocks: int, threads: int, *arguments: int) -> None:
        """Arguments are pointers and 64-bit numbers, which `launch` makes of integers."""
        from cuda.core import LaunchConfig, launch

        self._device.make_current()
        launch(stream, LaunchConfig(grid=blocks, block=threads), kernel, *arguments)


class Held:
    """SMs on which nothing else starts."""

    def __init__(self, board: "_Board") -> None:
        self._board = board
        self.sms: frozenset[int] = frozenset()

    def release(self) -> None:
        """Release the SMs."""
        self._board.words[0] = 1

    @property
    def gave_up(self) -> bool:
        """Whether the SMs were released by the time limit and not by `release`."""
        return bool(self._board.words[1])


class _Board:
    """Pinned words that kernels write to; zero at first."""

    def __init__(self, device: Any, words: int) -> None:
        self._memory = Memory(4 * words)
        self.words = self._memory.bytes.view(np.uint32)
        self.words[:] = 0
        self._pinned = device.pin(*self._memory.room[:2])
        self.at = int(self._pinned.device_address)

    def close(self) -> None:
        self.words = self.words.copy()
        self._pinned.close()


@contextmanager
def _sides(partitions: list[Any]) -> Iterator[list[Any]]:
    """A further stream of each, made on a thread of its own as it asks for."""
    made = [partition.run(partition.make_stream) for partition in partitions]
    try:
        yield [side.stream for side in made]
    finally:
        for side in made:
            side.close()


def _wait_until(condition: Any) -> None:
    ends = monotonic() + _PATIENCE
    while not condition():
        if monotonic() > ends:
            raise RuntimeError("a kernel did not begin on every SM: something else runs there")
