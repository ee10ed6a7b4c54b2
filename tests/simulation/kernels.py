"""The project's kernels in Python: each takes the GPU, the stream, the blocks and its arguments, and returns the function to
run.
"""

import fcntl
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from ctypes import c_int64, c_uint32, c_uint64
from itertools import cycle
from pathlib import Path
from threading import Lock
from time import sleep
from typing import IO, Any

from .errors import Misuse
from .gpu import Gpu
from .mps_daemon import PIPES
from .streams import Stream
from .turns import Steps, pass_turn, take_turn, word

_TURN = Lock()
ROW = 24
"""Bytes of an address from, an address to, and a number of bytes."""
TURN, SMALL = 128, 4096
"""Bytes of a block's turn, and of a tensor that is copied without one."""
KEPT = 16
"""Bytes before the rows that the device keeps: whose turn it is, how many blocks have arrived."""


def where_am_i(gpu: Gpu, stream: Stream, blocks: int, seen: int, nanoseconds: int) -> Callable[[], None]:
    """Each block writes its SM, and when it began and ended. An SM has room for two; others wait until these end.

    Under MPS other processes do not get the SMs meanwhile. Blocks for SMs that another process has are run by the others later.
    """
    if nanoseconds <= 0:
        raise Misuse("blocks that end at once do not fill an SM")

    def run() -> None:
        rows = (c_int64 * 3 * blocks).from_address(gpu.reach(seen, ROW * blocks))
        waves: Counter[int] = Counter()
        with taken(gpu, stream) as (free, busy):
            start, others = gpu.timer(), cycle(free)
            for row, chosen in zip(rows, gpu.run_blocks(stream, blocks), strict=True):
                sm = next(others) if chosen in busy else chosen
                began = start + waves[sm] // 2 * nanoseconds
                row[:] = [sm, began, began + nanoseconds]
                waves[sm] += 1
            if gpu.mps:
                sleep((-(-max(waves.values()) // 2)) * nanoseconds / 1e9)

    return run


@contextmanager
def taken(gpu: Gpu, stream: Stream) -> Iterator[tuple[list[int], set[int]]]:
    """Take the SMs of this stream that no other client of the same daemon has, by locks on files in the daemon's folder.

    Yields their numbers in the stream's context, and the numbers of those that others have. Waits for one if that is all.
    """
    with ExitStack() as left:
        names = [f"sm{sm}" for sm in sorted(stream.context.sms)] if gpu.mps else []
        files = [left.enter_context(Path(os.environ[PIPES], name).open("w")) for name in names]
        busy = {sm for sm, file in enumerate(files) if not _locked(file)}
        if files and len(busy) == len(files):
            fcntl.flock(files[0], fcntl.LOCK_EX)
            busy.remove(0)
        yield [sm for sm in range(len(files)) if sm not in busy], busy


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def copy_in(
    gpu: Gpu,
    stream: Stream,
    blocks: int,
    ring: int,
    length: int,
    rows: int,
    inputs: int,
    state: int,
    turns: int,
    clocks: int,
    seen: int,
    clock: int,
) -> Callable[[], None]:
    """Copy the first `inputs` rows of the current table; the device keeps the others. The clock begins, and is shown."""

    def run() -> None:
        numbers = _clock(gpu, clocks, clock)
        numbers[2] = gpu.timer()
        (c_uint64 * 2).from_address(gpu.reach(seen + 16 * clock, 16))[:] = numbers[:2]
        table = ring + _count(gpu, state).value % length * rows * ROW
        _copy(gpu, table, range(inputs), [turns + TURN * (1 + block) for block in range(blocks)])
        gpu.copy(table + inputs * ROW, state + KEPT + inputs * ROW, (rows - inputs) * ROW)

    return run


def copy_out(
    gpu: Gpu, stream: Stream, blocks: int, rows: int, inputs: int, state: int, turns: int, clocks: int, clock: int
) -> Callable[[], None]:
    """Copy the rows that were kept, and go on to the next table. What has passed is added to the clock."""

    def run() -> None:
        _copy(gpu, state + KEPT, range(inputs, rows), [turns + TURN * block for block in range(blocks)])
        _count(gpu, state).value += 1
        numbers = _clock(gpu, clocks, clock)
        numbers[0] += gpu.timer() - numbers[2]
        numbers[1] += 1

    return run


def _clock(gpu: Gpu, clocks: int, clock: int) -> Any:
    return (c_uint64 * 4).from_address(gpu.reach(clocks + 32 * clock, 32))


def _count(gpu: Gpu, state: int) -> c_uint32:
    return c_uint32.from_address(gpu.reach(state, 8))


def _copy(gpu: Gpu, table: int, rows: range, turns: list[int]) -> None:
    """Each block takes and passes on its turn for each row that is not small."""
    for row in rows:
        source, target, nbytes = (c_uint64 * 3).from_address(gpu.reach(table + row * ROW, ROW))
        gpu.copy(source, target, nbytes)
        for address in (source, target) if nbytes else ():
            _move(gpu, address, nbytes, 1, written=address == target)
        for turn in turns if nbytes > SMALL else ():
            do(gpu, turn, pass_turn(do(gpu, turn, take_turn())))


def do(gpu: Gpu, turn: int, steps: Steps) -> int:
    """Have a thread make these steps with a turn in the GPU's memory. Returns what they return."""
    words, given = (c_uint32 * 2).from_address(gpu.reach(turn, TURN)), 0
    while True:
        try:
            step = steps.send(given) if inspect.getgeneratorstate(steps) == inspect.GEN_SUSPENDED else next(steps)
        except StopIteration as end:
            return int(end.value)
        if step.what == "sleep":
            sleep(1e-5)
        with _atomically(gpu):
            given = 2 * gpu.timer() if step.what == "clock" else words[step.word]  # Two cycles in a nanosecond.
            if step.what == "add":
                words[step.word] = word(given + step.new)
            elif step.what == "swap" and given == step.old:
                words[step.word] = step.new


@contextmanager
def _atomically(gpu: Gpu) -> Iterator[None]:
    """No thread of any process with the same MPS daemon is here at the same time."""
    with _TURN, ExitStack() as left:
        if gpu.mps:
            with suppress(FileNotFoundError):  # The daemon has ended, and with it the other processes.
                fcntl.flock(left.enter_context(Path(os.environ[PIPES], "atomic").open("w")), fcntl.LOCK_EX)
        yield


def read_memory(gpu: Gpu, stream: Stream, blocks: int, source: int, target: int, count: int, times: int) -> Callable[[], None]:
    """Read all of so many units of 16 bytes."""
    return lambda: _move(gpu, source, count * 16, times, written=False)


def write_memory(gpu: Gpu, stream: Stream, blocks: int, source: int, target: int, count: int, times: int) -> Callable[[], None]:
    """Write them."""
    return lambda: _move(gpu, target, count * 16, times, written=True)


def copy_memory(gpu: Gpu, stream: Stream, blocks: int, source: int, target: int, count: int, times: int) -> Callable[[], None]:
    """Read them here, and write them there."""

    def run() -> None:
        _move(gpu, source, count * 16, times, written=False)
        _move(gpu, target, count * 16, times, written=True)

    return run


def read_sectors(gpu: Gpu, stream: Stream, blocks: int, source: int, target: int, count: int, times: int) -> Callable[[], None]:
    """Read 32 bytes here and there."""
    return lambda: _move(gpu, source, count * 16, times, written=False)


def _move(gpu: Gpu, address: int, nbytes: int, times: int, written: bool) -> None:
    """Reach all of this memory; the GPU's meters see it."""
    gpu.reach(address, nbytes)
    region = gpu.region_of(address)
    if gpu.moved is None:
        return
    memory, incoming, outgoing = gpu.moved
    if region and region.device == gpu.index:
        memory += nbytes * times
    elif written:
        outgoing += nbytes * times
    else:
        incoming += nbytes * times
    gpu.moved = memory, incoming, outgoing


KERNELS: Mapping[str, Callable[..., Any]] = {
    each.__name__: each for each in (where_am_i, copy_in, copy_out, read_memory, write_memory, copy_memory, read_sectors)
}
