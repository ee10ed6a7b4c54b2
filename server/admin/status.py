"""`GET /admin/status`: everything that the status page shows, in one answer that is cheap enough for once a second."""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import Response
from msgspec.structs import asdict, replace

from partitions.health import Health, cores_of, on_bus

from .. import __version__
from ..accounts.usage import NOTHING, DeviceTotals, Moved, Row
from ..api.framework import json_response
from ..control.controlled_device import ControlledDevice
from ..control.controller import Controller, DeviceState
from ..control.descriptions import PartitionInfo
from ..control.fence import FencedTenant
from ..control.moves import Move
from ..control.stretch import WidePartition
from ..facts import Fact, milliseconds
from ..observing.health import HealthMonitor
from ..observing.need import Need, quantile
from ..observing.observers import Observers
from ..observing.overview import LENT_WINDOW, Isolation, Look, Problem, TenantLook
from ..observing.pilot import Mode
from ..tenants.catalog import ModelState
from .dependencies import ControllerDep, ObserversDep, admin_router
from .schemas import Granules, MovedBytes, Unit
from .usage import shown_moved


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


class TenantsFence(FencedTenant, kw_only=True):
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


router = admin_router()

_MOVES = 20
"""Moves that are shown; `GET /admin/moves` has more."""


@router.get("/status", response_model=Status)
async def status(controller: ControllerDep, observers: ObserversDep) -> Response:
    """The server, its devices, tenants and models, what went wrong, and the last moves, as the status page at `/` shows them.

    Rates and latencies are of the last seconds. Any number of callers costs as much as two a second.
    """
    look = await observers.overview.look()
    pilot = observers.pilot
    return json_response(
        Status(
            version=__version__,
            at=round(time.time(), 3),
            state=controller.state,
            ready=controller.ready,
            progress=controller.progress,
            moving=controller.moving,
            autopilot=Pilot(pilot.mode, round(pilot.paused_for, 1), pilot.notes),
            devices=[_device(controller, device, look, observers.health) for device in controller.devices],
            tenants=[_tenant(each, look) for each in look.tenants],
            models=list(_models(look, _moving(controller.devices, observers))),
            problems=observers.overview.problems.newest(),
            moves=list(islice(controller.moves, _MOVES)),
        )
    )


def _device(controller: Controller, device: ControlledDevice, look: Look, monitor: HealthMonitor) -> DeviceNow:
    used, info = look.used.get(device.name), device.info
    beside = {name: each for name, each in look.details.beside.items() if name in device.held}
    return DeviceNow(
        name=device.name,
        kind=info.kind,
        description=info.description,
        unit=info.unit,
        state=controller.device_state(device),
        granules=list(info.granules),
        free=device.free,
        health=_health(monitor, device),
        shares=[_share(name, each, used) for name, each in device.held.items()],
        wide=[TenantsWide(**asdict(each.wide), tenant=name) for name, each in beside.items() if each.wide],
        fences=[TenantsFence(**asdict(each.fence), tenant=name) for name, each in beside.items() if each.fence],
        lent_window_seconds=LENT_WINDOW,
    )


def _health(monitor: HealthMonitor, device: ControlledDevice) -> DeviceHealth:
    """What a GPU says of itself, and how busy cores are, whatever runs there; null for what is not known."""
    address = device.info.address
    if not on_bus(address):
        busy = monitor.busy(cores_of(address))
        return shown_health(Health(utilization=None if busy is None else round(busy, 3)))
    reading = monitor.reading(device.name)
    return shown_health(reading[0] if reading else Health(), monitor.moving(device.name))


def shown_health(health: Health, moving: Mapping[str, float] = MappingProxyType({})) -> DeviceHealth:
    """A GPU's reading, and what it moves in bytes a second: of its clocks, only why they are low."""
    return DeviceHealth(
        utilization=health.utilization,
        memory_used_bytes=health.memory_used,
        memory_total_bytes=health.memory_total,
        power_watts=health.power,
        power_limit_watts=health.power_limit,
        temperature_celsius=health.temperature,
        memory_bandwidth=health.memory_bandwidth,
        bytes_per_second={path: round(each) for path, each in moving.items()},
        throttled=sorted(reason for reason, holds in health.throttled.items() if holds),
        errors=dict(health.xids),
        lost=health.lost,
    )


