"""What an executor owns on its partition: streams, events, and the order of its stream and the caller's."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from cuda.core import Buffer, Device, Event, Stream

from partitions.cuda.device import CudaPartition, SideStream

from .copies import RING_LENGTH
from .stream_order import StreamOrder, open_stream_order


class ExecutorResources(NamedTuple):
    """The objects that an executor owns on its partition, with one event for each slot of its ring."""

    aux_streams: Sequence[SideStream]
    events: Sequence[Event]
    order: StreamOrder


def open_resources(partition: CudaPartition, aux_streams: int, made: ExitStack) -> ExecutorResources:
    """Create an executor's streams, events and ordering; `made` closes them. Call it on an attached thread.

    Raises PartitionError, CUDAError.
    """
    device: Any = partition.device.make_current()
    streams = []
    for _ in range(aux_streams):
        streams.append(partition.make_stream())
        made.callback(streams[-1].close)
    events = []
    for _ in range(RING_LENGTH):
        events.append(device.create_event())
        made.callback(events[-1].close)
    order = open_stream_order(device, partition)
    made.callback(order.close)
    return ExecutorResources(streams, events, order)


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
