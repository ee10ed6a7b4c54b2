"""One inference captured as a graph, on a stream of the partition that nothing else uses.

While a stream is captured, all that any thread submits to it goes into the capture, and waiting for it spoils the capture.
The partition's own stream is other threads' too: a model is bound beside the worker, an executor is closed from elsewhere.
So it is never captured. Nor may Python's garbage collector run meanwhile: an engine that nobody closed would be freed in
the capturing thread, which spoils the capture too (seen on an H100: cudaError 900 in ~ICudaEngine).
A graph stays on the SMs of the green context it was captured in, whatever stream it is launched on, and both streams are
of the same context.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from threading import RLock
from typing import Any

from cuda.bindings import driver
from cuda.core import Stream

from partitions.cuda.device import CudaPartition, SideStream
from partitions.cuda.driver import handle_return

from ..errors import ExecutionFailed
from .api import EXECUTING

_PATIENCE = 0.001
"""Seconds to wait for an executor's lock before others are let by."""

_HERE = threading.local()
_THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Graph:
    """A graph that can be launched. Nothing checks that what it works on is still there."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __repr__(self) -> str:
        return f"<Graph{'' if self._handle else ', closed'}>"

    def launch(self, stream: Stream) -> None:
        """On a stream of the green context it was captured in. Raises CUDAError."""
        handle_return(driver.cuGraphLaunch(self._handle, stream.handle))

    def close(self) -> None:
        """Destroy it, once; it must not be in flight. Raises CUDAError."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle_return(driver.cuGraphExecDestroy(handle))


def capture(partition: CudaPartition, submit: Callable[[SideStream], str]) -> Graph:
    """The graph of what `submit` puts on the stream it is given; it returns "", or why it could not.

    Blocks, also while another thread captures or compiles. The calling thread must have nothing else to capture.
    Raises ExecutionFailed, PartitionError, CUDAError.
    """
    with EXECUTING, ExitStack() as made:
        with closing(partition.make_stream()) as side, _uncollected():
            graph = _captured(side, submit)
            made.callback(graph.close)
        made.pop_all()
        return graph


@contextmanager
def joining() -> Iterator[None]:
    """Around what is put into a capture that somebody else began on this thread; waits as `capture` does."""
    with EXECUTING, _uncollected():
        yield


@contextmanager
def exclusively(turn: RLock) -> Iterator[None]:
    """Hold an executor's lock and that of captures and compilations; without keeping the first while waiting for the second."""
    while True:
        EXECUTING.acquire()
        if turn.acquire(timeout=_PATIENCE):
            break
        EXECUTING.release()
        time.sleep(_PATIENCE)  # Its holder may be waiting for what was just released.
    try:
        yield
    finally:
        turn.release()
        EXECUTING.release()


def is_capturing() -> bool:
    """Whether the calling thread is capturing a graph, so that it must free nothing."""
    return getattr(_HERE, "capturing", False)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector; where threads overlap, the first that ends brings it back."""
    enabled = gc.isenabled()
    gc.disable()
    _HERE.capturing = True
    try:
        yield
    finally:
        _HERE.capturing = False
        if enabled:
            gc.enable()


def _captured(side: SideStream, submit: Callable[[SideStream], str]) -> Graph:
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
        return Graph(handle_return(driver.cuGraphInstantiate(handle_return(ended), 0)))
