"""Orders the preparations of one executor, in the background, with what other executors of the same instance have in flight.

Executors that share an instance take turns with inferences. A preparation is no inference and takes no turn: it runs new shapes
once, on memory that the graphs of all of them use, while another executor may have its turn.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import NamedTuple

from cuda.core import Stream

from .capture import holding_execution_lock
from .stream_order import StreamOrder


class Sharer(NamedTuple):
    """One executor: its lock, its partition's stream, and what revokes its recipes, for which the lock has to be held."""

    lock: RLock
    stream: Stream
    order: StreamOrder
    revoke: Callable[[], None]


class Sharers:
    """The executors of one instance. Any thread may call any method."""

    def __init__(self) -> None:
        self._all: list[Sharer] = []

    def join(self, sharer: Sharer) -> "Membership":
        """Add an executor, until the result is closed."""
        self._all.append(sharer)
        return Membership(self._all, sharer)

    @contextmanager
    def between(self, lock: RLock) -> Iterator[None]:
        """What the block submits to the stream of the executor with this lock runs after all that is in flight on the others'
        streams, and before what is launched there later. None of them enqueues during the block, so it should be short.

        Holds the execution lock and those of all executors. Raises CUDAError.
        """
        with holding_execution_lock(lambda: [sharer.lock for sharer in list(self._all)]):
            (own,) = [sharer for sharer in self._all if sharer.lock is lock]
            others = [sharer for sharer in self._all if sharer is not own]
            here = int(own.stream.handle)
            for other in others:
                other.revoke()  # The launch loop does not take its lock.
                own.order.order(int(other.stream.handle), here)
            try:
                yield
            finally:
                for other in others:
                    own.order.order(here, int(other.stream.handle))


class Membership:
    """That an executor shares an instance, until it is closed."""

    def __init__(self, members: list[Sharer], sharer: Sharer) -> None:
        self._members = members
        self._sharer = sharer

    def close(self) -> None:
        """Leave."""
        if self._sharer in self._members:
            self._members.remove(self._sharer)