def _share(tenant: str, partition: PartitionInfo, device: DeviceTotals | None) -> Share:
    """A tenant's granules, and what ran there, in units on average; null where it is not known yet."""
    share = Share(tenant, list(partition.granules), partition.size, None, None, None)
    if device and device.elapsed > 0 and (totals := device.tenants.get(tenant)):
        used, lent, borrowed = (round(max(0, each) / device.elapsed, 3) for each in (totals.used, totals.lent, totals.borrowed))
        return replace(share, used=used, lent=lent, borrowed=borrowed)
    return share


def _tenant(look: TenantLook, whole: Look) -> TenantNow:
    config, report = look.config, look.report
    memory = next((each for each in whole.details.memory if each.tenant == config.name), None)
    return TenantNow(
        name=config.name,
        ready=report.ready,
        age_seconds=round(report.age, 3),
        waiting=report.lane.waiting,
        in_flight=report.lane.in_flight,
        queue=config.queue,
        request_bytes=report.slots.nbytes,
        request_bytes_limit=config.memory,
        device_bytes=memory.used if memory else None,
        device_bytes_limit=memory.limit if memory else None,
        target_ms=None if config.target_p99 is None else milliseconds(config.target_p99),
        lends=report.lending[0] if report.lending else None,
        measured=_need(look.need) if look.need else None,
        isolation=look.isolation,
    )


def _need(need: Need) -> MeasuredNow:
    return MeasuredNow(
        seconds=round(need.seconds, 1),
        requests=need.requests,
        requests_per_second=round(need.rate, 2),
        turned_away_per_second=round(need.turned_away / need.seconds, 2),
        limited_per_second=round(need.limited / need.seconds, 2),
        busy=round(need.busy, 3),
        queue_ms=milliseconds(need.queue),
        p50_ms=_quantile(need.buckets, 0.5),
        p99_ms=_quantile(need.buckets, 0.99),
    )


def _moving(devices: Sequence[ControlledDevice], observers: Observers) -> Mapping[Row, MovedBytes]:
    """What models move in a second, on all devices together that say what they move."""
    found: dict[Row, tuple[Moved, Moved]] = {}
    for device in devices:
        read = observers.health.moving(device.name) or cores_of(device.info.address)
        for row, (moved, estimated) in observers.accountant.rates(device.name).items() if read else ():
            before = found.get(row, (NOTHING, NOTHING))
            found[row] = before[0].plus(moved), before[1].plus(estimated)
    return {row: shown_moved(*each) for row, each in found.items()}


def _models(look: Look, moving: Mapping[Row, MovedBytes]) -> Iterable[ModelNow]:
    """Every version of every tenant's models, and models that could not be loaded."""
    runs = {(each.tenant, each.name, each.version): each.description for each in look.details.executions}
    taken = {(memory.tenant, each.name, each.version): each.nbytes for memory in look.details.memory for each in memory.models}
    for tenant in look.tenants:
        for entry in tenant.report.index:
            key = tenant.config.name, entry.name, entry.version
            need = tenant.models.get((entry.name, entry.version))
            yield ModelNow(
                tenant=tenant.config.name,
                name=entry.name,
                version=entry.version,
                state=entry.state,
                reason=entry.reason,
                execution=dict(runs[key]) if key in runs else None,
                device_bytes=taken.get(key),
                requests_per_second=round(need.rate, 2) if need else None,
                p50_ms=_quantile(need.buckets, 0.5) if need else None,
                p99_ms=_quantile(need.buckets, 0.99) if need else None,
                bytes_per_second=moving.get((tenant.config.name, f"{entry.name}/{entry.version}")),
            )


def _quantile(buckets: Sequence[int], share: float) -> float | None:
    found = quantile(buckets, share)
    return None if found is None else milliseconds(found)
