"""Orders an executor's inferences with a stream that the caller selected; `engines.streams` says what is promised.

It costs four driver calls to inspect the stream and four to order it. The host never waits.
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


class StreamOrder:
    """For the thread that enqueues. `primary` is the device's primary context."""

    def __init__(self, device: int, partition_stream: Stream, primary: int, event: Event) -> None:
        self._device = device
        self._partition_stream = partition_stream
        self._primary = primary
        self._event = event

    @property
    def is_primary_current(self) -> bool:
        """Whether the primary context is current in the calling thread. Raises CUDAError.

        The Python side of the call takes 0.2 us (cuda-bindings 13 over a driver that answers at once, 2026-11-22).
        """
        result, context = driver.cuCtxGetCurrent()
        return int(context) == self._primary if result == _SUCCESS else bool(handle_return((result, context)))

    def is_capturing(self, handle: int) -> bool:
        """Whether this stream, which belongs to the device, is being captured. Raises CUDAError."""
        return bool(handle_return(driver.cuStreamIsCapturing(handle)) != NOT_CAPTURED)

    @contextmanager
    def primary_context(self) -> Iterator[None]:
        """Make the primary context current in the block, and then the previous one again. Raises CUDAError."""
        handle_return(driver.cuCtxPushCurrent(self._primary))
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()

    @contextmanager
    def ordered_with(self, handle: int) -> Iterator[Stream]:
        """Gives the stream to enqueue one inference on, so that it runs in order with the selected stream `handle`.

        That is the selected stream itself if it is of the partition's green context, and else the partition's stream, ordered
        by events. A block that raises must leave nothing in flight. Raises CUDAError, and ExecutionFailed, before the block
        begins, for a stream that cannot be used.
        """
        partition_handle = int(self._partition_stream.handle)
        with self._primary_context_if_needed(handle):
            self._check(handle)
            if handle == partition_handle:
                yield self._partition_stream
            elif self._shares_green_context(handle):
                self.order(partition_handle, handle)
                yield Stream.from_handle(handle)
                self.order(handle, partition_handle)
            else:
                self.order(handle, partition_handle)
                yield self._partition_stream
                self.order(partition_handle, handle)

    def close(self) -> None:
        """Free the event."""
        self._event.close()

    @contextmanager
    def _primary_context_if_needed(self, handle: int) -> Iterator[None]:
        if self.is_primary_current:
            yield
            return
        if handle in DEFAULT_STREAMS:
            raise ExecutionFailed(
                f"{DEFAULT_STREAMS[handle]} was selected, but the context that is current is not the primary one of device "
                f"{self._device}: it may be a green context, which has none; select a stream of a green context by its handle"
            )
        with self.primary_context():
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

    def _shares_green_context(self, handle: int) -> bool:
        """Whether the stream's work runs on the partition's SMs, which are those of its green context."""
        return _green_context(handle) == _green_context(int(self._partition_stream.handle))

    def order(self, earlier: int, later: int) -> None:
        """Make work that is submitted to `later` from now on wait for the work that is on `earlier` now."""
        handle_return(driver.cuEventRecord(self._event.handle, earlier))
        handle_return(driver.cuStreamWaitEvent(later, self._event.handle, 0))


def open_stream_order(device: Device, partition: CudaPartition) -> StreamOrder:
    """Call it on a thread that is attached to the partition. Raises CUDAError."""
    primary = int(handle_return(driver.cuCtxGetCurrent()))
    return StreamOrder(partition.device.index, partition.stream, primary, device.create_event())


def _green_context(handle: int) -> int:
    """The green context of a stream as an integer; 0 if it has none."""
    context: Any = handle_return(driver.cuStreamGetGreenCtx(handle))
    return int(context) if context is not None else 0
