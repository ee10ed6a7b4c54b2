"""Inputs and outputs moved to and from host memory that the GPU maps: by the partition's own SMs, or by the copy engines.

The copy engines are one queue for all tenants; a partition's SMs are its own. So by default two kernels stand around the
engine's work: one brings the inputs in, one takes the outputs out. They find their addresses in a ring of tables that the
host writes, one table an inference, and count inferences on the device: so a captured graph needs no change from one
launch to the next, though every inference has memory of its own.

Copies by the engines are submitted around the graph and not in it. In it, their host addresses would be those of the
first inference: every launch would first have to set every node, and know the nodes by handle. Outside, it is one call
for each tensor, and the stream keeps the order.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from cuda.bindings import driver
from cuda.core import Buffer, Device, Kernel, LaunchConfig, LegacyPinnedMemoryResource, Program, ProgramOptions, Stream, launch

from partitions import PartitionError
from partitions.cuda.driver import handle_return, translated

from ..memory import view

SOURCE = r"""
struct Row { const char *from; char *to; unsigned long long nbytes; };
struct State { unsigned turn, arrived, unused[2]; Row rows[1]; };

constexpr unsigned FEW = 12;
constexpr unsigned long long LARGE = 4 << 20;

// Row n begins with block n, so that small tensors of one inference come at the same time, each by a block of its own.
// A large one is left to few blocks: more would ask the host for more at a time than it can answer, and whatever a neighbour
// asks for then waits behind it.
__device__ void copy(const Row &row, unsigned number) {
    const unsigned blocks = row.nbytes > LARGE ? min(gridDim.x, FEW) : gridDim.x;
    const unsigned long long block = (blockIdx.x + gridDim.x - number % gridDim.x) % gridDim.x;
    if (block >= blocks) return;
    const unsigned long long thread = block * blockDim.x + threadIdx.x, threads = blocks * blockDim.x;
    const bool aligned = !((reinterpret_cast<size_t>(row.from) | reinterpret_cast<size_t>(row.to)) & 15);
    const unsigned long long wide = aligned ? row.nbytes / 16 : 0;
    for (unsigned long long at = thread; at < wide; at += threads)
        reinterpret_cast<uint4 *>(row.to)[at] = reinterpret_cast<const uint4 *>(row.from)[at];
    for (unsigned long long at = wide * 16 + thread; at < row.nbytes; at += threads) row.to[at] = row.from[at];
}

// The host's memory is asked for the table once, and the device keeps it for take_out: behind a neighbour's copies each
// such question takes 15 microseconds.
extern "C" __global__ void bring_in(const Row *ring, unsigned length, unsigned rows, unsigned inputs, State *state) {
    constexpr unsigned HELD = 128;
    __shared__ Row held[HELD];
    const Row *table = ring + (state->turn % length) * rows;
    for (unsigned row = threadIdx.x; row < min(rows, HELD); row += blockDim.x) held[row] = table[row];
    __syncthreads();
    for (unsigned row = 0; row < inputs; ++row) copy(row < HELD ? held[row] : table[row], row);
    if (blockIdx.x != gridDim.x - 1) return;
    for (unsigned row = inputs + threadIdx.x; row < rows; row += blockDim.x)
        state->rows[row] = row < HELD ? held[row] : table[row];
}

extern "C" __global__ void take_out(unsigned rows, unsigned inputs, State *state) {
    for (unsigned row = inputs; row < rows; ++row) copy(state->rows[row], row - inputs);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0 && atomicInc(&state->arrived, gridDim.x - 1) == gridDim.x - 1) state->turn += 1;
}
"""

# What moved 600 KB in 29 us and 38 MB at 48 GB/s on an H100, when the copy engine took 22 us and gave 51 GB/s. FEW
# above is from such a machine too, 2 to 32 blocks tried (2026-11-21, the script is not kept): 12 move 38 MB as fast as 32
# (779 us), 8 take 901; a neighbour's 3 KB meanwhile takes 36 us beside 12 and 78 beside 32, its 600 KB 54 and 111. LARGE was
# chosen and not measured.
CONFIG = LaunchConfig(grid=32, block=512)
LENGTH = 16
"""Tables in a ring: the most inferences of one executor that may be in flight."""


SM_COPIES_UP_TO = 32 << 20
"""Bytes that an inference may move, in and out together, for `auto` to leave them to the SMs.

