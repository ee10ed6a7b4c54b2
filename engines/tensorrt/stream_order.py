"""Puts an executor's inferences in order with a stream of the caller's; the promises are those of `engines.streams`.

It costs four calls of the driver to ask about the stream, and four to order it: two events in all, and no wait of the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver
from cuda.core import Device, Event, Stream

from partitions.cuda.device import DEFAULT_STREAMS, NOT_CAPTURED, CudaPartition
from partitions.cuda.driver import handle_return

from ..errors import ExecutionFailed

_SUCCESS = driver.CUresult.CUDA_SUCCESS


class Ordering:
    """One executor's; for the thread that enqueues. `home` is the partition's stream, `primary` its device's context."""

    def __init__(self, device: int, home: Stream, primary: int, event: Event) -> None:
        self._device = device
        self._home = home
        self._primary = primary
        self._event = event

    def __repr__(self) -> str:
        return f"<Ordering with stream {int(self._home.handle):#x} of device {self._device}>"

    @property
    def is_primary_current(self) -> bool:
        """Whether the device's primary context is the calling thread's. Raises CUDAError.

        Python's part of it takes 0.2 us (cuda-bindings 13 over a driver that answers at once, 2026-11-22).
        """
        result, context = driver.cuCtxGetCurrent()
        return int(context) == self._primary if result == _SUCCESS else bool(handle_return((result, context)))

    def is_capturing(self, handle: int) -> bool:
        """Whether somebody captures this stream, which is of the device's. Raises CUDAError."""
        return bool(handle_return(driver.cuStreamIsCapturing(handle)) != NOT_CAPTURED)

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """The primary context, whatever is current in this thread; in the end that again. Raises CUDAError."""
        handle_return(driver.cuCtxPushCurrent(self._primary))
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()

    @contextmanager
    def around(self, handle: int) -> Iterator[Stream]:
        """Within it, enqueue one inference on the stream that this gives; where that fails, leave nothing in flight.

        Raises ExecutionFailed before that for a stream that cannot be used, CUDAError.
        """
        home = int(self._home.handle)
        with self._current(handle):
            self._check(handle)
            if handle == home:
                yield self._home
            elif self._is_at_home(handle):
                self._follow(handle, home)
                yield Stream.from_handle(handle)
                self._follow(home, handle)
            else:
                self._follow(home, handle)
                yield self._home
                self._follow(handle, home)

    def close(self) -> None:
        """Free the event."""
        self._event.close()

    @contextmanager
    def _current(self, handle: int) -> Iterator[None]:
        """The primary context, where another one is current in this thread; in the end that one again."""
        if self.is_primary_current:
            yield
            return
        if handle in DEFAULT_STREAMS:
            raise ExecutionFailed(
                f"{DEFAULT_STREAMS[handle]} was selected, but the context that is current is not the primary one of device "
                f"{self._device}: it may be a green context, which has none; select a stream of a green context by its handle"
            )
        with self.at_home():
            yield

    def _check(self, handle: int) -> None:
        device = int(handle_return(driver.cuStreamGetDevice(handle)))
        if device != self._device:
            raise ExecutionFailed(
                f"stream {handle:#x} is of device {device}, but the engine is bound to device {self._device}; "
                f"select a stream of device {self._device}"
            )
        if self.is_capturing(handle):
            raise ExecutionFailed(
                f"stream {handle:#x} is being captured, and the engine is bound to another one; end the capture first, or bind "
                "the engine to that stream (CudaDevice.adopt), to have its inferences in the graph"
            )

    def _is_at_home(self, handle: int) -> bool:
        """Whether its work runs on the partition's SMs, as that of every stream of the same green context."""
        return _green(handle) == _green(int(self._home.handle))

    def _follow(self, later: int, earlier: int) -> None:
        """What is submitted to the one from now on begins after all that is on the other by now."""
        handle_return(driver.cuEventRecord(self._event.handle, earlier))
        handle_return(driver.cuStreamWaitEvent(later, self._event.handle, 0))


def open_ordering(device: Device, partition: CudaPartition) -> Ordering:
    """On a thread that is attached to the partition. Raises CUDAError."""
    primary = int(handle_return(driver.cuCtxGetCurrent()))
    return Ordering(partition.device.index, partition.stream, primary, device.create_event())


def _green(handle: int) -> int:
    return _number(handle_return(driver.cuStreamGetGreenCtx(handle)))


def _number(handle: Any) -> int:
    """A handle as an integer, NULL as 0."""
    return int(handle) if handle is not None else 0
