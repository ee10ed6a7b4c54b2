"""Locks of threads that load kernels: while one waits for another, kernels are loaded without pauses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, RLock

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


class SharedLock:
    """A readers-writer lock that releases the GIL while it waits and prefers writers.

    A thread that waits for exclusive access goes before threads that later ask to share. Not reentrant: a thread that shares
    the lock and asks for it exclusively waits for itself. While a thread waits, kernels are loaded without pauses.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._sharers = 0
        self._exclusive = False
        self._waiting = 0

    def __repr__(self) -> str:
        return f"<SharedLock {'held exclusively' if self._exclusive else f'shared by {self._sharers}'}>"

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold it together with other sharers. Blocks while a thread holds it exclusively or waits to."""
        with self._changed:
            self._wait(lambda: not self._exclusive and not self._waiting)
            self._sharers += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharers -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold it as the only thread. Blocks until every sharer has released it."""
        with self._changed:
            self._waiting += 1
            try:
                self._wait(lambda: not self._exclusive and not self._sharers)
            finally:
                self._waiting -= 1
            self._exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = False
                self._changed.notify_all()

    def _wait(self, is_free: Callable[[], bool]) -> None:
        """With `_changed` held."""
        if not is_free():
            with KERNEL_LOADS.hurrying():
                self._changed.wait_for(is_free)
