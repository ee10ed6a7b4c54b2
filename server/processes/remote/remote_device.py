"""Moves, placements and models of tenants whose device side is in another process; see `server.control.device_runtime`.

Reports are the last ones that are known if the process does not answer in time.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from engines import EngineError
from partitions import PartitionError
from partitions.plan import Granules

from ...config.schema import ModelOptions
from ...control.descriptions import Beside, Execution, Paused, ReadyShare, TenantMemory
from ...control.device_runtime import Models, Moves, Placements
from ...control.fence import Fence
from ...control.stretch import Wide
from ...errors import Conflict, RequestError, Unavailable
from ..channels.calls import proxy
from ..channels.descriptors import DescriptorSender
from ..channels.device_protocols import Change
from ..channels.rpc import Channel
from .device_tenants import DeviceTenants
from .http_processes import in_time
from .kept_state import KeptState

log = logging.getLogger("greenlane.processes")


class DeviceCalls:
    """Belongs to the supervisor's event loop. `connect` gives it each new process."""

    def __init__(self, label: str, tenants: DeviceTenants) -> None:
        self.label = label
        self.channel: Channel | None = None
        self.sender: DescriptorSender | None = None
        """None while the process has no worker that could change links."""
        self.connected = asyncio.Event()
        self.tenants = tenants

    def connect(self, channel: Channel) -> None:
        """Call this process from now on."""
        self.channel = channel
        self.connected.set()

    def disconnect(self) -> None:
        """The process has ended."""
        self.channel = self.sender = None
        self.connected.clear()

    def gone(self, what: str = "") -> Unavailable:
        """The error for what a process that has ended cannot do any more."""
        return Unavailable(f"{self.label} has ended{what} and is being started again")

    def notify(self, method: str, arguments: Sequence[Any]) -> None:
        """Send the process this notification; without a process nothing is sent."""
        if self.channel:
            self.channel.notify(method, arguments)

    async def call(self, method: str, arguments: Sequence[Any], result: Any) -> Any:
        """The answer. Raises Unavailable if there is no process, it does not serve yet, or it ends before it answers."""
        channel = self.channel
        if channel and not self.tenants.away:
            try:
                return await channel.call(method, arguments, result)
            except Unavailable:
                if not channel.closed.is_set():
                    raise
        raise self.gone()

    def restart(self, why: str) -> None:
        """End the process, if there is one: the next one starts with the tenants of now."""
        if self.channel and not self.channel.closed.is_set():
            log.error("%s is started again: %s", self.label, why)
            self.channel.close()


class RemoteMoves:
    """Belongs to the supervisor's event loop. A move ends with the process that has prepared it."""

    def __init__(self, calls: DeviceCalls, kept: KeptState) -> None:
        self._calls = calls
        self._process = proxy(Moves, calls)
        self._kept = kept
        self._granules: dict[str, Granules] = {}
        self._mover: Channel | None = None
        """The process that prepared the last move."""

    async def prepare(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int]]:
        self._granules, self._mover = dict(granules), self._calls.channel
        return await self._process.prepare(granules)

    async def settle(self) -> None:
        await self._movers().settle()

    async def halt(self) -> bool:
        return await self._movers().halt()

    async def commit(self) -> dict[str, Paused]:
        self._kept.on_moved(self._granules)
        try:
            return await self._movers().commit()
        except (RequestError, PartitionError) as error:
            self._calls.restart(f"its tenants have other granules now: {error}")  # Or it is being started with other ones.
            return {}

    async def switch(self) -> dict[str, Paused]:
        try:
            pauses = await self._movers().switch()
        except Conflict:
            raise
        except (RequestError, PartitionError) as error:
            self._calls.restart(f"a move failed, so it may have other granules than its tenants: {error}")
            raise
        self._kept.on_moved(self._granules)
        return pauses

    async def discard(self) -> None:
        with suppress(Unavailable):
            await self._movers().discard()

    def _movers(self) -> Moves:
        """Those of the process that prepared the move. Raises Unavailable if it has ended, also if another has replaced it."""
        if self._mover is None or self._mover is not self._calls.channel:
            raise self._calls.gone(" during a move,")
        return self._process


