"""Answers the supervisor's messages with a runtime of this process; the other end is `remote_runtime`."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from partitions import Device

from ...config.schema import Config, DeviceConfig
from ...control.descriptions import DeviceInfo, Loading
from ...device.runtime import Runtime
from ...device.tenant_models import CRASHED, AtStart
from ...host.exit_codes import NEEDS_RESTART
from ...tenants.catalog import UNLOADED
from ...tenants.frontend import Frontend, State
from ..channels import device_messages as messages
from ..channels.config_fields import options_of
from ..channels.messages import Message

log = logging.getLogger("greenlane.runtime")

_EXIT_DELAY = 0.2
"""Seconds between the failure of works in flight and the end of the process, in which their requests are answered."""
Opener = Callable[[DeviceConfig], Device]
"""Opens a device as it is configured. Blocks. Raises DeviceUnavailable."""


class RuntimeServer:
    """The device side of the tenants that have a frontend here. Belongs to the event loop.

    `pages` are those of tenants that lend, as for `Runtime`. `notify` sends the supervisor a message. The process ends when the
    device is lost: only another one can use it again.
    """

    def __init__(
        self,
        config: Config,
        opener: Opener,
        frontends: Mapping[str, Frontend],
        notify: Callable[[Message], None],
        pages: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.runtime: Runtime | None = None
        self._config = config
        self._opener = opener
        self._frontends = frontends
        self._notify = notify
        self._pages = pages

    def __repr__(self) -> str:
        return f"<RuntimeServer {self.runtime!r}>"

    def handlers(self) -> dict[type[Message], Callable[[Any], Any]]:
        """The handlers of the messages that a runtime answers."""
        return {
            messages.OpenDevice: self._open,
            messages.StartTenants: self._start,
            messages.WaitUntilLoaded: lambda _: self.opened.loaded(),
            messages.PrepareMove: lambda message: self.opened.moves.prepare(message.granules),
            messages.SettleMove: lambda _: self.opened.moves.settle(),
            messages.HaltMove: lambda _: self.opened.moves.halt(),
            messages.CommitMove: lambda _: self.opened.moves.commit(),
            messages.SwitchMove: lambda _: self.opened.moves.switch(),
            messages.DiscardMove: lambda _: self.opened.moves.discard(),
            messages.NarrowTenants: lambda message: self.opened.widths.narrow(message.tenants),
            messages.StretchTenants: lambda message: self.opened.widths.stretch(message.plans),
            messages.HoldRungs: lambda message: self.opened.widths.hold(message.rungs),
            messages.GetStretches: lambda _: self.opened.widths.stretches(),
            messages.LoadModel: lambda message: self.opened.models.load(message.tenant, message.name, message.override),
            messages.UnloadModel: lambda message: self.opened.models.unload(message.tenant, message.name),
            messages.RefreshModel: lambda message: self.opened.models.refresh(message.tenant, message.name),
            messages.PrepareModels: lambda message: self.opened.models.prepare(message.lists, options_of(message.options)),
            messages.UseModels: lambda message: self.opened.models.use(message.lists, options_of(message.options)),
            messages.DiscardModels: lambda _: self.opened.models.discard(),
            messages.GetExecutions: lambda _: self.opened.models.executions(),
            messages.GetMemory: lambda _: self.opened.models.memory(),
            messages.GetUsage: lambda _: self.opened.usage(),
            messages.ProbePartitions: lambda message: self.opened.probe(message.seconds),
            messages.StopLoading: self._stop_loading,
            messages.Abandon: self._abandon,
            messages.CloseDevice: lambda _: self.opened.close(),
        }

    @property
    def opened(self) -> Runtime:
        """The runtime. The supervisor opens the device first."""
        assert self.runtime, "OpenDevice comes first"
        return self.runtime

    async def _open(self, _: messages.OpenDevice) -> DeviceInfo:
        device = await asyncio.to_thread(self._opener, self._config.device)
        self.runtime = Runtime(
            self._config,
            device,
            self._frontends,
            self._set_state,
            self._lose,
            on_loading=self._on_loading,
            on_stuck=self._end,
            pages=self._pages,
        )
        return await self.runtime.open()

    async def _start(self, message: messages.StartTenants) -> dict[str, frozenset[int] | None]:
        at_start = AtStart(
            {(each.tenant, each.name): each.override for each in message.changes if isinstance(each, messages.LoadModel)},
            {(each.tenant, each.name): UNLOADED for each in message.changes if isinstance(each, messages.UnloadModel)}
            | {(tenant, name): CRASHED for tenant, names in message.left_out.items() for name in names},
            message.ranks,
        )
        return await self.opened.start(message.granules, message.models, at_start)

    def _stop_loading(self, _: messages.StopLoading) -> None:
        if self.runtime:
            self.runtime.stop_loading()

    def _abandon(self, message: messages.Abandon) -> None:
        if self.runtime:
            self.runtime.abandon(message.reason)

    def _on_loading(self, loading: Loading) -> None:
        self._notify(messages.LoadingModel(loading))

    def _set_state(self, state: State) -> None:
        self._notify(messages.DeviceState(state))

    def _end(self, reason: str) -> None:
        asyncio.get_running_loop().call_later(_EXIT_DELAY, self._notify, messages.EndProcess(reason))

    def _lose(self, reason: str) -> None:
        self._notify(messages.ReportDeviceLost(reason))
        log.critical("the device is lost, this process exits: %s", reason)
        asyncio.get_running_loop().call_later(_EXIT_DELAY, os._exit, NEEDS_RESTART)
