"""What watches a controller, which does not know what for."""

from collections.abc import Mapping
from typing import Protocol

from partitions.plan import Granules

from .controlled_device import ControlledDevice
from .device_runtime import DeviceRuntime


class Observer(Protocol):
    """Every method is called on the event loop of the controller."""

    def start(self) -> None:
        """All devices are partitioned."""

    def divided(self, device: ControlledDevice, granules: Mapping[str, Granules]) -> None:
        """A device is divided as it says from now on, and as it will say: these tenants are about to get these granules."""

    async def leaving(self, device: ControlledDevice, runtime: DeviceRuntime) -> None:
        """This device side is about to lose a tenant, which waits for this."""

    async def drained(self) -> None:
        """Every request was answered, and the server ends."""

    async def close(self) -> None:
        """The device sides end next. May be called again."""
