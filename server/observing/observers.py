"""All that watches one server: the account, the health of devices, the autopilot, and what the status page shows."""

from collections.abc import Mapping

from partitions.plan import Granules

from ..control.controlled_device import ControlledDevice
from ..control.controller import Controller
from ..control.device_runtime import DeviceRuntime
from ..control.together import together
from .accountant import Accountant
from .health import HealthMonitor
from .overview import Overview
from .pilot import Pilot
from .usage_files import UsageFiles


class Observers:
    """A client of a controller from now on, as its `Observer`."""

    def __init__(self, controller: Controller) -> None:
        server = controller.config.server
        files = UsageFiles(server.usage_dir) if server.usage_dir else None
        plans = controller.placements
        self.accountant = Accountant(controller.devices, files, narrowed=plans.narrowed, count=plans.moved)
        self.health = HealthMonitor(controller.devices, moved=self.accountant.moved)
        self.pilot = Pilot(controller, server.autopilot)
        self.overview = Overview(controller, self.accountant)
        controller.observers.append(self)

    def start(self) -> None:
        for each in (self.pilot, self.accountant, self.health, self.overview):
            each.start()

    def divided(self, device: ControlledDevice, granules: Mapping[str, Granules]) -> None:
        self.accountant.follow(device, granules)

    async def leaving(self, device: ControlledDevice, runtime: DeviceRuntime) -> None:
        await self.accountant.settle(device, runtime)

    async def drained(self) -> None:
        await self.accountant.write()

    async def close(self) -> None:
        self.pilot.close()
        self.overview.close()
        await together((self.accountant.close(), self.health.close()))
