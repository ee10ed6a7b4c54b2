"""What is counted. Times are nanoseconds; what is granted, used, lent and borrowed is unit-nanoseconds: a unit (a core, an SM)
for a nanosecond. All are integers, so that sums are exact.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, sub
from typing import Annotated, NamedTuple

from msgspec import Meta

NS = 10**9
Count = Annotated[int, Meta(ge=0)]
"""In what other processes send."""
Name = Annotated[str, Meta(max_length=1024)]
"""A name or a phrase in what they send."""


Row = tuple[str, str]
"""A tenant and one of its models."""


class Moved(NamedTuple):
    """Bytes that were moved: of the device's own memory, read and written, and over PCIe into the device and out of it."""

    memory: int = 0
    pcie_in: int = 0
    pcie_out: int = 0

    def has_much(self, part: "Moved") -> bool:
        """Whether `part` is more than a tenth of any of these."""
        return any(each * 10 > whole for each, whole in zip(part, self, strict=True))

    def plus(self, other: "Moved") -> "Moved":
        """Both together."""
        return Moved(*map(add, self, other))

    def less(self, earlier: "Moved") -> "Moved":
        """What was added since."""
        return Moved(*map(sub, self, earlier))


NOTHING = Moved()


class Usage(NamedTuple):
    """What a tenant's works of one model (`name/version`) have used since its process began.

    `used` is of the tenant's own units, `borrowed` of those of others, by lender.
    """

    model: Name
    works: Count
    used: Count
    borrowed: Mapping[Name, Count]


class TenantUsages(NamedTuple):
    """What a process has counted for one tenant, model by model."""

    tenant: str
    usages: Sequence[Usage]


class Report(NamedTuple):
    """What one process has counted since it began, for tenants that it has or has had. `epoch` is larger in its replacement.

    `energy` is the count of the device's energy meter in microjoules, None if there is none.
    """

    epoch: Count
    tenants: Sequence[TenantUsages]
    energy: Count | None = None


@dataclass(frozen=True, slots=True)
class ModelTotals:
    """A tenant's model on a device. `energy` is microjoules; `estimated` is the part of `moved` that was shared by a prior."""

    works: int = 0
    used: int = 0
    borrowed: int = 0
    energy: int = 0
    moved: Moved = NOTHING
    estimated: Moved = NOTHING

    def less(self, earlier: "ModelTotals") -> "ModelTotals":
        """What was added since."""
        return ModelTotals(
            self.works - earlier.works,
            self.used - earlier.used,
            self.borrowed - earlier.borrowed,
            self.energy - earlier.energy,
            self.moved.less(earlier.moved),
            self.estimated.less(earlier.estimated),
        )


_NO_MODEL = ModelTotals()


@dataclass(frozen=True, slots=True)
class TenantTotals:
    """A tenant on a device: `granted` is its share over time, `lent` what others ran on it, `share` the units it has now.

    `moved` is what its works moved, None where that is not counted. Where cores are counted tenant by tenant it is also what
    its cores moved besides, and what is `estimated` of that is how much of it works of a borrower moved, or its own elsewhere.
    """

    granted: int = 0
    lent: int = 0
    share: int = 0
    models: Mapping[str, ModelTotals] = field(default_factory=dict)
    moved: Moved | None = None
    estimated: Moved = NOTHING

    @property
    def used(self) -> int:
        """What its works ran on its own units."""
        return sum(each.used for each in self.models.values())

    @property
    def borrowed(self) -> int:
        """What its works ran on the units of others."""
        return sum(each.borrowed for each in self.models.values())

    @property
    def idle(self) -> int:
        """What nothing ran on. Less than 0 while the tenant and a borrower run on the same units at the same time."""
        return self.granted - self.used - self.lent

    @property
    def energy(self) -> int:
        """Its share of the device's energy in microjoules."""
        return sum(each.energy for each in self.models.values())

    @property
    def rest(self) -> Moved:
        """What none of its works moved of that."""
        return NOTHING if self.moved is None else self.moved.less(total_of(each.moved for each in self.models.values()))

    def less(self, earlier: "TenantTotals") -> "TenantTotals":
        """What was added since; the share is that of now."""
        models = {name: each.less(earlier.models.get(name, _NO_MODEL)) for name, each in self.models.items()}
        moved = None if self.moved is None else self.moved.less(earlier.moved or NOTHING)
        granted, lent = self.granted - earlier.granted, self.lent - earlier.lent
        return TenantTotals(granted, lent, self.share, models, moved, self.estimated.less(earlier.estimated))


_NO_TENANT = TenantTotals()


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """A device of so many units over `elapsed` nanoseconds. Energies are microjoules, None without a meter.

    `idle_energy` is what the device would have taken without any work. `moved` is what it moved in `moved_in` nanoseconds, None
    without a meter, and `background` the part of that which is no tenant's; `estimated` is as in `ModelTotals`.
    """

    unit: str
    units: int
    elapsed: int
    tenants: Mapping[str, TenantTotals]
    energy: int | None = None
    idle_energy: int = 0
    moved: Moved | None = None
    background: Moved = NOTHING
    estimated: Moved = NOTHING
    moved_in: int = 0

    @property
    def total(self) -> int:
        """All that there was: units times time."""
        return self.units * self.elapsed

    @property
    def free(self) -> int:
        """What no tenant was granted."""
        return self.total - sum(each.granted for each in self.tenants.values())

    def less(self, earlier: "DeviceTotals | None") -> "DeviceTotals":
        """What was added since."""
        if earlier is None:
            return self
        tenants = {name: each.less(earlier.tenants.get(name, _NO_TENANT)) for name, each in self.tenants.items()}
        energy = None if self.energy is None else self.energy - (earlier.energy or 0)
        elapsed, idle_energy = self.elapsed - earlier.elapsed, self.idle_energy - earlier.idle_energy
        moved = None if self.moved is None else self.moved.less(earlier.moved or NOTHING)
        background, estimated = self.background.less(earlier.background), self.estimated.less(earlier.estimated)
        figures = moved, background, estimated, self.moved_in - earlier.moved_in
        return DeviceTotals(self.unit, self.units, elapsed, tenants, energy, idle_energy, *figures)


def total_of(parts: Iterable[Moved]) -> Moved:
    """All of them together."""
    found = NOTHING
    for each in parts:
        found = found.plus(each)
    return found


@dataclass(frozen=True, slots=True)
class Totals:
    """All devices by name, at a time on the clock of `time.monotonic_ns`, which was `wall` nanoseconds since 1970."""

    at: int
    wall: int
    devices: Mapping[str, DeviceTotals]

    def less(self, earlier: "Totals") -> "Totals":
        """What was added since; a device that was not there then is as it is."""
        devices = {name: each.less(earlier.devices.get(name)) for name, each in self.devices.items()}
        return Totals(self.at, self.wall, devices)
