"""The answer of `GET /admin/status`."""

from typing import Annotated, Any

from ..control.controller import DeviceState
from ..control.fence import FencedTenant
from ..control.moves import Move
from ..control.stretch import WidePartition
from ..facts import Fact
from ..observing.overview import Isolation, Problem
from ..observing.pilot import Mode
from ..tenants.catalog import ModelState
from .schemas import Granules, MovedBytes, Unit


class Pilot(Fact):
    """The autopilot."""

    mode: Mode
    paused_for_seconds: float
    notes: Annotated[list[str], "Why tenants that miss their targets get nothing."]


class Share(Fact):
    """A tenant's granules on a device, and in units, on average over some seconds, what ran there."""

    tenant: str
    granules: Granules
    size: Annotated[int, "In units."]
    used: Annotated[float | None, "Its own models, on its own units; null while that is not known yet."]
    lent: Annotated[float | None, "Other tenants' models, on its units."]
    borrowed: Annotated[float | None, "Its models, on units of others."]


class TenantsWide(WidePartition):
    """A wide partition, and whose it is."""

    tenant: str


class TenantsFence(FencedTenant):
    """What holds a tenant to its share of bandwidth, and which one."""

    tenant: str


class DeviceHealth(Fact):
    """What a GPU says of itself; of cores only how busy they are. Null for what is not known."""

    utilization: Annotated[float | None, "Part of the time, 0 to 1, whatever runs there."]
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: int | None
    memory_bandwidth: Annotated[int | None, "Bytes a second that its memory can move."]
    bytes_per_second: Annotated[
        dict[str, int], "What it moves: `memory`, read and written; over PCIe into it (`pcie_in`) and out (`pcie_out`)."
    ]
    throttled: Annotated[list[str], "Why clocks are lower than they could be."]
    errors: Annotated[dict[str, int], "XID errors since the server began, by number."]
    lost: Annotated[bool, "It does not answer any more."]


class DeviceNow(Fact):
    """A device, and who has what of it."""

    name: str
    kind: str
    description: str
    unit: Unit
    state: DeviceState
    granules: Annotated[list[int], "The size of each in units."]
    free: Annotated[int, "Granules that no tenant has."]
    health: DeviceHealth
    shares: list[Share]
    wide: list[TenantsWide]
    fences: list[TenantsFence]
    lent_window_seconds: Annotated[int, "`used`, `lent` and `borrowed` are averages over so long."]


class MeasuredNow(Fact):
    """Requests of the last seconds."""

    seconds: float
    requests: Annotated[int, "Requests answered."]
    requests_per_second: float
    turned_away_per_second: Annotated[float, "Refused for a full queue or memory, or too late."]
    limited_per_second: Annotated[float, "Refused for one of the tenant's limits."]
    busy: Annotated[float, "Share of the time in which its partition ran an inference, from 0 to 1."]
    queue_ms: Annotated[float, "Mean wait for the partition."]
    p50_ms: Annotated[float | None, "From the complete body to the encoded answer; null without a request."]
    p99_ms: float | None


class TenantNow(Fact):
    """A tenant."""

    name: str
    ready: Annotated[bool, "Whether it is served any of the models that it asks for."]
    age_seconds: Annotated[float, "Above 0 while its process does not answer."]
    waiting: int
    in_flight: int
    queue: Annotated[int, "Requests that may wait."]
    request_bytes: Annotated[int, "What its requests hold of its memory."]
    request_bytes_limit: int
    device_bytes: Annotated[int | None, "What its models take of the device's memory."]
    device_bytes_limit: int | None
    target_ms: float | None
    lends: Annotated[bool | None, "Whether it lends now; null for a tenant that never does."]
    measured: MeasuredNow | None
    isolation: Isolation


class ModelNow(Fact):
    """A version of a tenant's model, or a model that could not be loaded (`version` is empty then)."""

    tenant: str
    name: str
    version: str
    state: ModelState
    reason: str
    execution: Annotated[dict[str, Any] | None, "How it runs, as `greenlane.execution` in the model's configuration."]
    device_bytes: int | None
    requests_per_second: float | None
    p50_ms: float | None
    p99_ms: float | None
    bytes_per_second: Annotated[MovedBytes | None, "What it moves, as in `GET /admin/usage`; null where that is not known."]


class Status(Fact):
    """What the status page shows."""

    version: str
    at: Annotated[float, "Seconds since 1970."]
    state: DeviceState
    ready: bool
    progress: Annotated[str, "How many models are ready while the server starts, and what is done; empty later."]
    moving: Annotated[bool, "Granules change hands now."]
    autopilot: Pilot
    devices: list[DeviceNow]
    tenants: list[TenantNow]
    models: list[ModelNow]
    problems: Annotated[list[Problem], "The newest first, 64 at most."]
    moves: Annotated[list[Move], "The newest first, 20 at most."]
