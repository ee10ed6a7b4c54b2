"""The process of a tenant whose works run on the host's cores: its HTTP side and its device side, with no process between them.

A model that crashes ends this process only. The supervisor starts another one, with the tenant on the same granules.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import uvloop

from partitions import Device, PartitionError

from ..config.schema import Config, DeviceConfig
from ..config.tenant import TenantConfig
from ..host.malloc import keep_large_blocks, share_one_heap
from ..link import ring as links
from ..single_process import SWITCH_INTERVAL
from ..tenants.local_frontend import LocalFrontend
from ..tenants.service import Tenant, slots
from .channels.calls import proxy
from .channels.device_protocols import FromRuntime
from .channels.rpc import Channel, Handlers
from .children import spawn
from .children.process_setup import ProcessArguments, set_up
from .device_side.runtime_server import Opener, RuntimeServer, handlers
from .http_side.http_process import HttpProcess


@dataclass(frozen=True, slots=True)
class TenantArguments:
    """The arguments of a new tenant process: those of its HTTP side, its device, and the function that opens that."""

    http: ProcessArguments
    device: str
    opener: Opener


class TenantProcessFrontend(LocalFrontend):
    """The frontend of this process's only tenant. Its event loop runs on the partition's cores, unless the configuration names
    others.
    """

    def __init__(self, config: TenantConfig) -> None:
        self._has_cores = config.front_cores is not None
        descriptors = links.create(slots(config), config.memory)
        # An event loop on other cores than the partition's runs no models.
        link = links.join(descriptors, shares_interpreter=not self._has_cores)
        super().__init__(config, descriptors, link, only=True)

    def set_cores(self, cores: frozenset[int] | None) -> None:
        """Move every thread of the process there: those of libraries, and of the models, too."""
        if cores and not self._has_cores:
            spawn.set_own_affinity(cores)


class HostedDeviceSide:
    """The device side of this process's tenant; see `http_process.HostedSide`."""

    def __init__(self, config: Config, name: str, opener: Opener, pages: Mapping[str, int]) -> None:
        self._config = config
        self._pages = pages
        self._frontend = TenantProcessFrontend(config.tenants[name])
        self._opener = opener

    @property
    def tenant(self) -> Tenant:
        return self._frontend.tenant

    def connect(self, channel: Channel) -> None:
        frontends, supervisor = {self.tenant.name: self._frontend}, proxy(FromRuntime, channel)
        self._server = RuntimeServer(self._config, self._opener, frontends, supervisor, self._pages)

    def handlers(self) -> Handlers:
        return handlers(lambda: self._server)


def main(arguments: TenantArguments) -> None:
    """Run the process. Does not return: it exits with status 0 when the supervisor has it end."""
    http = arguments.http
    server = http.config.server
    set_up(http.name, server.log_format, server.log_level, audit=server.audit)
    sys.setswitchinterval(SWITCH_INTERVAL)
    keep_large_blocks()
    share_one_heap()
    config = http.config.on_device(arguments.device)
    opener = _opened(arguments.opener, config.device)
    uvloop.run(_serve(http, config, opener))
    sys.exit(0)


async def _serve(http: ProcessArguments, config: Config, opener: Opener) -> None:
    await HttpProcess(http, HostedDeviceSide(config, http.name, opener, http.pages)).run()


def _opened(opener: Opener, config: DeviceConfig) -> Opener:
    """Open the device now, while this process may still run on every core of the server's: those are the device's granules.

    Returns a function that returns the device, or raises what was raised now.
    """
    try:
        device: Device | PartitionError = opener(config)
    except PartitionError as error:
        device = error

    def open_again(_: DeviceConfig) -> Device:
        if isinstance(device, PartitionError):
            raise device
        return device

    return open_again
