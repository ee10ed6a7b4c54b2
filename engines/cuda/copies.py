"""Copies inputs and outputs between host memory that the GPU maps and the device, by the partition's SMs or the copy engines.

Problem: the copy engines are one queue for all tenants, so a small copy waits behind a neighbour's large one.

Solution: by default, two kernels run on the partition's SMs before and after the engine; one copies the inputs in, the other
the outputs out. They find addresses in a ring of tables that the host writes, one table an inference, and count inferences on
the device. So a captured graph needs no change from one launch to the next, though every inference has other memory.

Writes to the host that PCIe does not take at once pile up inside the GPU, and then hold up every kernel, whatever memory that
uses. So over all tenants of a GPU at most one block writes to the host at a time, and four read. Blocks take turns (`turns`),
in the order in which they come. A block passes its turn on after 128 KiB if another one waits, and after its copy. The turns
are words in memory of the device that all copy kernels share, those of all tenants of this process, and under MPS those of all
processes of the GPU (`partitions.cuda.kernels`). A kernel that is killed there in its turn holds up the others for 1 to 2
ms.

Who copies over PCIe, and what bounds that:

| who | bound |
|---|---|
| copy kernels, out: tensors larger than 4 KiB | one block at a time, over all tenants and processes of the GPU: 45 GB/s |
| in: the same | four blocks at a time, over all tenants and processes: 48 GB/s |
| up to 4 KiB; tables of addresses, clocks | nothing, so that they never wait |
| copy engines, where `copies` is "engine", and for large tensors | calls of 1 MiB, of all tenants in the engines' queues |
| verification, warm-up, a library's small tensors, from memory that is not pinned | the driver, which stages them in pieces |
| loads of models, page-ins, streamed weights | the library, whose copies are by the engines; pieces as it makes them |
| `Partition.strain` | nothing: it shows what neighbours feel |

Copies by the copy engines are submitted before and after the graph and not captured in it. A captured copy would keep the host
addresses of the first inference, and every launch would have to update each node by its handle. Outside it is a call for each
piece of a tensor, and the stream keeps the order.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from cuda.bindings import driver
from cuda.core import Buffer, Kernel, LaunchConfig, LegacyPinnedMemoryResource, Stream, launch

from partitions.cuda.device import CudaDevice
from partitions.cuda.driver import handle_return, translated
from partitions.cuda.pages import pieces

from ..memory import view
from .turns import LOOK, TURN_BYTES, TURNS

log = logging.getLogger("greenlane.engines")

_COPIES = r"""
struct Row { const char *from; char *to; unsigned long long nbytes; };
struct State { unsigned count, unused[3]; Row rows[1]; };
struct Clock { unsigned long long ns, works, began, unused; };
struct Seen { unsigned long long ns, works; };

constexpr unsigned long long SMALL = 4 << 10, PIECE = 128 << 10;

__device__ unsigned long long nanoseconds() {
    unsigned long long found;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(found));
    return found;
}

// Copy these bytes by this block. So many reads of each thread are in flight at a time.
template <unsigned AHEAD>
__device__ void move(const char *from, char *to, unsigned long long nbytes) {
    const bool aligned = !((reinterpret_cast<size_t>(from) | reinterpret_cast<size_t>(to)) & 15);
    const unsigned long long wide = aligned ? nbytes / 16 : 0;
    const uint4 *const source = reinterpret_cast<const uint4 *>(from);
    uint4 *const target = reinterpret_cast<uint4 *>(to);
    for (unsigned long long at = threadIdx.x; at < wide; at += AHEAD * blockDim.x) {
        uint4 held[AHEAD];
#pragma unroll
        for (unsigned i = 0; i < AHEAD; ++i)
            if (at + i * blockDim.x < wide) held[i] = source[at + i * blockDim.x];
#pragma unroll
        for (unsigned i = 0; i < AHEAD; ++i)
            if (at + i * blockDim.x < wide) target[at + i * blockDim.x] = held[i];
    }
    for (unsigned long long at = wide * 16 + threadIdx.x; at < nbytes; at += blockDim.x) to[at] = from[at];
}

