"""A device process: opens one device, and has the partitions, workers and models of the tenants on it.

The supervisor decides what it does and starts it again when it ends. It parses nothing that a client wrote but configurations
of models.
"""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import uvloop

from partitions import Device, DeviceUnavailable
from partitions.deposit import deposit_of
from partitions.mps import stay_outside
from partitions.plan import Granules

from ...config.schema import Config, DeviceConfig
from ...config.tenant import TenantConfig
from ...errors import RequestError
from ...host import logs
from ...host.malloc import keep_large_blocks, share_one_heap
from ...host.watchdog import Watchdog
from ...link import ring as links
from ...link.ring import Descriptors
from ...single_process import SWITCH_INTERVAL
from ...tenants.frontend import DeviceSide, HttpSide
from ..channels.calls import proxy, serve
from ..channels.descriptors import DescriptorReceiver, SentLink
from ..channels.device_protocols import Change, FromRuntime, ToDeviceProcess
from ..channels.http_protocols import Logging
from ..channels.rpc import Channel
from ..children import spawn
from ..children.process_setup import set_up
from .runtime_server import Opener, RuntimeServer, handlers


@dataclass(frozen=True, slots=True)
class DeviceArguments:
    """The arguments of a new device process.

    `name` is the device's, or the tenant's if it has the process for itself; `channel` is the socket of the messages to and
    from the supervisor, and `descriptors` that of descriptors from it; `links` are those of its tenants. `opener` opens the
    device, under these variables of the environment; `deposit` are the descriptors of the one that it has with the others of
    its GPU, under MPS, and none without.
    """

    name: str
    config: Config
    opener: Opener
    channel: socket.socket
    descriptors: socket.socket
    links: Mapping[str, Descriptors]
    environment: Mapping[str, str]
    deposit: Sequence[int] = ()


class LinkedFrontend:
    """A tenant's link, and its HTTP side, which the supervisor has; see `server.tenants.frontend.Frontend`."""

    def __init__(self, descriptors: Descriptors, http_side: HttpSide) -> None:
        self.http_side = http_side
        self.link = links.attach(descriptors)
        self._descriptors = descriptors

    def use(self, descriptors: Descriptors) -> Descriptors:
        """Change to a new link to the same memory. Returns the old link's descriptors, to be closed once the worker left it."""
        self.link.completions.free_writer()
        old, self._descriptors = self._descriptors, descriptors
        self.link = links.attach(descriptors, self.link.arena.memory)
        return old

    def open(self, device: DeviceSide) -> None:
        """Nothing to do: cancellations come from the supervisor."""

    def close(self) -> None:
        self._descriptors.close()


