"""The CUDA context that is current in a thread is its caller's: what CUDA's libraries make current is taken away again.

A library that uses the CUDA runtime makes a device's primary context current in the thread that calls it, and leaves it so:
TensorRT-RTX 1.6.1 does when a plan is deserialised (H100, 2026-11-22).
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored() -> Iterator[None]:
    """Leave the context that is current in the calling thread so, none included. Never fails of itself.

    Where CUDA is not installed, or there is no driver, nothing is current and this does nothing.
    """
    try:
        from cuda.bindings import driver

        _, before = driver.cuCtxGetCurrent()  # NULL where there is none; None where it cannot be asked.
    except (ImportError, RuntimeError):
        before = None
    try:
        yield
    finally:
        if before is not None:
            driver.cuCtxSetCurrent(before)  # NULL takes away what the block has made current.