// The same while this block has the turn, which it passes on after a piece if another block waits.
template <unsigned AHEAD>
__device__ void move_in_turn(const char *from, char *to, unsigned long long nbytes, Turn *turn) {
    unsigned mine = 0;
    bool has = false;
    for (unsigned long long at = 0; at < nbytes; at += PIECE) {
        unsigned last = 0;
        if (!threadIdx.x) {
            if (!has) mine = take_turn(turn);
            last = look(&turn->next);  // Read beside the copy, so that looking takes no time.
        }
        __syncthreads();
        move<AHEAD>(from + at, to + at, min(PIECE, nbytes - at));
        __syncthreads();
        has = last == mine + 1 && at + PIECE < nbytes;
        if (!threadIdx.x && !has) pass_turn(turn, mine);
    }
}

// A small tensor is copied by one block, which takes no turn: all tenants' small ones do not fill PCIe. Row n goes to block n,
// so that different blocks copy the small tensors of one inference at the same time. A larger one is divided among all blocks.
template <unsigned AHEAD>
__device__ void copy(const Row &row, unsigned number, Turn *turns) {
    if (row.nbytes <= SMALL) {
        if (blockIdx.x == number % gridDim.x) move<AHEAD>(row.from, row.to, row.nbytes);
        return;
    }
    const unsigned long long part = ((row.nbytes + gridDim.x - 1) / gridDim.x + 15) & ~15ull, start = blockIdx.x * part;
    if (start < row.nbytes)
        move_in_turn<AHEAD>(row.from + start, row.to + start, min(part, row.nbytes - start), turns + blockIdx.x);
}

// The table is read from host memory once and kept on the device for copy_out: behind a neighbour's copies each read takes
// 15 microseconds. What the clock says is written to the host first, as that takes as long and nothing here waits for it.
extern "C" __global__ void copy_in(const Row *ring, unsigned length, unsigned rows, unsigned inputs, State *state, Turn *turns,
                                   Clock *clocks, Seen *seen, unsigned clock) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        clocks[clock].began = nanoseconds();
        seen[clock].ns = clocks[clock].ns;
        seen[clock].works = clocks[clock].works;
    }
    constexpr unsigned HELD = 128;
    __shared__ Row held[HELD];
    const Row *table = ring + (state->count % length) * rows;
    for (unsigned row = threadIdx.x; row < min(rows, HELD); row += blockDim.x) held[row] = table[row];
    __syncthreads();
    for (unsigned row = 0; row < inputs; ++row) copy<4>(row < HELD ? held[row] : table[row], row, turns + 1);
    if (blockIdx.x != gridDim.x - 1) return;
    for (unsigned row = inputs + threadIdx.x; row < rows; row += blockDim.x)
        state->rows[row] = row < HELD ? held[row] : table[row];
}

// One block.
extern "C" __global__ void copy_out(unsigned rows, unsigned inputs, State *state, Turn *turns, Clock *clocks, unsigned clock) {
    for (unsigned row = inputs; row < rows; ++row) copy<8>(state->rows[row], row - inputs, turns);
    __syncthreads();
    if (threadIdx.x) return;
    state->count += 1;
    clocks[clock].ns += nanoseconds() - clocks[clock].began;
    clocks[clock].works += 1;
}
"""
SOURCE = LOOK + TURNS + _COPIES

# What kernels of neighbours feel of copies without a pause was measured on an H100 (2026-11-26, with other kernels than these;
# victims of 20 to 513 us on 64 SMs). Writes to the host by one block of 512 threads: 45 GB/s, and victims take 0.99 to 1.09
# times as long; by two blocks 4.6 to 5.7 times, by 32 some 11 to 13 times. Reads by four blocks: 48 GB/s and 1.0 to 1.5 times,
# by 32 up to 3.4 times (docs/lab/2026-11-26-copies.md). SMALL, PIECE and the reads ahead were chosen and not measured.
READERS = 4
IN = LaunchConfig(grid=READERS, block=512)
OUT = LaunchConfig(grid=1, block=512)
TURNS_BYTES = TURN_BYTES * (1 + READERS)
RING_LENGTH = 16
"""Tables in a ring, and so the limit of inferences of one executor in flight."""
CLOCKS = 16
"""Executors of one instance that the GPU's timer can measure at a time; number 0 is for works that are not counted."""


