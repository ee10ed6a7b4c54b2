"""`python -m server`, except that each device has a process, as a GPU has, and four granules on the cores it is given.

It says what it moves, as a GPU does. What HANG_OFF, HANG_ON or HANG_AUTO names is a FIFO: devices with that `mps` are opened
once its other end is closed. With UUID set they have that one, as GPUs do.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from partitions import Device
from partitions.base import Bandwidth
from server import __main__ as command
from server.config.schema import DeviceConfig
from server.host.leaving import leave

from .virtual import VirtualDevice, VirtualPartition

log = logging.getLogger("greenlane.partitions")
GRANULES = 4


class SmallDevice(VirtualDevice):
    """Four granules that share these cores."""

    def __init__(self, cores: Sequence[int]) -> None:
        super().__init__(GRANULES)
        self._cores = cores
        self.uuid = os.environ.get("UUID", "")

    def bandwidth(self) -> Bandwidth:
        """As if all of its granules together drew all it has."""
        return Bandwidth(memory=4 * 10**12, unit=10**12, pcie=60 * 10**9)

    def _make(self, granules: Sequence[int]) -> VirtualPartition:
        return VirtualPartition(sorted(granules), self._cores, self._attached)


def opener(config: DeviceConfig) -> Device:
    """Open a device."""
    if gate := os.environ.get(f"HANG_{config.mps.upper()}"):
        Path(gate).read_bytes()
    assert config.cores
    if limit := os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"):
        log.info("a client that may have %s", limit)
    return SmallDevice(config.cores)


def serve() -> int:
    """Serve as the command line says."""
    from tests.end_to_end import devices_server

    command.on_host_cores = lambda _: False
    command.open_configured = devices_server.opener  # By a name that the device processes can import.
    return command.main()


if __name__ == "__main__":
    leave(serve())
