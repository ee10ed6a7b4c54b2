"""Restores the CUDA context that was current in a thread before a library was called.

Problem: a library that uses the CUDA runtime makes a device's primary context current in the thread that calls it, and leaves
it so: TensorRT-RTX 1.6.1 does when a plan is deserialised (H100, 2026-11-22). The context belongs to the caller of this
library, which may use another one.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored() -> Iterator[None]:
    """Make the context that is current before the block, or none, current after it. Never raises.

    Does nothing where CUDA is not installed, or there is no driver.
    """
    try:
        from cuda.bindings import driver

        _, before = driver.cuCtxGetCurrent()  # NULL if there is none; None if the call fails.
    except (ImportError, RuntimeError):
        before = None
    try:
        yield
    finally:
        if before is not None:
            driver.cuCtxSetCurrent(before)  # NULL for no context.
