"""What an engine's instances and an executor's graphs are given back by: a call of `close`, or else the garbage collector.

An executor that is not closed is released when its last reference goes, which a work in flight is one of: so one line that
binds, enqueues and waits is right. `Held` is what outlives the executor for that. Nothing here refers to an executor.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from cuda.bindings import driver

from partitions.base import Closing
from partitions.cuda.device import CudaPartition
from partitions.cuda.driver import handle_return

from .capture import is_capturing
from .instance import Instance
from .shapes import ReadyShapes
from .work import failing

log = logging.getLogger("greenlane.engines")

_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class Pool:
    """An engine's instances that no executor uses, and what its executors hold. Any thread may call any method."""

    def __init__(self) -> None:
        self._idle: deque[Instance] = deque()
        self._held: dict[int, Held] = {}
        self._left: deque[Held] = deque()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Pool of {len(self._idle)} idle instances, {len(self._held)} executors, {len(self._left)} to be released>"

    def take(self) -> Instance | None:
        """An instance that no executor uses, if there is one."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give_back(self, instance: Instance) -> None:
        """An executor does not use this instance any more; after the last one it is kept for the next.

        It is freed if the engine is closed, or if it has graphs of the library's own, which have the SMs of the partition
        they were made on. Raises ExecutionFailed.
        """
        if not instance.leave():
            return
        if self._closed or instance.way.native:
            instance.close()
        else:
            self._idle.append(instance)

    def add(self, held: "Held") -> None:
        """An executor has this, until `remove`."""
        self._held[id(held)] = held

    def remove(self, held: "Held") -> None:
        """It was released."""
        self._held.pop(id(held), None)

    def postpone(self, held: "Held") -> None:
        """Release it with the next call of `release_left`: its executor was collected where that could not be done."""
        self._left.append(held)

    def release_left(self) -> None:
        """Release what was postponed. Blocks. What goes wrong is a warning, as the executor is not the caller's."""
        while self._left:
            _release(self._left.popleft())

    def release_all(self) -> None:
        """For when the engine is collected: the collector may see it before its executors. Blocks, and never raises."""
        for held in list(self._held.values()):
            _release(held)

    def close(self) -> None:
        """Free the idle instances, and from now on each with its last executor. Raises ExecutionFailed."""
        self._closed = True
        self.release_left()
        with ExitStack() as left:
            while idle := self.take():
                left.callback(idle.close)


class Held:
    """What one executor has on its partition: an instance, `things` to be closed in this order, and graphs of its shapes."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        instance: Instance,
        partition: CudaPartition,
        things: tuple[Closing, ...],
        shapes: ReadyShapes,
    ) -> None:
        self.closed = False
        self._name = name
        self._pool = pool
        self._instance = instance
        self._partition = partition
        self._things = things
        self._shapes = shapes

    def __repr__(self) -> str:
        return f"<Held of {self._name}{', released' if self.closed else ''}>"

    def release(self) -> None:
        """Wait for the stream, destroy graphs, events and streams, and give the instance back, whatever fails; once.

        Blocks. Raises ExecutionFailed, DeviceLost.
        """
        self._shapes.finish()
        if self.closed:
            return
        self.closed = True
        with failing(f"closing {self._name}"), ExitStack() as left:
            context = left.enter_context(ExitStack())
            left.callback(self._pool.remove, self)
            left.callback(self._pool.give_back, self._instance)
            for thing in self._things:
                left.callback(thing.close)
            left.callback(self._shapes.close)
            context.enter_context(self._partition.device.current())
            self._partition.stream.sync()

    def collected(self) -> None:
        """Its executor was collected, in whichever thread that happened. Blocks until its stream has ended; never raises.

        Postponed to the next `bind`, `rebind` or `close` of the engine where the thread captures a graph, which that would
        spoil, and where a thread prepares shapes for the executor, which the collector must not wait for.
        """
        if self.closed:
            return
        if is_capturing() or self._shapes.is_preparing:
            self._pool.postpone(self)
        else:
            _release(self)


def close_collected(pool: Pool, close: Callable[[], None]) -> None:
    """Free an engine that was collected, or lives when the interpreter ends. Never raises."""
    try:
        with _relaxed():
            pool.release_all()
            pool.close()
            close()
    except Exception as error:
        log.warning("an engine that was not closed: %s", error)


def _release(held: Held) -> None:
    try:
        with _relaxed():
            held.release()
    except Exception as error:
        log.warning("an executor that was not closed: %s", error)


@contextmanager
def _relaxed() -> Iterator[None]:
    """Without spoiling a graph that a caller of this library captures in the calling thread, on a stream of their own.

    While a stream is captured in a thread, CUDA prohibits it calls that might wait for the device, but in this mode
    (cuThreadExchangeStreamCaptureMode in the CUDA driver API's documentation, "Stream Management").
    """
    before = handle_return(driver.cuThreadExchangeStreamCaptureMode(_RELAXED))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)
