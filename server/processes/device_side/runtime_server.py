"""Answers the supervisor's calls with a runtime of this process; the other end is `remote_runtime`."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from partitions import Device
from partitions.plan import Granules
from partitions.probe import Placement
from partitions.strain import Strain, Strained

from ...accounts.usage import Report
from ...config.schema import Config, DeviceConfig
from ...control.descriptions import AtStart, DeviceInfo
from ...control.device_runtime import Models, Moves, Placements
from ...device.runtime import Runtime
from ...host.leaving import NEEDS_RESTART
from ...tenants.frontend import Frontend
from ..channels.calls import serve
from ..channels.device_protocols import FromRuntime, ToRuntime
from ..channels.rpc import Handlers

log = logging.getLogger("greenlane.runtime")

_EXIT_DELAY = 0.2
"""Seconds between the failure of works in flight and the end of the process, in which their requests are answered."""
Opener = Callable[[DeviceConfig], Device]
"""Opens a device as it is configured. Blocks. Raises DeviceUnavailable."""


class RuntimeServer:
    """The device side of the tenants that have a frontend here. Belongs to the event loop.

    `pages` are as for `Runtime`. The process ends when the device is lost: only another one can use
    it again.
    """

    def __init__(
        self,
        config: Config,
        opener: Opener,
        frontends: Mapping[str, Frontend],
        supervisor: FromRuntime,
        pages: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.runtime: Runtime | None = None
        self._config = config
        self._opener = opener
        self._frontends = frontends
        self._supervisor = supervisor
        self._pages = pages

    @property
    def opened(self) -> Runtime:
        """The runtime. The supervisor opens the device first."""
        assert self.runtime, "OpenDevice comes first"
        return self.runtime

    async def open(self) -> DeviceInfo:
        device = await asyncio.to_thread(self._opener, self._config.device)
        self.runtime = Runtime(
            self._config,
            device,
            self._frontends,
            self._supervisor.on_state,
            self._lose,
            on_loading=self._supervisor.on_loading,
            on_stuck=self._end,
            pages=self._pages,
        )
        return await self.runtime.open()

    async def start(
        self, granules: Mapping[str, Granules], models: Mapping[str, Sequence[str]], at_start: AtStart
    ) -> dict[str, frozenset[int] | None]:
        return await self.opened.start(granules, models, at_start)

    async def loaded(self) -> None:
        await self.opened.loaded()

    async def usage(self) -> Report:
        return await self.opened.usage()

    async def probe(self, seconds: float) -> dict[str, Placement]:
        return await self.opened.probe(seconds)

    async def strain(self, tenant: str, kind: Strain, seconds: float) -> Strained:
        return await self.opened.strain(tenant, kind, seconds)

    def stop_loading(self) -> None:
        if self.runtime:
            self.runtime.stop_loading()

    def abandon(self, reason: str) -> None:
        if self.runtime:
            self.runtime.abandon(reason)

    async def close(self) -> None:
        await self.opened.close()

    def _end(self, reason: str) -> None:
        asyncio.get_running_loop().call_later(_EXIT_DELAY, self._supervisor.on_stuck, reason)

    def _lose(self, reason: str) -> None:
        self._supervisor.on_lost(reason)
        log.critical("the device is lost, this process exits: %s", reason)
        asyncio.get_running_loop().call_later(_EXIT_DELAY, os._exit, NEEDS_RESTART)


def handlers(server: Callable[[], RuntimeServer]) -> Handlers:
    """Those of a channel to the supervisor; `server` returns the device side of this process."""
    return {
        **serve(ToRuntime)(server),
        **serve(Moves)(lambda: server().opened.moves),
        **serve(Placements)(lambda: server().opened.placements),
        **serve(Models)(lambda: server().opened.models),
    }
