"""What one device process reports of itself, as the supervisor gets it: the last report where it does not answer."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from ...accounts.usage import Report, TenantUsages
from ...control.descriptions import Execution, ReadyShare, TenantMemory
from ...control.device_runtime import Models, Placements
from ...control.fence import FencedTenant
from ...control.stretch import WidePartition
from ..channels.calls import Caller, proxy
from ..channels.device_protocols import ToRuntime
from ..channels.report_source import in_time
from .known_names import KnownNames


class _OfTenant(Protocol):
    @property
    def tenant(self) -> str: ...


_T = TypeVar("_T")
_Row = TypeVar("_Row", bound=_OfTenant)


class DeviceReports:
    """Belongs to the event loop. `caller` calls the process, which has these `tenants` now.

    Each report is the last one that is known if the process does not answer in time. What a process says of tenants that it
    never had is left out: on cores it is a tenant's own, and could write on another one's bill. `names` are what it may name.
    """

    def __init__(self, caller: Caller, tenants: Collection[str], names: KnownNames) -> None:
        self._names = names
        self._tenants = tenants
        self._had = set[str]()
        self._models, self._placements = proxy(Models, caller), proxy(Placements, caller)
        self._runtime = proxy(ToRuntime, caller)
        self._executions: list[Execution] = []
        self._memory: list[TenantMemory] = []
        self._stretches: dict[str, WidePartition] = {}
        self._fences: dict[str, FencedTenant] = {}
        self._rungs: dict[str, list[ReadyShare]] = {}

    def __repr__(self) -> str:
        return f"<DeviceReports, {len(self._executions)} executions>"

    async def executions(self) -> list[Execution]:
        if (found := await in_time(self._models.executions())) is not None:
            self._executions = self._own(found)
        return self._executions

    async def memory(self) -> list[TenantMemory]:
        if (found := await in_time(self._models.memory())) is not None:
            self._memory = self._own(found)
        return self._memory

    async def stretches(self) -> dict[str, WidePartition]:
        if (found := await in_time(self._placements.stretches())) is not None:
            self._stretches = self._by_tenant(found)
        return self._stretches

    async def fences(self) -> dict[str, FencedTenant]:
        if (found := await in_time(self._placements.fences())) is not None:
            self._fences = self._by_tenant(found)
        return self._fences

    async def rungs(self) -> dict[str, list[ReadyShare]]:
        if (found := await in_time(self._placements.rungs())) is not None:
            self._rungs = self._by_tenant(found)
        return self._rungs

    def forget_rungs(self) -> None:
        """The process has ended: a move is no switch before the next one has made them."""
        self._rungs = {}

    async def usage(self) -> Report | None:
        """None if the process does not answer: what was used is not reported twice."""
        found = await in_time(self._runtime.usage())
        return found and found._replace(tenants=[self._known(each) for each in self._own(found.tenants)])

    def _known(self, counted: TenantUsages) -> TenantUsages:
        """Without what is of too many names."""
        tenant, keep = counted.tenant, self._names.keep
        usages = [each for each in counted.usages if all(keep(tenant, name) for name in (each.model, *each.borrowed))]
        return TenantUsages(tenant, usages)

    def _by_tenant(self, found: Mapping[str, _T]) -> dict[str, _T]:
        self._had.update(self._tenants)
        return {name: each for name, each in found.items() if name in self._had}

    def _own(self, rows: Sequence[_Row]) -> list[_Row]:
        self._had.update(self._tenants)
        return [row for row in rows if row.tenant in self._had]
