"""Which GPUs' tenants have a device process each, under MPS: chosen once, before any process of a device is started."""

import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from partitions import PartitionError
from partitions.mps import MOST_CLIENTS

from ...config.schema import Config, DeviceConfig
from ...config.tables import ConfigError
from ...control.together import all_or_none
from .mps_group import MpsGroup, hindrance

log = logging.getLogger("greenlane.processes")
FEWEST = 2
"""Tenants of a GPU that feel each other; one alone gains nothing, and a connection of its own loses by it."""
Identify = Callable[[str, DeviceConfig, Mapping[str, str]], Awaitable[str]]
"""Looks at the GPU with this name in a process with these variables, which make it a client of MPS, and returns its UUID.
Raises PartitionError.
"""


async def open_groups(config: Config, hosted: Collection[str], identify: Identify) -> dict[str, MpsGroup]:
    """The processes under MPS, by device. `hosted` are the devices that are cores of this host.

    Of a device with `mps = "auto"` the daemon runs when this returns, and has had a client; if it cannot be so, the device is
    left out, and the log says why. Raises ConfigError where cores have `mps = "on"`. If it is cancelled no daemon is left.
    """
    named = config.named_devices
    if wrong := [name for name, each in named.items() if each.mps == "on" and name in hosted]:
        raise ConfigError(
            [f'{config.source}: device {name} is cores of this host: mps = "on" is for GPUs; leave it out' for name in wrong]
        )
    under = {name: each for name, each in named.items() if each.mps != "off" and name not in hosted}
    groups = {name: MpsGroup(name, partial(identify, name, each, {})) for name, each in under.items()}
    apart = dict(groups)

    async def choose(name: str) -> None:
        tenants, only = len(config.tenants_on(name)), named[name].model_copy(update={"index": 0})  # The GPU that a client sees.
        if why := await why_shared(config, name) or await _try(groups[name], partial(identify, name, only)):
            del apart[name]
            level = logging.WARNING if tenants >= FEWEST else logging.INFO
            log.log(
                level,
                'device %s: one device process for all tenants (mps = "auto"): %s',
                name,
                why.removeprefix(f"device {name}: "),
            )
        else:
            log.info('device %s: a device process for each of its %d tenants, under MPS (mps = "auto")', name, tenants)

    try:
        await all_or_none(choose(name) for name in groups if named[name].mps == "auto")
    except BaseException:
        for each in groups.values():
            await each.close()
        raise
    return apart


async def why_shared(config: Config, device: str, uuid: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """Why `mps = "auto"` has the tenants of a GPU share a process; "" if that cannot be seen without starting a daemon."""
    tenants = len(config.tenants_on(device))
    if tenants < FEWEST:
        return "it has fewer than two tenants"
    if tenants > MOST_CLIENTS:
        return f"it has {tenants} tenants, and a daemon takes the processes of {MOST_CLIENTS}"
    return await hindrance(uuid, environ)


async def _try(group: MpsGroup, look: Callable[[Mapping[str, str]], Awaitable[str]]) -> str:
    """Start the daemon, and have a client of it look at the GPU. Returns "", or why that cannot be, with no daemon left."""
    try:
        await look(await group.environment())
    except PartitionError as error:
        await group.close()
        return str(error)
    return ""