Measured on an H100 by `python -m benchmarks.copies` (2026-11-21): 600 KB took the SMs 37 to 39 us where the engines took 23,
and 54 to 61 us while a neighbour's SMs brought in 38 MB; in the engines' queue behind a neighbour's 38 MB it was 748 to 763.
From some 32 MB on a neighbour's 38 MB cost either way the same (1.5 to 1.7 ms for 38 MB), and the engines are a tenth faster
alone. What neighbours copy meanwhile by SMs they slow down a little more (69 to 78 us for 600 KB); that all went by SMs made
no difference to a whole inference's p99 (1.02 times alone either way).
"""

Span = tuple[int, int, int]
"""From where, to where and how many bytes one tensor goes."""
Table = Any
"""Spans in the form that those who copy them want, made by `Copies.table`."""


class Copies(Protocol):
    """The copies around one executor's inferences. One thread at a time."""

    @property
    def captured(self) -> bool:
        """Whether a graph may hold them, to be launched again for other addresses."""

    def table(self, spans: Sequence[Span]) -> Table:
        """Where the tensors of an inference go, inputs, then outputs, as `write` takes it; as often as wanted."""

    def write(self, table: Table) -> None:
        """Say where the tensors of the next inference go."""

    def bring_in(self, stream: Stream) -> None:
        """Submit the copies of its inputs, or capture them. Raises CUDAError."""

    def take_out(self, stream: Stream) -> None:
        """Submit the copies of its outputs, or capture them. Raises CUDAError."""

    def count(self) -> None:
        """The next inference is another one: the last copies of this one were submitted, by call or in a graph."""

    def close(self) -> None:
        """Free what they hold; nothing may be in flight."""


class Copier:
    """Copies by SMs: the two kernels, their ring of tables and the count of inferences. Row n of a table is tensor n."""

    captured = True

    def __init__(self, kernels: tuple[Kernel, Kernel], ring: Buffer, state: Buffer, inputs: int, rows: int) -> None:
        self._bring_in, self._take_out = kernels
        self._ring = ring
        self._state = state
        self._in = (ring, np.uint32(LENGTH), np.uint32(rows), np.uint32(inputs), state)
        self._out = (np.uint32(rows), np.uint32(inputs), state)
        self._tables = _tables(ring, rows)
        self._counted = 0

    def __repr__(self) -> str:
        return f"<Copier of {self._tables.shape[1]} tensors>"

    def table(self, spans: Sequence[Span]) -> Table:
        return np.array(spans, np.uint64).reshape(self._tables.shape[1:])

    def write(self, table: Table) -> None:
        self._tables[self._counted % LENGTH] = table

    def bring_in(self, stream: Stream) -> None:
        launch(stream, CONFIG, self._bring_in, *self._in)

    def take_out(self, stream: Stream) -> None:
        launch(stream, CONFIG, self._take_out, *self._out)

    def count(self) -> None:
        """As the device does in the last copy: the two have to agree on the table."""
        self._counted += 1

    def close(self) -> None:
        self._ring.close()
        self._state.close()


class EngineCopies:
    """Copies by the copy engines, a call for each tensor that has bytes; the host memory must be pinned."""

    captured = False

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._spans: Sequence[Span] = ()

    def __repr__(self) -> str:
        return f"<EngineCopies, {self._inputs} in>"

    def table(self, spans: Sequence[Span]) -> Table:
        return spans

    def write(self, table: Table) -> None:
        self._spans = table

    def bring_in(self, stream: Stream) -> None:
        _submit(self._spans[: self._inputs], stream)

    def take_out(self, stream: Stream) -> None:
        _submit(self._spans[self._inputs :], stream)

    def count(self) -> None:
        """Nothing: each call has its addresses."""

    def close(self) -> None:
        """Nothing."""


def compile_kernels(device: Device) -> tuple[Kernel, Kernel]:
    """Compile the two kernels for a device, which must be current in this thread. Blocks. Raises PartitionError."""
    try:
        with translated("compiling the copy kernels"):
            code = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{device.arch}")).compile("cubin")
            return code.get_kernel("bring_in"), code.get_kernel("take_out")
    except RuntimeError as error:  # libnvrtc was not found
        raise PartitionError(f"compiling the copy kernels needs NVRTC, pip install nvidia-cuda-nvrtc: {error}") from error


def by_sms(setting: str, nbytes: int) -> bool:
    """Whether the SMs move an inference's `nbytes`, in and out together. `setting` is `sm`, `engine` or `auto`."""
    return setting == "sm" or (setting == "auto" and nbytes <= SM_COPIES_UP_TO)


def open_copier(device: Device, stream: Stream, kernels: tuple[Kernel, Kernel], inputs: int, rows: int) -> Copier:
    """Make a copier for `rows` tensors, of which the first are `inputs`. Blocks. Raises PartitionError."""
    with translated("making the ring of copies"):
        ring = LegacyPinnedMemoryResource().allocate(LENGTH * rows * 24)
        state = device.allocate(16 + rows * 24, stream=stream)
        state.fill(0, stream=stream)
        stream.sync()
    return Copier(kernels, ring, state, inputs, rows)


def _tables(ring: Buffer, rows: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    return np.frombuffer(view(int(ring.handle), LENGTH * rows * 24), np.uint64).reshape(LENGTH, rows, 3)


def _submit(spans: Sequence[Span], stream: Stream) -> None:
    for source, target, nbytes in spans:
        if nbytes:
            handle_return(driver.cuMemcpyAsync(target, source, nbytes, stream.handle))
