"""Captures one inference as a CUDA graph, on a stream of the partition that nothing else uses.

While a stream is captured, everything that any thread submits to it becomes part of the capture, and waiting for the stream
invalidates it. Other threads do use the partition's own stream (a model is bound, an executor is closed), so a side stream
of the same green context is captured instead. A graph stays on the SMs of the green context it was captured in, whatever
stream it is launched on.

Python's garbage collector is off meanwhile: it might free an unclosed engine in the capturing thread, which invalidates the
capture too (seen on an H100: cudaError 900 in ~ICudaEngine).
"""

import gc
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from threading import RLock
from typing import Any

from cuda.bindings import driver
from cuda.core import Stream

from partitions.cuda.device import CudaPartition, SideStream
from partitions.cuda.driver import handle_return
from partitions.cuda.driver_memory import Taken

from ..errors import ExecutionFailed
from .locks import EXECUTION_LOCK

_LOCK_TIMEOUT = 0.001
"""Seconds to wait for an executor's lock before the execution lock is released for other threads."""

_THREAD_STATE = threading.local()
_THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Graph:
    """A graph that can be launched. Nothing checks that the memory it works on still exists.

    `taken` is what the driver has taken for it of the device's memory.
    """

    def __init__(self, handle: Any, taken: Taken) -> None:
        self.taken = taken
        self._handle = handle

    @property
    def handle(self) -> Any:
        """The driver's handle; None once it is closed."""
        return self._handle

    def launch(self, stream: Stream) -> None:
        """Launch it on a stream of the green context it was captured in. Raises CUDAError."""
        handle_return(driver.cuGraphLaunch(self._handle, stream.handle))

    def close(self) -> None:
        """Destroy the graph, which must not be in flight. Calling it again does nothing. Raises CUDAError."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with self.taken.freeing():
                handle_return(driver.cuGraphExecDestroy(handle))


def capture(
    partition: CudaPartition, submit: Callable[[SideStream], str], what: Hashable = None, patient: bool = False
) -> Graph:
    """The graph of what `submit` puts on the stream that it is passed; it returns "", or the reason why it failed.

    `what` is equal for graphs that take the same of the device's memory, and `patient` as in `DriverMemory.measuring`.
    Blocks, also while another thread captures or compiles. The calling thread must not be capturing anything else.
    Raises ExecutionFailed, PartitionError, CUDAError.
    """
    with EXECUTION_LOCK, ExitStack() as made:
        with closing(partition.make_stream()) as side:
            graph = _measured(partition, side, submit, what, patient)
            made.callback(graph.close)
        made.pop_all()
        return graph


@contextmanager
def joining_capture() -> Iterator[None]:
    """Holds the execution lock while this thread adds to a capture that the library's caller has begun. Blocks as `capture`."""
    with EXECUTION_LOCK, _gc_disabled():
        yield


@contextmanager
def holding_execution_lock(find_locks: Callable[[], Iterable[RLock]]) -> Iterator[None]:
    """Hold the execution lock and those executors' locks that `find_locks` returns while the execution lock is held.

    Problem: a thread of an executor may hold its lock and wait for the execution lock, or the other way round.
    Solution: take the execution lock first, wait for each other one briefly, and otherwise release all and try again.
    """
    while True:
        with ExitStack() as held:
            held.enter_context(EXECUTION_LOCK)
            if all(_acquire(lock, held) for lock in find_locks()):
                held = held.pop_all()
                break
        time.sleep(_LOCK_TIMEOUT)
    with held:
        yield


def _acquire(lock: RLock, held: ExitStack) -> bool:
    acquired = lock.acquire(timeout=_LOCK_TIMEOUT)
    if acquired:
        held.callback(lock.release)
    return acquired


def is_capturing() -> bool:
    """Whether the calling thread is capturing a graph, so that it must not free CUDA objects."""
    return getattr(_THREAD_STATE, "capturing", False)


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Without the garbage collector. Where blocks of two threads overlap, the first one to end turns it on again."""
    enabled = gc.isenabled()
    gc.disable()
    _THREAD_STATE.capturing = True
    try:
        yield
    finally:
        _THREAD_STATE.capturing = False
        if enabled:
            gc.enable()


def _measured(
    partition: CudaPartition, side: SideStream, submit: Callable[[SideStream], str], what: Hashable, patient: bool
) -> Graph:
    """Asks the driver twice what is free, which launching the graph never does."""
    taken = Taken(partition.device.driver_memory, "graph")
    try:
        with taken.measuring(what, patient), _gc_disabled():
            return Graph(_capture_on(side, submit), taken)
    except BaseException:
        with taken.freeing():
            pass
        raise


def _capture_on(side: SideStream, submit: Callable[[SideStream], str]) -> Any:
    handle_return(driver.cuStreamBeginCapture(side.handle, _THREAD_LOCAL))
    with ExitStack() as after:
        try:
            refused = submit(side)
        finally:
            ended = driver.cuStreamEndCapture(side.handle)
            if ended[1] is not None:
                after.callback(driver.cuGraphDestroy, ended[1])
        if refused:
            raise ExecutionFailed(refused)
        return handle_return(driver.cuGraphInstantiate(handle_return(ended), 0))
