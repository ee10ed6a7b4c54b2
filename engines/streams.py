"""Lets a caller select the stream to order inferences with, for one flow of execution (a thread or an asyncio task).

An inference that is enqueued within `on_stream` has these guarantees, for any stream:

1. It begins after everything that was on the stream, and later work on the stream begins after it. So inputs that the stream
   still writes and outputs that it will read need no wait in between; `Work.wait` is needed only to read outputs on the host.
   Inputs in memory that the GPU cannot reach are the exception: they are read when they are enqueued.
2. It runs on the partition's SMs. If the stream belongs to the partition's green context, it carries everything: copies,
   engine, and the event at the end. Any other stream of the device runs on other SMs, and is ordered with the partition's
   stream by events on the device.
3. Inferences of one executor run in the order they were enqueued, whichever streams were selected.
4. A stream that cannot be used is refused before anything is enqueued: a stream of another device, one that is being captured
   and is not the engine's, or a default stream while a context other than the device's primary one is current.

To have all of an inference on a stream with other SMs than a partition's, such as one of a green context that the caller made,
bind the engine to that stream: `partitions.cuda.device.CudaDevice.adopt`.

An engine that is bound to such a stream can be part of a graph that the caller captures from it: `enqueue` within the capture
runs nothing, and adds copies and engine to that graph, call by call. For the graph:

- Its shapes must be ready: they were run before and captured as a graph. Inputs and the room for outputs must be where the GPU
  reaches them, and are used by every launch. Otherwise `enqueue` raises, and nothing was added to the capture.
- `Work.wait` returns the outputs at once. Their contents are valid when a launch of the graph has ended.
- It uses the executor's memory on the device. So launch it on that stream, or in order with it, and destroy it before the
  executor is closed or moved.

A stream that is being captured and that the engine is not bound to is refused: the copies of an inference find its tensors by
a count that the device and the host each keep, and a replay of the caller's graph would advance the device's only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from partitions.base import stream_handle

_SELECTED: ContextVar[int | None] = ContextVar("greenlane_stream", default=None)


@contextmanager
def on_stream(stream: object) -> Iterator[None]:
    """Order inferences that are enqueued in this block with a stream of the caller's. Blocks nest.

    `stream` is its handle (CUstream), or an object with `__cuda_stream__`, as cuda.core's and CuPy's are; for PyTorch's use
    `stream.cuda_stream`. 0 is the NULL stream; None selects none, so only the partition's stream is used. The stream has to
    exist until what was enqueued has ended. The thread has to be attached to the partition, but another context may be current
    in it. Only GPUs have streams; on a CPU this does nothing. Raises TypeError.
    """
    token = _SELECTED.set(None if stream is None else stream_handle(stream))
    try:
        yield
    finally:
        _SELECTED.reset(token)


def selected() -> int | None:
    """The handle of the stream that the calling flow has selected; None for none."""
    return _SELECTED.get()