class RemotePlacements:
    """Belongs to the supervisor's event loop. What is planned is kept for a process that replaces this one."""

    def __init__(self, calls: DeviceCalls, kept: KeptState) -> None:
        self._calls = calls
        self._process = proxy(Placements, calls)
        self._kept = kept
        self._states: dict[str, Beside] = {}

    async def narrow(self, tenants: Collection[str]) -> None:
        self._kept.on_narrowed(tenants)
        with suppress(Unavailable):  # A process that has ended uses nothing.
            await self._process.narrow(tenants)

    async def plan(self, wide: Mapping[str, Wide], fences: Mapping[str, Fence]) -> None:
        self._kept.wide, self._kept.fences = dict(wide), dict(fences)
        await self._process.plan(wide, fences)

    async def hold(self, ready: Mapping[str, Sequence[Granules]]) -> dict[str, list[ReadyShare]]:
        self._kept.ready = {name: list(each) for name, each in ready.items()}
        return await self._process.hold(ready)

    async def moved(self, figures: Mapping[str, Mapping[str, int]]) -> None:
        await in_time(self._process.moved(figures))

    async def states(self) -> dict[str, Beside]:
        if (found := await in_time(self._process.states())) is not None:
            self._states = {name: each for name, each in found.items() if name in self._calls.tenants.had}
        return self._states

    def forget_ready(self) -> None:
        """The process has ended: a move is no switch before the next one has made what is ready for one."""
        self._states = {name: each._replace(ready=[]) for name, each in self._states.items()}


class RemoteModels:
    """Belongs to the supervisor's event loop. What was changed on request is kept for a process that replaces this one."""

    def __init__(self, calls: DeviceCalls, kept: KeptState) -> None:
        self._calls = calls
        self._process = proxy(Models, calls)
        self._kept = kept
        self._executions: list[Execution] = []
        self._memory: list[TenantMemory] = []

    async def load(self, tenant: str, name: str, override: str | None = None) -> None:
        await self._process.load(tenant, name, override)
        self._kept.on_changed(Change(tenant, name, True, override))

    async def unload(self, tenant: str, name: str) -> None:
        await self._process.unload(tenant, name)
        self._kept.on_changed(Change(tenant, name, False))

    async def refresh(self, tenant: str, name: str) -> str:
        """A process that replaces this one loads the files as they are then."""
        return await self._process.refresh(tenant, name)

    async def prepare(
        self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = MappingProxyType({})
    ) -> list[str]:
        return await self._process.prepare(lists, options)

    async def use(self, lists: Mapping[str, Sequence[str]], options: Mapping[str, ModelOptions] = MappingProxyType({})) -> None:
        """The lists are kept for a process that replaces this one, and what was loaded on request if they still have it."""
        self._kept.use_lists(lists)
        try:
            await self._process.use(lists, options)
            self._kept.lists.on_used(lists)
        except Unavailable as error:
            log.warning("the next process uses the new models: %s", error)
            if options:
                self._calls.restart("it may have begun with the options of before")
        except (RequestError, EngineError, PartitionError) as error:
            self._calls.restart(f"it serves other models than its tenants may call: {error}")

    async def discard(self) -> None:
        with suppress(Unavailable):  # What a process had that has ended is gone.
            await self._process.discard()

    async def executions(self) -> list[Execution]:
        if (found := await in_time(self._process.executions())) is not None:
            self._executions = self._calls.tenants.own(found)
        return self._executions

    async def memory(self) -> list[TenantMemory]:
        if (found := await in_time(self._process.memory())) is not None:
            self._memory = self._calls.tenants.own(found)
        return self._memory
