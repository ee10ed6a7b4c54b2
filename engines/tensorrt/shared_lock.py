"""A lock that many threads hold together, or one holds alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class SharedLock:
    """`shared` and `alone` exclude each other. Waiting for it lets go of the interpreter.

    A thread that waits to be alone goes before threads that come later to share. Not reentrant: a thread that holds it and
    asks for it alone waits for itself.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._sharing = 0
        self._alone = False
        self._waiting = 0

    def __repr__(self) -> str:
        return f"<SharedLock {'held alone' if self._alone else f'shared by {self._sharing}'}>"

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Beside other threads that share it. Blocks while a thread is alone, or waits to be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._waiting)
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """With no other thread. Blocks until those that hold it have let go."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._alone and not self._sharing)
            finally:
                self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
