"""The stream that a caller's own work is on: chosen for one flow of execution, a thread or an asyncio task, and no other.

What `on_stream` promises of an inference that is enqueued inside it, whoever's the stream is:

1. It begins after everything that was on the stream, and what comes on the stream later begins after it: inputs that the
   stream still writes and outputs that it will read need no wait in between. `Work.wait` is needed only to read them here.
   Memory that the GPU cannot reach is the exception: such inputs are read when they are enqueued.
2. It runs on the partition's SMs. A stream of the partition's green context carries all of it: copies, engine, the event at
   its end. Any other stream of the device, whose work has other SMs, is ordered with the partition's by events on the device.
3. Inferences of one executor follow each other in the order they were enqueued, whichever streams were chosen.
4. What cannot be so is refused before anything is enqueued: a stream of another device, one that is being captured and not
   the engine's, or a default stream while another context than the device's primary one is current.

To have all of an inference on a stream with other SMs than a partition's, of a green context that the caller made for
instance, bind the engine to that stream: `partitions.cuda.device.CudaDevice.adopt`.

An engine that is bound to such a stream becomes part of a graph that the caller captures from it: `enqueue` within the
capture runs nothing, and puts copies and engine into that graph, call by call. For the graph:

- Its shapes are ready: they were run before, and were captured as a graph of ours. Inputs and the room for outputs lie where
  the GPU reaches them, and are those of every launch. What cannot be so is refused, and nothing was put into the capture.
- `Work.wait` gives the outputs' places at once. They are written when the graph was launched and has ended.
- It uses the executor's memory on the device. So it is launched on that stream, or in order with it, and destroyed before
  the executor is closed or moves.

A stream that the engine is not bound to and that is captured is refused: the copies of an inference find its tensors by a
count that the device and the host keep apart, and a replay that the host does not know of would move the one alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from partitions.streams import stream_handle

_SELECTED: ContextVar[int | None] = ContextVar("greenlane_stream", default=None)


@contextmanager
def on_stream(stream: object) -> Iterator[None]:
    """Order inferences that are enqueued in this block with a stream of the caller's; guards nest.

    `stream` is its handle (CUstream) or an object with `__cuda_stream__`, as cuda.core's and CuPy's are; for PyTorch's give
    `stream.cuda_stream`. 0 is the NULL stream, which is a choice too; None is none: the partition's stream alone.
    It has to live until what was enqueued has ended. The thread has to be attached to the partition as ever, but another
    context may be current in it. Only GPUs have streams; on a CPU this does nothing. Raises TypeError.
    """
    token = _SELECTED.set(None if stream is None else stream_handle(stream))
    try:
        yield
    finally:
        _SELECTED.reset(token)


def selected() -> int | None:
    """The handle of the stream that the calling flow has chosen; None for none."""
    return _SELECTED.get()
