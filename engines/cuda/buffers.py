"""Memory of the GPU for tensors."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from cuda.core import Buffer, Device, Stream


def zeroed_buffers(device: Any, sizes: Sequence[int], stream: Stream) -> list[Buffer]:
    """Device memory of these sizes, zeroed on the stream. Raises CUDAError, and then leaves no memory allocated."""
    with ExitStack() as made:
        current: Device = device.make_current()
        buffers = []
        for size in sizes:
            buffers.append(current.allocate(size, stream=stream))
            made.callback(buffers[-1].close)
            buffers[-1].fill(0, stream=stream)
        made.pop_all()
        return buffers