SM_COPY_LIMIT = 32 << 20
"""Up to this many bytes an inference, in and out together, `auto` lets the SMs copy.

Measured on an H100 (2026-11-21, docs/lab/2026-11-26-copies.md): 600 KB took the SMs 37 to 39 us where the engines took 23,
and 54 to 61 us while a neighbour's SMs copied 38 MB in; in the engines' queue behind a neighbour's 38 MB it was 748 to 763.
From some 32 MB on, a neighbour's 38 MB cost the same either way (1.5 to 1.7 ms for 38 MB), and the engines are a tenth faster
alone. Copies by SMs slow down what neighbours copy meanwhile a little more (69 to 78 us for 600 KB); a whole inference's p99
did not change (1.02 times alone either way).
"""

ENGINE_PIECE = 1 << 20
"""Bytes that a copy engine is given in one call, cut where the host's address is a multiple of it, as pinned memory is
(`partitions.cuda.pages.PIN_PIECE`): a call may not cross from one registration of host memory to the next, even an adjacent one
(CUDA_ERROR_INVALID_VALUE on an H100, tests/gpu/test_pinning.py)."""

Span = tuple[int, int, int]
"""Source address, target address and number of bytes of one tensor."""
Table = Any
"""Spans in the form that the copies use, made by `Copies.table`."""


class DeviceClock:
    """What the GPU itself measures of an executor's works: the time from their first kernel to their last, by %globaltimer; see
    `engines.base.DeviceTime`.

    The first copy notes when it begins, the last adds what has passed since. Both are on one stream, so a work that waits for
    the one before it has not begun, and works do not overlap. The sums stay on the GPU, in slot `number`; the first kernel of
    each inference writes them to host memory, at its beginning, so that nothing waits for that. So they lack each executor's
    last work until the next one, or until it is closed.

    `seen` are the two numbers in host memory, nanoseconds and works. `free` gives the slot back.
    """

    def __init__(
        self,
        number: int,
        seen: "np.ndarray[tuple[int], np.dtype[np.uint64]]",
        fetch: Callable[[], None],
        free: Callable[[int], None],
    ) -> None:
        self.number = number
        self.closed = False
        self._seen = seen
        self.fetch = fetch
        """Have the GPU write the sums now. Nothing may be in flight. Blocks until the stream is done. Raises CUDAError."""
        self._free = free
        self._final = (0, 0)
        self._base = int(seen[0]), int(seen[1])  # What the executor before it has left.

    @property
    def ns(self) -> int:
        return self._now()[0]

    @property
    def works(self) -> int:
        return self._now()[1]

    def start(self) -> None:
        """Count from now on. Blocks until the stream is done. Raises CUDAError."""
        self._base = (0, 0)
        self.fetch()
        self._base = self._now()

    def agrees(self, works: int, host_ns: int) -> bool:
        """Whether so many works were measured since `start`, which the host saw take this long at most. Blocks."""
        self.fetch()
        found = self._now()
        if found[1] == works and 0 < found[0] <= host_ns:
            return True
        log.warning("the GPU's timer is not used: it says %d ns for %d works, the host %d for %d", *found, host_ns, works)
        return False

    def close(self) -> None:
        """Keep the sums, and give the slot back; nothing is in flight."""
        if not self.closed:
            try:
                self.fetch()
            finally:
                self._final, self.closed = self._now(), True
                self._free(self.number)

    def _now(self) -> tuple[int, int]:
        if self.closed:
            return self._final
        return int(self._seen[0]) - self._base[0], int(self._seen[1]) - self._base[1]


