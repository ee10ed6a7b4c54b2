"""Partitions that are none: streams that all run on all of the device, as without Greenlane. For comparison only."""

from contextlib import ExitStack
from typing import Any

from partitions import Device, Partition


def open_plain(device: Device) -> Partition:
    """One more stream on everything; as often as wanted. It closes like a partition."""
    if device.kind != "cuda":
        return device.carve(range(len(device.granules)))
    return _plain_stream(device)


def _plain_stream(device: Any) -> Partition:
    """Only a GPU's needs CUDA, so that it is imported here."""
    from cuda.bindings import driver
    from cuda.core import StreamOptions
    from cuda.core._utils.cuda_utils import handle_return

    from partitions.cuda.device import CudaPartition, SideStream
    from partitions.cuda.green_contexts import NONBLOCKING, Green

    class PlainStream(CudaPartition):
        """A stream of the primary context in a partition's place; there is no green context to be kept for others."""

        def make_stream(self) -> SideStream:
            self.device.make_current()
            return SideStream(int(handle_return(driver.cuStreamCreate(NONBLOCKING))))

        def close(self) -> None:
            if not self._closed:
                self._closed = True
                with ExitStack() as left:
                    left.callback(self._green.release)
                    self.device.make_current()
                    self.stream.sync()

    stream = device.make_current().create_stream(options=StreamOptions(nonblocking=True))
    total = sum(device.granules)
    return PlainStream(device, range(len(device.granules)), Green(total, stream, stream.close))
