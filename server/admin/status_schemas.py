"""The answer of `GET /admin/status`, for /admin/openapi.json."""

from typing import Any, Literal

from pydantic import Field

from ..api.schemas import Schema
from ..control.moves import Move
from ..control.stretch import WidePartition
from ..observing.baseline import Isolation
from ..observing.problems import Problem
from .schemas import Granules, Unit

_STATES = Literal["starting", "serving", "incomplete", "draining", "lost", "closed", "restarting"]


class Pilot(Schema):
    """The autopilot."""

    mode: Literal["off", "dry-run", "on"]
    paused_for_seconds: float
    notes: list[str] = Field(description="Why tenants that miss their targets get nothing.")


class Share(Schema):
    """A tenant's granules on a device, and in units, on average over some seconds, what ran there."""

    tenant: str
    granules: Granules
    size: int = Field(description="In units.")
    used: float | None = Field(description="Its own models, on its own units; null while that is not known yet.")
    lent: float | None = Field(description="Other tenants' models, on its units.")
    borrowed: float | None = Field(description="Its models, on units of others.")


class TenantsWide(WidePartition):
    """A wide partition, and whose it is."""

    tenant: str


class DeviceHealth(Schema):
    """What a GPU says of itself; of cores only how busy they are. Null for what is not known."""

    utilization: float | None = Field(description="Part of the time, 0 to 1, whatever runs there.")
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: int | None
    throttled: list[str] = Field(description="Why clocks are lower than they could be.")
    errors: dict[str, int] = Field(description="XID errors since the server began, by number.")
    lost: bool = Field(description="It does not answer any more.")


class DeviceNow(Schema):
    """A device, and who has what of it."""

    name: str
    kind: str
    description: str
    unit: Unit
    state: _STATES
    granules: list[int] = Field(description="The size of each in units.")
    free: int = Field(description="Granules that no tenant has.")
    health: DeviceHealth
    shares: list[Share]
    wide: list[TenantsWide]
    lent_window_seconds: int = Field(description="`used`, `lent` and `borrowed` are averages over so long.")


class MeasuredNow(Schema):
    """Requests of the last seconds."""

    seconds: float
    requests: int = Field(description="Requests answered.")
    requests_per_second: float
    turned_away_per_second: float = Field(description="Refused for a full queue or memory, or too late.")
    limited_per_second: float = Field(description="Refused for one of the tenant's limits.")
    busy: float = Field(description="Share of the time in which its partition ran an inference, from 0 to 1.")
    queue_ms: float = Field(description="Mean wait for the partition.")
    p50_ms: float | None = Field(description="From the complete body to the encoded answer; null without a request.")
    p99_ms: float | None


class TenantNow(Schema):
    """A tenant."""

    name: str
    ready: bool = Field(description="Whether it is served any of the models that it asks for.")
    age_seconds: float = Field(description="Above 0 while its process does not answer.")
    waiting: int
    in_flight: int
    queue: int = Field(description="Requests that may wait.")
    request_bytes: int = Field(description="What its requests hold of its memory.")
    request_bytes_limit: int
    device_bytes: int | None = Field(description="What its models take of the device's memory.")
    device_bytes_limit: int | None
    target_ms: float | None
    lends: bool | None = Field(description="Whether it lends now; null for a tenant that never does.")
    measured: MeasuredNow | None
    isolation: Isolation


class ModelNow(Schema):
    """A version of a tenant's model, or a model that could not be loaded (`version` is empty then)."""

    tenant: str
    name: str
    version: str
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str
    execution: dict[str, Any] | None = Field(description="How it runs, as `greenlane.execution` in the model's configuration.")
    device_bytes: int | None
    requests_per_second: float | None
    p50_ms: float | None
    p99_ms: float | None


class Status(Schema):
    """What the status page shows."""

    version: str
    at: float = Field(description="Seconds since 1970.")
    state: _STATES
    ready: bool
    progress: str = Field(description="How many models are ready while the server starts, and what is done; empty later.")
    moving: bool = Field(description="Granules change hands now.")
    autopilot: Pilot
    devices: list[DeviceNow]
    tenants: list[TenantNow]
    models: list[ModelNow]
    problems: list[Problem] = Field(description="The newest first, 64 at most.")
    moves: list[Move] = Field(description="The newest first, 20 at most.")
