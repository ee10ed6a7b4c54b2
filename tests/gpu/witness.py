"""Kernels that find out where others run: one that feels who shares its SM, and one that leaves no room on any.

Both are launched on a further stream of a partition (`make_stream`), so that they are on its SMs and the partition's own
stream stays free for what is to be found.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple

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

// Multiplies and adds as fast as the SM can, a piece at a time, and counts the pieces that took longer than the fastest one.
// A row of each block: its SM plus one, as soon as it runs; and in the end pieces, slow pieces, cycles of the fastest piece.
// A piece is 2,048 instructions: slow is one that waited for 32 of somebody else's, for the scheduler that this warp is on.
extern "C" __global__ void __launch_bounds__(32) witness(volatile unsigned *rows, u64 lasts) {
    volatile unsigned *row = rows + 4 * blockIdx.x;
    const u64 began = nanoseconds();
    if (threadIdx.x == 0) {
        row[0] = multiprocessor() + 1;
        __threadfence_system();
    }
    __syncwarp();
    float a[8];
    for (int i = 0; i < 8; i++) a[i] = threadIdx.x + i;
    unsigned fastest = ~0u, pieces = 0, slow = 0;
    while (nanoseconds() - began < lasts) {
        const long long start = clock64();
        #pragma unroll 1
        for (int turn = 0; turn < 32; turn++) {
            #pragma unroll
            for (int i = 0; i < 64; i++) a[i % 8] = fmaf(a[i % 8], 0.999f, 0.5f);
        }
        const unsigned took = (unsigned)(clock64() - start);
        fastest = min(fastest, took);
        pieces++;
        slow += took > fastest + fastest / 64;
    }
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += a[i];
    if (threadIdx.x == 0) {
        row[1] = pieces;
        row[2] = slow + (sum == 1.25f);  // Never; but the compiler cannot know, and has to compute it.
        row[3] = fastest;
        __threadfence_system();
    }
}

// As many blocks as there is room for stay until the gate is opened, or for so long; nobody else gets a thread meanwhile.
extern "C" __global__ void __launch_bounds__(1024, 2) hold(volatile unsigned *gate, volatile unsigned *rows, u64 most) {
    if (threadIdx.x == 0) {
        const u64 began = nanoseconds();
        rows[blockIdx.x] = multiprocessor() + 1;
        __threadfence_system();
        while (!gate[0] && nanoseconds() - began < most) __nanosleep(2000);
        if (!gate[0]) gate[1] = 1;
        __threadfence_system();
    }
    __syncthreads();
}
"""
WITNESS_THREADS = 32
"""One warp, without shared memory and with few registers: all but the very largest kernels have room beside it."""
TRIES = 5
"""How often witnesses are launched until there is one on every SM: blocks are given out evenly where nothing else runs."""
SHARED = 0.02
"""The part of a witness's pieces that have to be slow for its SM to count as shared. Alone, none are but the first few."""
GIVE_UP_NS = 10_000_000_000
_PATIENCE = 10.0


class Felt(NamedTuple):
    """What the witness of one SM felt: how many pieces it did, and how many of those were slow."""

    pieces: int
    slow: int

    @property
    def shared(self) -> bool:
        """Whether something else ran on the SM."""
        return self.slow > SHARED * self.pieces


class Kernels:
    """The two kernels, compiled for a device. Raises PartitionError and RuntimeError as NVRTC does."""

    def __init__(self, device: Any) -> None:
        from cuda.core import Program, ProgramOptions

        here = device.make_current()
        compiled = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{here.arch}")).compile("cubin")
        self._device = device
        self._witness, self._hold = (compiled.get_kernel(name) for name in ("witness", "hold"))
        self._half = int(here.properties.max_threads_per_multiprocessor) // 2

    @contextmanager
    def witnesses(self, partitions: list[Any], milliseconds: int) -> Iterator[dict[int, Felt]]:
        """One on every SM of these partitions for so long, which have to be idle; what they felt is there after the block.

        Raises RuntimeError if they cannot be spread like that.
        """
        with _sides(partitions) as streams:
            for _ in range(TRIES):
                boards = [_Board(self._device, 4 * partition.size) for partition in partitions]
                for stream, partition, board in zip(streams, partitions, boards, strict=True):
                    self._launch(self._witness, stream, partition.size, WITNESS_THREADS, board.at, milliseconds * 10**6)
                _wait_until(lambda boards=boards: all(board.words[::4].all() for board in boards))
                if all(len(set(board.words[::4])) == len(board.words) // 4 for board in boards):
                    break
                for stream in streams:
                    stream.sync()
                for board in boards:
                    board.close()
            else:
                raise RuntimeError(f"{TRIES} times there were SMs without a witness, or with two")
            found: dict[int, Felt] = {}
            try:
                yield found
            finally:
                for stream in streams:
                    stream.sync()
                for board in boards:
                    found |= {int(sm) - 1: Felt(int(pieces), int(slow)) for sm, pieces, slow, _ in board.words.reshape(-1, 4)}
                    board.close()

    @contextmanager
    def held(self, partition: Any) -> Iterator["Held"]:
        """Every thread of the partition's SMs is taken, until `Held.release` or the block's end. The SMs have to be idle."""
        blocks = 2 * partition.size
        board = _Board(self._device, blocks + 2)
        with _sides([partition]) as (stream,):
            held = Held(board)
            self._launch(self._hold, stream, blocks, self._half, board.at, board.at + 8, GIVE_UP_NS)
            try:
                _wait_until(lambda: board.words[2:].all())
                held.sms = frozenset(int(word) - 1 for word in board.words[2:])
                yield held
            finally:
                held.release()
                stream.sync()
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
        """Let go of them."""
        self._board.words[0] = 1

    @property
    def gave_up(self) -> bool:
        """Whether they were let go of without `release`, because it took too long."""
        return bool(self._board.words[1])


class _Board:
    """Pinned words that kernels write to; zero at first."""

    def __init__(self, device: Any, words: int) -> None:
        self._memory = Memory(4 * words)
        self.words = self._memory.bytes.view(np.uint32)
        self.words[:] = 0
        self._pinned = device.pin(*self._memory.room)
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
