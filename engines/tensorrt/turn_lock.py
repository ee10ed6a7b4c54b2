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
