"""A device as the control plane sees it: the runtimes of its tenants, who has which granules, and what all devices report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from partitions import Move
from partitions.plan import Granules, assign, orders

from ..accounts.usage import Row
from .descriptions import NOT_OPENED, DeviceInfo, PartitionInfo, TenantMemory
from .device_runtime import DeviceRuntime
from .fence import Fence, Narrowing
from .stretch import Wide
from .together import together

T = TypeVar("T")


@dataclass(slots=True)
class ControlledDevice:
    """A device by its name, the runtime of each of its tenants, and who holds what.

    `process` is the runtime of all of them if the device has one process for all, or is in this one. `adopts` says whether
    tenants can come from other devices while they are served.
    """

    name: str
    runtimes: dict[str, DeviceRuntime]
    process: DeviceRuntime | None = None
    adopts: bool = True
    info: DeviceInfo = NOT_OPENED
    held: dict[str, PartitionInfo] = field(default_factory=dict)
    first: dict[str, Granules] = field(default_factory=dict)
    """The granules of each tenant's first partition here, which its later ones are planned around."""
    apart: dict[str, tuple[DeviceRuntime, int, Granules]] = field(default_factory=dict)
    """Partitions of a shared device, by tenant, that a look has shown to share no units: the tenant's runtime, the number of
    that runtime's process, and the granules. A tenant whose entry is no longer true is looked at again.
    """
    host_cores: dict[str, frozenset[int] | None] = field(default_factory=dict)
    """The host's cores that each tenant's first partition reserved; None where it reserves none."""
    wide: dict[str, Wide] = field(default_factory=dict)
    """The wide partitions that are planned, by tenant."""
    fences: dict[str, Fence] = field(default_factory=dict)
    """What holds tenants to their shares of bandwidth, by tenant."""
    slows: Mapping[Row, float] = field(default_factory=dict)
    """Models that are held as works of others take so many times as long beside them, as seen by the account."""
    narrowing: Mapping[str, Narrowing] = field(default_factory=dict)
    """What the account has seen of held models, by tenant: how narrow their placements have to be."""

    @property
    def free(self) -> int:
        """How many granules no tenant has."""
        return len(self.info.granules) - sum(self.counts.values())

    @property
    def homes(self) -> dict[str, Granules]:
        """The granules of each tenant."""
        return {name: partition.granules for name, partition in self.held.items()}

    @property
    def counts(self) -> dict[str, int]:
        """How many granules each tenant has."""
        return {name: len(partition.granules) for name, partition in self.held.items()}

    def hold(self, granules: Mapping[str, Granules]) -> None:
        """These tenants have these granules now."""
        sizes = self.info.granules
        self.first = {**granules, **self.first}
        self.held |= {name: PartitionInfo(tuple(each), sum(sizes[i] for i in each)) for name, each in granules.items()}

    def remove(self, name: str) -> None:
        """This tenant has nothing here any more."""
        self.runtimes.pop(name, None)
        self.held.pop(name, None)
        self.first.pop(name, None)
        self.apart.pop(name, None)
        self.host_cores.pop(name, None)
        self.wide.pop(name, None)
        self.fences.pop(name, None)
        self.slows = {row: times for row, times in self.slows.items() if row[0] != name}
        self.narrowing = {tenant: seen for tenant, seen in self.narrowing.items() if tenant != name}

    def distinct(self, names: Iterable[str] | None = None) -> list[DeviceRuntime]:
        """The runtimes of these tenants, or of all, each once."""
        if self.process:
            return [self.process]
        return list({id(each): each for each in (self.runtimes[name] for name in names or self.runtimes)}.values())

    def of(self, runtime: DeviceRuntime, values: Mapping[str, T]) -> dict[str, T]:
        """Those of `values`, by tenant, whose tenants this runtime has."""
        return {name: value for name, value in values.items() if self.runtimes.get(name) is runtime}

    def own(self, values: Mapping[str, T]) -> dict[str, T]:
        """Those of `values`, by tenant, whose tenants are on this device."""
        return {name: value for name, value in values.items() if name in self.runtimes}

    def plan(self, counts: Mapping[str, int]) -> Move:
        """The change to these counts of granules; other tenants keep theirs. Raises DoesNotFit."""
        before = self.homes
        return Move(before, assign(len(self.info.granules), before, {**self.counts, **counts}, self.orders))

    @property
    def orders(self) -> dict[str, Granules]:
        """The order in which each tenant would have granules; see `partitions.plan.orders`."""
        return orders(len(self.info.granules), self.first)


async def memory_on(devices: Sequence[ControlledDevice]) -> dict[str, dict[str, TenantMemory]]:
    """What each tenant's models take of its device's memory, by device and tenant."""
    found = await together(together(runtime.models.memory() for runtime in device.distinct()) for device in devices)
    return {
        device.name: {each.tenant: each for memory in memories for each in memory if each.tenant in device.runtimes}
        for device, memories in zip(devices, found, strict=True)
    }


class Observer(Protocol):
    """What watches a controller, which does not know what for. Every method is called on the event loop of the controller."""

    def start(self) -> None:
        """All devices are partitioned."""

    def divided(self, device: ControlledDevice, granules: Mapping[str, Granules]) -> None:
        """A device is divided as it says from now on, and as it will say: these tenants are about to get these granules."""

    async def leaving(self, device: ControlledDevice, runtime: DeviceRuntime) -> None:
        """This device side is about to lose a tenant, which waits for this."""

    async def drained(self) -> None:
        """Every request was answered, and the server ends."""

    async def close(self) -> None:
        """The device sides end next. May be called again."""
