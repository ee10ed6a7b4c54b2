"""A device process: opens one device, and has the partitions, workers and models of the tenants on it.

The supervisor decides what it does and starts it again when it ends. It parses nothing that a client wrote but configurations
of models.
"""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import uvloop

from partitions import Device, DeviceUnavailable
from partitions.mps import PREFIX

from ...config.schema import Config, DeviceConfig
from ...errors import RequestError
from ...host import logs
from ...host.malloc import keep_large_blocks
from ...host.watchdog import Watchdog
from ...link.ring import Descriptors
from ...single_process import SWITCH_INTERVAL
from ..channels import device_messages as messages
from ..channels.config_fields import tenant_of
from ..channels.descriptors import DescriptorReceiver
from ..channels.messages import Message, SetLogLevel
from ..channels.rpc import Channel
from ..children import spawn
from ..children.process_setup import set_up
from .forwarding_frontend import ForwardingFrontend
from .runtime_server import Opener, RuntimeServer


@dataclass(frozen=True, slots=True)
class DeviceArguments:
    """The arguments of a new device process.

    `name` is the device's, or the tenant's if it has the process for itself; `channel` is the socket of the messages to and
    from the supervisor, and `descriptors` that of descriptors from it; `links` are those of its tenants, and `pages` those of
    all that lend. `opener` opens the device, under these variables of the environment.
    """

    name: str
    config: Config
    opener: Opener
    channel: socket.socket
    descriptors: socket.socket
    links: Mapping[str, Descriptors]
    pages: Mapping[str, int]
    environment: Mapping[str, str]


class DeviceProcess:
    """One device process at work. Belongs to its event loop."""

    def __init__(self, arguments: DeviceArguments) -> None:
        self._arguments = arguments
        self._receiver = DescriptorReceiver(arguments.descriptors)
        self._closed = asyncio.Event()
        self._frontends: dict[str, ForwardingFrontend] = {}
        self._server = RuntimeServer(
            arguments.config,
            as_client(arguments.opener) if arguments.environment else arguments.opener,
            self._frontends,
            lambda message: self._channel.notify(message),
            arguments.pages,
        )
        handlers: dict[type[Message], Callable[[Any], Any]] = {
            **self._server.handlers(),
            SetLogLevel: lambda message: logs.set_level(message.level),
            messages.CancelTenantTicket: self._cancel,
            messages.ReplaceLink: self._replace_link,
            messages.AdoptTenant: self._adopt,
            messages.NameModels: self._name_models,
            messages.ForgetKeys: lambda message: self._server.opened.forget_keys(message.tenant, message.keys),
            messages.ReleaseTenant: lambda message: self._release(message.tenant),
            messages.SetDeviceAffinity: self._set_affinity,
            messages.WaitUntilLoaded: self._loaded,
            messages.CloseDevice: self._close,
        }
        self._channel = Channel("the supervisor", handlers)

    def __repr__(self) -> str:
        return f"<DeviceProcess {self._arguments.name}, {self._server!r}>"

    async def run(self) -> None:
        """Serve until the supervisor has closed the device. Ends the process if the supervisor has ended."""
        arguments = self._arguments
        async with Watchdog(arguments.config.server):
            for name, descriptors in arguments.links.items():
                self._frontends[name] = ForwardingFrontend(name, descriptors, self._channel)
            await self._channel.open(arguments.channel)
            await self._channel.closed.wait()
            if not self._closed.is_set():
                os._exit(1)  # The supervisor has ended. Works in flight may take for ever, so nothing is closed in order.

    def _cancel(self, message: messages.CancelTenantTicket) -> None:
        if runtime := self._server.runtime:
            runtime.cancel(message.tenant, message.slot, message.serial)

    async def _replace_link(self, message: messages.ReplaceLink) -> None:
        arena, memory, tickets, completions = self._receiver.take(message.number, 4)
        new = Descriptors(arena, memory, tickets, completions, message.slots, message.nbytes)
        old = self._frontends[message.tenant].use(new)
        await self._server.opened.replace_link(message.tenant, old.close)

    async def _adopt(self, message: messages.AdoptTenant) -> list[messages.PublishModel]:
        arena, memory, tickets, completions = self._receiver.take(message.number, 4)
        link = Descriptors(arena, memory, tickets, completions, message.slots, message.nbytes)
        runtime, frontend = self._server.opened, ForwardingFrontend(message.tenant, link, self._channel)
        frontend.held = {}
        self._frontends[message.tenant] = frontend
        try:
            config = message.config and tenant_of(message.config)
            await runtime.adopt(message.tenant, message.granules, message.beyond, message.models, config or None)
            for change in message.changes:
                with suppress(RequestError):  # The model is not served then, which the supervisor sees.
                    if isinstance(change, messages.LoadModel):
                        await runtime.models.load(change.tenant, change.name, change.override)
                    else:
                        await runtime.models.unload(change.tenant, change.name)
        except BaseException:
            await asyncio.shield(self._release(message.tenant))
            raise
        return list(frontend.held.values())

    async def _release(self, tenant: str) -> None:
        await self._server.opened.release(tenant)
        self._frontends.pop(tenant, None)

    def _name_models(self, message: messages.NameModels) -> None:
        self._server.opened.name_models(message.tenant, message.keys)
        self._frontends[message.tenant].held = None

    def _set_affinity(self, message: messages.SetDeviceAffinity) -> None:
        spawn.set_own_affinity(message.cores)
        self._server.opened.builds.set_affinity(message.builds, if_idle=message.starting)

    async def _loaded(self, _: messages.WaitUntilLoaded) -> None:
        await self._server.opened.loaded()
        gc.collect()
        gc.freeze()  # A full collection of what is there now would stop all tenants for some 35 ms.

    async def _close(self, _: messages.CloseDevice) -> None:
        if self._server.runtime:
            await self._server.runtime.close()
        self._closed.set()


def as_client(opener: Opener) -> Opener:
    """The same for a client of an MPS daemon. It raises DeviceUnavailable where this process has not become one."""

    def opened(config: DeviceConfig) -> Device:
        device = opener(config)
        if not device.shared:
            device.close()
            raise DeviceUnavailable("this process is no client of the MPS daemon that was started for it, so it serves nothing")
        return device

    return opened


def enter(environment: Mapping[str, str]) -> None:
    """Have this process, which has not used CUDA yet, be a client of this MPS daemon only; of none if it is empty."""
    for name in [each for each in os.environ if each.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update(environment)


def main(arguments: DeviceArguments) -> None:
    """The process."""
    if arguments.environment:
        enter(arguments.environment)
    server = arguments.config.server
    set_up(f"dev {arguments.name}", server.log_format, server.log_level, device=True)
    sys.setswitchinterval(SWITCH_INTERVAL)
    keep_large_blocks()
    uvloop.run(DeviceProcess(arguments).run())
    sys.exit(0)
