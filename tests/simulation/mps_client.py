"""`python -m tests.gpu.mps_client` on a simulated GPU."""

from collections.abc import Callable
from contextlib import ExitStack
from ctypes import c_uint32
from itertools import cycle
from unittest.mock import patch

from tests.gpu import mps_client as real

from . import Gpu, installed, kernels
from .streams import Stream
from .turns import take_turn


def bad(gpu: Gpu, stream: Stream, blocks: int, at: int) -> Callable[[], None]:
    """Writes where nothing is."""
    return lambda: gpu.write(at, b"\0\0\0\1")


def spin(gpu: Gpu, stream: Stream, blocks: int, nanoseconds: int) -> Callable[[], None]:
    """In flight until it is waited for."""
    return lambda: None


def keep(gpu: Gpu, stream: Stream, blocks: int, at: int) -> Callable[[], None]:
    """Has its turn from its launch until its process is ended."""
    kernels.do(gpu, at, take_turn())
    return lambda: None


def small(gpu: Gpu, stream: Stream, blocks: int, at: int) -> Callable[[], None]:
    return lambda: None


def hold(gpu: Gpu, stream: Stream, blocks: int, gate: int, rows: int, most: int) -> Callable[[], None]:
    """Has the SMs from its launch until the stream is waited for, which is once the gate is open."""
    left = ExitStack()
    sms, _ = left.enter_context(kernels.taken(gpu, stream))
    words = (c_uint32 * blocks).from_address(gpu.reach(rows, 4 * blocks))
    words[:] = [sm + 1 for sm, _ in zip(cycle(sms), words, strict=False)]
    return left.close


if __name__ == "__main__":
    with installed(Gpu(index=0)), patch.dict(kernels.KERNELS, bad=bad, spin=spin, hold=hold, fetch=bad, keep=keep, small=small):
        real.run()
