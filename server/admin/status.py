"""`GET /admin/status`: everything that the status page shows, in one answer that is cheap enough for once a second."""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from fastapi import Response
from msgspec.structs import asdict, replace

from partitions.health import Health, cores_of, on_bus

from .. import __version__
from ..accounts.usage import NOTHING, DeviceTotals, Moved, Row
from ..api.framework import json_response
from ..control.controlled_device import ControlledDevice
from ..control.controller import Controller
from ..control.descriptions import PartitionInfo
from ..facts import milliseconds
from ..observing.health import HealthMonitor
from ..observing.need import Need, quantile
from ..observing.observers import Observers
from ..observing.overview import LENT_WINDOW, Look, TenantLook
from . import status_schemas as schemas
from .dependencies import ControllerDep, ObserversDep, admin_router
from .schemas import MovedBytes
from .usage import shown_moved

router = admin_router()

_MOVES = 20
"""Moves that are shown; `GET /admin/moves` has more."""


@router.get("/status", response_model=schemas.Status)
async def status(controller: ControllerDep, observers: ObserversDep) -> Response:
    """The server, its devices, tenants and models, what went wrong, and the last moves, as the status page at `/` shows them.

    Rates and latencies are of the last seconds. Any number of callers costs as much as two a second.
    """
    look = await observers.overview.look()
    pilot = observers.pilot
    return json_response(
        schemas.Status(
            version=__version__,
            at=round(time.time(), 3),
            state=controller.state,
            ready=controller.ready,
            progress=controller.progress,
            moving=controller.moving,
            autopilot=schemas.Pilot(pilot.mode, round(pilot.paused_for, 1), pilot.notes),
            devices=[_device(controller, device, look, observers.health) for device in controller.devices],
            tenants=[_tenant(each, look) for each in look.tenants],
            models=list(_models(look, _moving(controller.devices, observers))),
            problems=observers.overview.problems.newest(),
            moves=list(islice(controller.moves, _MOVES)),
        )
    )


def _device(controller: Controller, device: ControlledDevice, look: Look, monitor: HealthMonitor) -> schemas.DeviceNow:
    used, info = look.used.get(device.name), device.info
    beside = {name: each for name, each in look.details.beside.items() if name in device.held}
    return schemas.DeviceNow(
        name=device.name,
        kind=info.kind,
        description=info.description,
        unit=info.unit,
        state=controller.device_state(device),
        granules=list(info.granules),
        free=device.free,
        health=_health(monitor, device),
        shares=[_share(name, each, used) for name, each in device.held.items()],
        wide=[schemas.TenantsWide(**asdict(each.wide), tenant=name) for name, each in beside.items() if each.wide],
        fences=[schemas.TenantsFence(**asdict(each.fence), tenant=name) for name, each in beside.items() if each.fence],
        lent_window_seconds=LENT_WINDOW,
    )


def _health(monitor: HealthMonitor, device: ControlledDevice) -> schemas.DeviceHealth:
    """What a GPU says of itself, and how busy cores are, whatever runs there; null for what is not known."""
    address = device.info.address
    if not on_bus(address):
        busy = monitor.busy(cores_of(address))
        return shown_health(Health(utilization=None if busy is None else round(busy, 3)))
    reading = monitor.reading(device.name)
    return shown_health(reading[0] if reading else Health(), monitor.moving(device.name))


def shown_health(health: Health, moving: Mapping[str, float] = MappingProxyType({})) -> schemas.DeviceHealth:
    """A GPU's reading, and what it moves in bytes a second: of its clocks, only why they are low."""
    return schemas.DeviceHealth(
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


def _share(tenant: str, partition: PartitionInfo, device: DeviceTotals | None) -> schemas.Share:
    """A tenant's granules, and what ran there, in units on average; null where it is not known yet."""
    share = schemas.Share(tenant, list(partition.granules), partition.size, None, None, None)
    if device and device.elapsed > 0 and (totals := device.tenants.get(tenant)):
        used, lent, borrowed = (round(max(0, each) / device.elapsed, 3) for each in (totals.used, totals.lent, totals.borrowed))
        return replace(share, used=used, lent=lent, borrowed=borrowed)
    return share


def _tenant(look: TenantLook, whole: Look) -> schemas.TenantNow:
    config, report = look.config, look.report
    memory = next((each for each in whole.details.memory if each.tenant == config.name), None)
    return schemas.TenantNow(
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


def _need(need: Need) -> schemas.MeasuredNow:
    return schemas.MeasuredNow(
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
        traffic = observers.accountant.traffic(device.name) if observers.health.moving(device.name) else None
        for row, (moved, estimated) in (traffic.rates if traffic else {}).items():
            before = found.get(row, (NOTHING, NOTHING))
            found[row] = before[0].plus(moved), before[1].plus(estimated)
    return {row: shown_moved(*each) for row, each in found.items()}


def _models(look: Look, moving: Mapping[Row, MovedBytes]) -> Iterable[schemas.ModelNow]:
    """Every version of every tenant's models, and models that could not be loaded."""
    runs = {(each.tenant, each.name, each.version): each.description for each in look.details.executions}
    taken = {(memory.tenant, each.name, each.version): each.nbytes for memory in look.details.memory for each in memory.models}
    for tenant in look.tenants:
        for entry in tenant.report.index:
            key = tenant.config.name, entry.name, entry.version
            need = tenant.models.get((entry.name, entry.version))
            yield schemas.ModelNow(
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
