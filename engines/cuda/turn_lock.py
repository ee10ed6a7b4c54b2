"""A lock for calls of the library that may load kernels."""

from threading import RLock

from partitions.cuda.kernel_loads import KERNEL_LOADS


class TurnLock:
    """A reentrant lock. A thread that waits for it has the kernels that its holder loads be loaded without pauses."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __repr__(self) -> str:
        return f"<TurnLock {self._lock!r}>"

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            with KERNEL_LOADS.hurrying():
                self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


EXECUTION_LOCK = TurnLock()
"""Held while an execution compiles or is captured, until its graph is instantiated: one at a time in the process.

Two tenants of one engine that captured graphs at the same time crashed TensorRT-RTX 1.6.1 in `execute_async_v3`, in 3 of 3
runs on an H100 (2026-11-22), and in none of 3 runs one after the other. Launching graphs, and executing shapes that are
compiled, does not take it.
"""
