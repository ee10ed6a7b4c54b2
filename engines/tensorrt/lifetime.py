"""Frees what an engine's instances and an executor's graphs hold: when they are closed, or else when they are collected.

An executor that is not closed is released when the last reference to it goes. A work in flight refers to its executor, so
binding, enqueueing and waiting in one expression is safe. `Finalizer` outlives the executor for this; nothing here refers
to an executor.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from cuda.bindings import driver

from partitions.base import Closing
from partitions.cuda.device import CudaPartition
from partitions.cuda.driver import handle_return
from partitions.cuda.kernel_loads import KERNEL_LOADS

from ..cuda.capture import is_capturing
from ..cuda.work import failing
from .instance import Instance
from .shapes import ReadyShapes

log = logging.getLogger("greenlane.engines")

_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class InstancePool:
    """An engine's idle instances, and the finalizers of its executors. Any thread may call any method."""

    def __init__(self) -> None:
        self._idle: deque[Instance] = deque()
        self._finalizers: dict[int, Finalizer] = {}
        self._postponed: deque[Finalizer] = deque()
        self._closed = False

    def __repr__(self) -> str:
        executors, postponed = len(self._finalizers), len(self._postponed)
        return f"<InstancePool of {len(self._idle)} idle instances, {executors} executors, {postponed} to be released>"

    def memory(self) -> list[dict[str, int]]:
        """What the idle instances take."""
        return [instance.memory for instance in list(self._idle)]

    def take(self) -> Instance | None:
        """An idle instance, if there is one."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give_back(self, instance: Instance) -> None:
        """Count one user less of an instance. After its last user it is idle and kept for the next executor.

        It is freed instead if the engine is closed, or if it has native graphs, which keep the SMs of the partition they were
        made on. Raises ExecutionFailed.
        """
        if not instance.remove_user():
            return
        if self._closed or instance.graph_mode.native:
            instance.close()
        else:
            self._idle.append(instance)

    def add(self, finalizer: "Finalizer") -> None:
        """Register an executor's finalizer."""
        self._finalizers[id(finalizer)] = finalizer

    def remove(self, finalizer: "Finalizer") -> None:
        """Forget a finalizer that has run."""
        self._finalizers.pop(id(finalizer), None)

    def postpone(self, finalizer: "Finalizer") -> None:
        """Leave a finalizer to the next call of `release_postponed`."""
        self._postponed.append(finalizer)

    def release_postponed(self) -> None:
        """Run the finalizers that were postponed. Blocks. Errors are logged, as the executors were not the caller's."""
        while self._postponed:
            _release(self._postponed.popleft())

    def release_all(self) -> None:
        """Run every finalizer, as the garbage collector may find an engine before its executors. Blocks and never raises."""
        for finalizer in list(self._finalizers.values()):
            _release(finalizer)

    def close(self) -> None:
        """Free the idle instances now, and every other one after its last executor. Raises ExecutionFailed."""
        self._closed = True
        self.release_postponed()
        with ExitStack() as closing:
            while idle := self.take():
                closing.callback(idle.close)


class Finalizer:
    """Releases what an executor holds on its partition: its instance, `resources` in this order, and its graphs."""

    def __init__(
        self,
        name: str,
        pool: InstancePool,
        instance: Instance,
        partition: CudaPartition,
        resources: tuple[Closing, ...],
        shapes: ReadyShapes,
    ) -> None:
        self.closed = False
        self._name = name
        self._pool = pool
        self._instance = instance
        self._partition = partition
        self._resources = resources
        self._shapes = shapes

    def release(self) -> None:
        """Wait for the stream, destroy graphs, events and streams, and give the instance back, even if one step fails.

        Blocks. Calling it again does nothing. Raises ExecutionFailed, DeviceLost.
        """
        self._shapes.stop_preparing()
        if self.closed:
            return
        self.closed = True
        with failing(f"closing {self._name}"), ExitStack() as closing:
            context = closing.enter_context(ExitStack())
            closing.callback(self._pool.remove, self)
            closing.callback(self._pool.give_back, self._instance)
            for resource in self._resources:
                closing.callback(resource.close)
            closing.callback(self._shapes.close)
            closing.callback(self._instance.wait_until_idle)
            context.enter_context(self._partition.device.current())
            self._partition.stream.sync()

    def collected(self) -> None:
        """Release when the executor was collected, on whichever thread that happens. Blocks for its stream; never raises.

        Postponed to the next `bind`, `rebind` or `close` of the engine if this thread is capturing a graph, which would be
        invalidated, or if a thread prepares shapes for the executor, which the collector must not wait for.
        """
        if self.closed:
            return
        if is_capturing() or self._shapes.is_preparing:
            self._pool.postpone(self)
        else:
            _release(self)


def close_collected(pool: InstancePool, close: Callable[[], None]) -> None:
    """Free an engine that was collected, or that still exists when the interpreter exits. Never raises."""
    try:
        with _relaxed_capture_mode():
            pool.release_all()
            pool.close()
            close()
    except Exception as error:
        log.warning("freeing an engine that was not closed failed: %s", error)


def _release(finalizer: Finalizer) -> None:
    try:
        with _relaxed_capture_mode(), KERNEL_LOADS.freeing():
            finalizer.release()
    except Exception as error:
        log.warning("freeing an executor that was not closed failed: %s", error)


@contextmanager
def _relaxed_capture_mode() -> Iterator[None]:
    """Do not invalidate a graph that the caller of this library captures in the calling thread.

    While a thread captures a stream, CUDA forbids it calls that might wait for the device, except in this mode
    (cuThreadExchangeStreamCaptureMode in the CUDA driver API's documentation, "Stream Management").
    """
    before = handle_return(driver.cuThreadExchangeStreamCaptureMode(_RELAXED))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)
