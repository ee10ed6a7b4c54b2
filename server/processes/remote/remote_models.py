"""Models of tenants whose device side is in another process; see `server.control.device_runtime.Models`."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from engines import EngineError
from partitions import PartitionError

from ...config.schema import ModelOptions
from ...control.descriptions import Execution, TenantMemory
from ...control.device_runtime import Models
from ...errors import RequestError, Unavailable
from ..channels.calls import proxy
from ..channels.device_protocols import Change
from .device_calls import DeviceCalls
from .device_reports import DeviceReports
from .kept_state import KeptState

log = logging.getLogger("greenlane.processes")


class RemoteModels:
    """Belongs to the supervisor's event loop. What was changed on request is kept for a process that replaces this one."""

    def __init__(self, calls: DeviceCalls, kept: KeptState, reports: DeviceReports) -> None:
        self._calls = calls
        self._process = proxy(Models, calls)
        self._kept = kept
        self._reports = reports

    def __repr__(self) -> str:
        return f"<RemoteModels of {self._calls.label}>"

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
        return await self._reports.executions()

    async def memory(self) -> list[TenantMemory]:
        return await self._reports.memory()
