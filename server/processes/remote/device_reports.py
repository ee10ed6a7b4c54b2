"""What one device process reports of itself, as the supervisor gets it: the last report where it does not answer."""

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from ...accounts.usage import Report, TenantUsages
from ...control.descriptions import Beside, Execution, TenantMemory
from ...control.device_runtime import Models, Placements
from ..channels.calls import Caller, proxy
from ..channels.device_protocols import ToRuntime
from .http_processes import in_time
from .kept_state import KnownNames


class _OfTenant(Protocol):
    @property
    def tenant(self) -> str: ...


_Row = TypeVar("_Row", bound=_OfTenant)


class DeviceReports:
    """Belongs to the event loop. `caller` calls the process; `had` are the tenants that it has, or has had.

    Each report is the last one that is known if the process does not answer in time. What a process says of tenants that it
    never had is left out: on cores the process is one tenant's own, and could write on another tenant's bill. `names` are what
    it may name.
    """

    def __init__(self, caller: Caller, had: Collection[str], names: KnownNames) -> None:
        self._names = names
        self._had = had
        self._models, self._placements = proxy(Models, caller), proxy(Placements, caller)
        self._runtime = proxy(ToRuntime, caller)
        self._executions: list[Execution] = []
        self._memory: list[TenantMemory] = []
        self._beside: dict[str, Beside] = {}

    async def executions(self) -> list[Execution]:
        if (found := await in_time(self._models.executions())) is not None:
            self._executions = self._own(found)
        return self._executions

    async def memory(self) -> list[TenantMemory]:
        if (found := await in_time(self._models.memory())) is not None:
            self._memory = self._own(found)
        return self._memory

    async def beside(self) -> dict[str, Beside]:
        if (found := await in_time(self._placements.states())) is not None:
            self._beside = {name: each for name, each in found.items() if name in self._had}
        return self._beside

    def forget_ready(self) -> None:
        """The process has ended: a move is no switch before the next one has made what is ready for one."""
        self._beside = {name: each._replace(ready=[]) for name, each in self._beside.items()}

    async def usage(self) -> Report | None:
        """None if the process does not answer: what was used is not reported twice."""
        found = await in_time(self._runtime.usage())
        return found and found._replace(tenants=[self._known(each) for each in self._own(found.tenants)])

    def _known(self, counted: TenantUsages) -> TenantUsages:
        """Without what is of too many names."""
        tenant, keep = counted.tenant, self._names.keep
        usages = [each for each in counted.usages if all(keep(tenant, name) for name in (each.model, *each.borrowed))]
        return TenantUsages(tenant, usages)

    def _own(self, rows: Sequence[_Row]) -> list[_Row]:
        return [row for row in rows if row.tenant in self._had]
