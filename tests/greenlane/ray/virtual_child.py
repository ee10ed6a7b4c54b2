"""`greenlane.ray.child` with four granules on the cores that it is given, so that two tenants have something to exchange."""

import os

from greenlane.ray import child
from partitions import Device
from server import __main__ as command
from server.config.schema import DeviceConfig
from tests.end_to_end.devices_server import SmallDevice


def opener(_: DeviceConfig) -> Device:
    """Open the only device."""
    return SmallDevice(sorted(os.sched_getaffinity(0)))


def main() -> None:
    """As `child.main`."""
    from tests.greenlane.ray import virtual_child

    command.on_host_cores = lambda _: False
    command.open_configured = virtual_child.opener  # By a name that the device process can import.
    child.main()


if __name__ == "__main__":
    main()
