"""`python -m tests.gpu.mps_client` on a simulated GPU."""

from collections.abc import Callable
from unittest.mock import patch

from tests.gpu import mps_client as real

from . import Gpu, installed, kernels
from .streams import Stream


def bad(gpu: Gpu, stream: Stream, blocks: int, at: int) -> Callable[[], None]:
    """Writes where nothing is."""
    return lambda: gpu.write(at, b"\0\0\0\1")


def spin(gpu: Gpu, stream: Stream, blocks: int, nanoseconds: int) -> Callable[[], None]:
    """In flight until it is waited for."""
    return lambda: None


if __name__ == "__main__":
    with installed(Gpu(index=0)), patch.dict(kernels.KERNELS, bad=bad, spin=spin):
        real.run()
