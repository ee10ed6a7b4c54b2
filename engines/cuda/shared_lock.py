"""A lock that either several threads share or one thread holds exclusively."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

from partitions.cuda.kernel_loads import KERNEL_LOADS


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
