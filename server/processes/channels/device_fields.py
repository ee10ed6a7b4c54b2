"""The parts of `device_messages`: each mirrors a class of ours, as in `message_fields`."""

from typing import Any

import msgspec

from ...accounts.usage import Report, TenantUsages, Usage
from ...control.descriptions import DeviceInfo, Execution, ModelMemory, TenantMemory
from ...control.stretch import Wide, WideState
from .message_fields import Count, Fields, mirror


class DeviceInfoFields(Fields):
    """A `DeviceInfo`."""

    kind: str
    description: str
    unit: str
    granules: tuple[int, ...]
    address: str = ""
    shared: bool = False

    @classmethod
    def of(cls, info: DeviceInfo) -> "DeviceInfoFields":
        return mirror(cls, info)

    def info(self) -> DeviceInfo:
        return DeviceInfo(self.kind, self.description, self.unit, self.granules, self.address, self.shared)


class ExecutionFields(Fields):
    """An `Execution`."""

    tenant: str
    name: str
    version: str
    description: dict[str, Any]

    @classmethod
    def of(cls, execution: Execution) -> "ExecutionFields":
        return cls(execution.tenant, execution.name, execution.version, dict(execution.description))

    def execution(self) -> Execution:
        return Execution(self.tenant, self.name, self.version, self.description)


class ModelMemoryFields(Fields):
    """A `ModelMemory`."""

    name: str
    version: str
    memory: dict[str, int]
    paged: bool


class TenantMemoryFields(Fields):
    """A `TenantMemory`."""

    tenant: str
    limit: int | None
    models: list[ModelMemoryFields]
    page_ins: int
    page_outs: int
    page_in_seconds: float
    page_out_seconds: float

    @classmethod
    def of(cls, memory: TenantMemory) -> "TenantMemoryFields":
        models = [ModelMemoryFields(each.name, each.version, dict(each.memory), each.paged) for each in memory.models]
        return msgspec.structs.replace(mirror(cls, memory), models=models)

    def tenant_memory(self) -> TenantMemory:
        models = [ModelMemory(each.name, each.version, each.memory, each.paged) for each in self.models]
        return TenantMemory(**{**msgspec.structs.asdict(self), "models": models})


class UsageFields(Fields):
    """A `Usage`."""

    model: str
    works: Count
    used: Count
    borrowed: dict[str, Count]


class TenantUsagesFields(Fields):
    """A `TenantUsages`."""

    tenant: str
    usages: list[UsageFields]


class UsageReportFields(Fields):
    """A `server.accounts.usage.Report`."""

    epoch: Count
    tenants: list[TenantUsagesFields]
    energy: Count | None

    @classmethod
    def of(cls, report: Report) -> "UsageReportFields":
        tenants = [TenantUsagesFields(name, [mirror(UsageFields, each) for each in usages]) for name, usages in report.tenants]
        return cls(report.epoch, tenants, report.energy)

    def report(self) -> Report:
        tenants = [
            TenantUsages(each.tenant, [Usage(one.model, one.works, one.used, one.borrowed) for one in each.usages])
            for each in self.tenants
        ]
        return Report(self.epoch, tenants, self.energy)


class WideFields(Fields):
    """A `Wide`."""

    granules: tuple[int, ...]
    lent: dict[str, tuple[int, ...]]
    limit: float

    @classmethod
    def of(cls, wide: Wide) -> "WideFields":
        return cls(wide.granules, dict(wide.lent), wide.limit)

    def wide(self) -> Wide:
        return Wide(self.granules, self.lent, self.limit)


class WideStateFields(Fields):
    """A `WideState`."""

    tenant: str
    granules: tuple[int, ...]
    lent: dict[str, tuple[int, ...]]
    launches: int
    returns: int
    home_launches: dict[str, int]
    too_long: tuple[str, ...]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, state: WideState) -> "WideStateFields":
        tenant, granules, lent, launches, returns, home_launches, *named = state
        return cls(tenant, granules, dict(lent), launches, returns, dict(home_launches), *named)

    def state(self) -> WideState:
        return WideState(*msgspec.structs.astuple(self))