class Copies(Protocol):
    """The copies before and after one executor's inferences. One thread at a time."""

    @property
    def captured(self) -> bool:
        """Whether a graph may contain them and be launched again with other addresses."""

    def table(self, spans: Sequence[Span]) -> Table:
        """The addresses of one inference, inputs, then outputs, in the form that `write` takes. It can be written any number
        of times.
        """

    def write(self, table: Table) -> None:
        """Set the addresses of the next inference."""

    def copy_in(self, stream: Stream, clock: int = 0) -> None:
        """Submit or capture the copies of the inputs. The time is added to this `DeviceClock`. Raises CUDAError."""

    def copy_out(self, stream: Stream, clock: int = 0) -> None:
        """Submit or capture the copies of the outputs. Raises CUDAError."""

    def take_clock(self, stream: Stream) -> DeviceClock | None:
        """A clock for an executor that uses these copies, on this stream; None where none is left, or they measure nothing."""

    def count(self) -> None:
        """Move on to the next inference, after the last copies of this one were submitted, by a call or in a graph."""

    def close(self) -> None:
        """Free what they hold; nothing may be in flight."""


class SmCopies:
    """Copies by SMs: two kernels, a ring of tables and the count of inferences. Row n of a table is tensor n."""

    captured = True

    def __init__(
        self, kernels: "CopyKernels", ring: Buffer, state: Buffer, inputs: int, rows: int, clocks: Buffer, seen: Buffer
    ) -> None:
        self._copy_in, self._copy_out, turns = kernels
        self._ring = ring
        self._state = state
        self._clocks = clocks
        self._seen = seen
        self._in = (ring, np.uint32(RING_LENGTH), np.uint32(rows), np.uint32(inputs), state, turns, clocks, seen)
        self._out = (np.uint32(rows), np.uint32(inputs), state, turns, clocks)
        self._times = np.frombuffer(view(int(seen.handle), 16 * CLOCKS), np.uint64).reshape(CLOCKS, 2)
        self._times[:] = 0
        self._free_clocks = list(range(CLOCKS - 1, 0, -1))
        self._tables = _tables(ring, rows)
        counted = np.zeros(1, np.uint64)
        self._counted = counted.data  # Its elements are Python's integers, and quicker to read than NumPy's.
        self.counted_address: int = counted.ctypes.data
        """Where the number of inferences is, a uint64, for those who launch graphs without `count`."""

    @property
    def tables_address(self) -> int:
        """Where the ring of tables is."""
        return int(self._ring.handle)

    def table(self, spans: Sequence[Span]) -> Table:
        return np.array(spans, np.uint64).reshape(self._tables.shape[1:])

    def write(self, table: Table) -> None:
        self._tables[self._counted[0] % RING_LENGTH] = table

    def copy_in(self, stream: Stream, clock: int = 0) -> None:
        launch(stream, IN, self._copy_in, *self._in, np.uint32(clock))

    def copy_out(self, stream: Stream, clock: int = 0) -> None:
        launch(stream, OUT, self._copy_out, *self._out, np.uint32(clock))

    def take_clock(self, stream: Stream) -> DeviceClock | None:
        try:
            number = self._free_clocks.pop()
        except IndexError:
            return None
        return DeviceClock(number, self._times[number], lambda: self._fetch(number, stream), self._free_clocks.append)

    def _fetch(self, clock: int, stream: Stream) -> None:
        """Have the GPU write what this clock says. Blocks until the stream is done. Raises CUDAError."""
        to, source = int(self._seen.handle) + 16 * clock, int(self._clocks.handle) + 32 * clock
        handle_return(driver.cuMemcpyAsync(to, source, 16, stream.handle))
        stream.sync()

    def count(self) -> None:
        """Count as the device does in the last copy: both have to use the same table."""
        self._counted[0] += 1

    def close(self) -> None:
        for buffer in (self._ring, self._state, self._clocks, self._seen):
            buffer.close()