class DeviceProcess(RuntimeServer):
    """One device process at work. Belongs to its event loop."""

    def __init__(self, arguments: DeviceArguments) -> None:
        self._arguments = arguments
        self._receiver = DescriptorReceiver(arguments.descriptors)
        self._closed = asyncio.Event()
        self._of_tenants: dict[str, LinkedFrontend] = {}
        self._first_pages: dict[str, int] = {}
        """Tenants' activity pages that have come before the device is open."""
        self._channel = Channel(
            "the supervisor", {**handlers(lambda: self), **serve(ToDeviceProcess)(lambda: self), **serve(Logging)(lambda: self)}
        )
        super().__init__(
            arguments.config,
            as_client(arguments.opener, arguments.deposit) if arguments.environment else arguments.opener,
            self._of_tenants,
            proxy(FromRuntime, self._channel),
            self._first_pages,
        )

    async def run(self) -> None:
        """Serve until the supervisor has closed the device. Ends the process if the supervisor has ended."""
        arguments = self._arguments
        async with Watchdog(arguments.config.server):
            for name, descriptors in arguments.links.items():
                self._link(name, descriptors)
            await self._channel.open(arguments.channel)
            await self._channel.closed.wait()
            if not self._closed.is_set():
                os._exit(1)  # The supervisor has ended. Works in flight may take for ever, so nothing is closed in order.

    def _link(self, tenant: str, descriptors: Descriptors) -> None:
        self._of_tenants[tenant] = LinkedFrontend(descriptors, proxy(HttpSide, self._channel, tenant))

    def cancel(self, tenant: str, slot: int, serial: int) -> None:
        if self.runtime:
            self.runtime.cancel(tenant, slot, serial)

    async def set_pages(self, tenants: Sequence[str], pages: int | None) -> None:
        sent = [None] * len(tenants) if pages is None else self._receiver.take(pages, len(tenants))
        for tenant, descriptor in zip(tenants, sent, strict=True):
            self._set_page(tenant, descriptor)

    def _set_page(self, tenant: str, descriptor: int | None) -> None:
        if self.runtime:
            self.runtime.placements.set_page(tenant, descriptor)
            return
        if (before := self._first_pages.pop(tenant, None)) is not None:
            os.close(before)
        if descriptor is not None:
            self._first_pages[tenant] = descriptor

    async def replace_link(self, tenant: str, link: SentLink) -> None:
        old = self._of_tenants[tenant].use(self._receiver.take_link(link))
        await self.opened.replace_link(tenant, old.close)

    async def adopt(
        self,
        tenant: str,
        link: SentLink,
        granules: Granules,
        changes: Sequence[Change],
        beyond: int,
        models: Sequence[str] | None,
        config: TenantConfig,
    ) -> None:
        runtime = self.opened
        self._link(tenant, self._receiver.take_link(link))
        try:
            await runtime.adopt(tenant, granules, beyond, models, config)
            for change in changes:
                with suppress(RequestError):  # The model is not served then, which the supervisor sees.
                    if change.loaded:
                        await runtime.models.load(change.tenant, change.name, change.override)
                    else:
                        await runtime.models.unload(change.tenant, change.name)
        except BaseException:
            await asyncio.shield(self.release(tenant))
            raise

    async def release(self, tenant: str) -> None:
        await self.opened.release(tenant)
        self._of_tenants.pop(tenant, None)

    async def name_models(self, tenant: str, keys: Mapping[str, str]) -> None:
        self.opened.name_models(tenant, keys)

    async def forget_keys(self, tenant: str, keys: Sequence[str]) -> None:
        self.opened.forget_keys(tenant, keys)

    def set_affinity(self, cores: frozenset[int], builds: frozenset[int], starting: frozenset[int]) -> None:
        spawn.set_own_affinity(cores)
        self.opened.builds.set_affinity(builds, if_idle=starting)

    def set_log_level(self, level: str) -> None:
        logs.set_level(level)

    async def loaded(self) -> None:
        await super().loaded()
        gc.collect()
        gc.freeze()  # A full collection of what is there now would stop all tenants for some 35 ms.

    async def close(self) -> None:
        if self.runtime:
            await self.runtime.close()
        self._closed.set()


def as_client(opener: Opener, deposit: Sequence[int] = ()) -> Opener:
    """The same for a client of an MPS daemon, which has this deposit with the others; by its descriptors, none if it shares
    nothing. It raises DeviceUnavailable where this process has not become a client.
    """

    def opened(config: DeviceConfig) -> Device:
        device = opener(config)
        if not device.shared:
            device.close()
            raise DeviceUnavailable("this process is no client of the MPS daemon that was started for it, so it serves nothing")
        if deposit:
            device.share(deposit_of(deposit))
        return device

    return opened


def enter(environment: Mapping[str, str]) -> None:
    """Have this process, which has not used CUDA yet, be a client of this MPS daemon only; of none if it is empty."""
    stay_outside()
    os.environ.update(environment)


def main(arguments: DeviceArguments) -> None:
    """The process."""
    enter(arguments.environment)
    server = arguments.config.server
    set_up(f"dev {arguments.name}", server.log_format, server.log_level, device=True)
    sys.setswitchinterval(SWITCH_INTERVAL)
    keep_large_blocks()
    if arguments.environment:
        share_one_heap()  # As all threads are one tenant's; several tenants would wait for each other's allocations.
    uvloop.run(DeviceProcess(arguments).run())
    sys.exit(0)