class EngineCopies:
    """Copies by the copy engines, a call for each piece of a tensor; host memory must be pinned."""

    captured = False

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._spans: Sequence[Span] = ()

    def table(self, spans: Sequence[Span]) -> Table:
        return spans

    def write(self, table: Table) -> None:
        self._spans = table

    def take_clock(self, stream: Stream) -> DeviceClock | None:
        return None

    def copy_in(self, stream: Stream, clock: int = 0) -> None:
        _submit(self._spans[: self._inputs], stream, inwards=True)

    def copy_out(self, stream: Stream, clock: int = 0) -> None:
        _submit(self._spans[self._inputs :], stream, inwards=False)

    def count(self) -> None:
        """Do nothing: each call carries its addresses."""

    def close(self) -> None:
        """Do nothing."""


class CopyKernels(NamedTuple):
    """The two kernels of a device, and the turns that all of their launches take."""

    copy_in: Kernel
    copy_out: Kernel
    turns: Buffer


def copy_kernels(device: CudaDevice, kept: Path | None = None) -> CopyKernels:
    """Those for the copies of all models on a device. It becomes current in this thread.

    The first call compiles them, or takes them from the folder where they are `kept`: see `Kernels.compiled`. Raises
    PartitionError.
    """
    current = device.make_current()
    with device.driver_memory.changing(in_turn=True):
        copy_in, copy_out = device.kernels.compiled(current, SOURCE, ("copy_in", "copy_out"), "the copy kernels", kept)
        return CopyKernels(copy_in, copy_out, device.kernels.memory(current, SOURCE, TURNS_BYTES))


def uses_sms(setting: str, nbytes: int) -> bool:
    """Whether the SMs copy `nbytes`, in and out together. `setting` is `sm`, `engine` or `auto`."""
    return setting == "sm" or (setting == "auto" and nbytes <= SM_COPY_LIMIT)


def open_sm_copies(device: CudaDevice, stream: Stream, inputs: int, rows: int, kept: Path | None = None) -> SmCopies:
    """Copies for `rows` tensors, the first `inputs` of which are inputs; `stream` may go before them.

    The device becomes current in this thread; `kept` is as for `copy_kernels`. Blocks. Raises PartitionError.
    """
    kernels, current = copy_kernels(device, kept), device.make_current()
    with translated("allocating the ring of copy tables"):
        ring = LegacyPinnedMemoryResource().allocate(RING_LENGTH * rows * 24)
        state = current.allocate(16 + rows * 24, stream=stream)
        state.fill(0, stream=stream)
        clocks = current.allocate(32 * CLOCKS, stream=stream)
        clocks.fill(0, stream=stream)
        seen = LegacyPinnedMemoryResource().allocate(16 * CLOCKS)
        stream.sync()
        for buffer in (state, clocks):
            buffer.set_deallocation_stream(device.free_stream)
    return SmCopies(kernels, ring, state, inputs, rows, clocks, seen)


def _tables(ring: Buffer, rows: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    return np.frombuffer(view(int(ring.handle), RING_LENGTH * rows * 24), np.uint64).reshape(RING_LENGTH, rows, 3)


def _submit(spans: Sequence[Span], stream: Stream, inwards: bool) -> None:
    for source, target, nbytes in spans:
        host = source if inwards else target
        for at, size in pieces(host, nbytes, ENGINE_PIECE):
            handle_return(driver.cuMemcpyAsync(target + at - host, source + at - host, size, stream.handle))
