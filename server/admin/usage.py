"""The account: what each tenant was granted and used, since the server began or a time of the caller's choice."""

import asyncio
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Query, Request, Response
from prometheus_client.core import Metric

from ..accounts.usage import NOTHING, NS, DeviceTotals, ModelTotals, Moved, TenantTotals
from ..api.framework import json_response
from ..control.controlled_device import memory_on
from ..control.controller import Controller
from ..control.descriptions import TenantMemory
from ..errors import BadRequest
from ..observing.accountant import Accountant
from ..protocol.json_document import show
from . import schemas
from .dependencies import ControllerDep, ObserversDep, admin_router
from .exposition import counter, gauge

router = admin_router()

_DATE = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}")


@router.get("/usage", response_model=schemas.Usage)
async def usage(
    controller: ControllerDep,
    observers: ObserversDep,
    request: Request,
    since: Annotated[
        str,
        Query(
            description="From when on, as RFC 3339, a date alone (its midnight in UTC) or seconds since 1970; by default since "
            "the server began. What was used is kept by the second for two minutes, and by the minute for two days: `since` in "
            "the answer says from when on it counts."
        ),
    ] = "",
) -> Response:
    """What tenants were granted, and what of that was used, idle and lent, in seconds of one unit (core or SM).

    Granted and free are together all of the device; used, idle and lent are what was granted; what all borrowed is what all
    lent.
    """
    accountant = observers.accountant
    now, memory = await asyncio.gather(accountant.collect(), memory_on(controller.devices))
    begin = accountant.before(parse_since(since, now.wall)) if "since" in request.query_params else None
    added = now.less(begin) if begin else now
    span = now.at - begin.at if begin else max((each.elapsed for each in now.devices.values()), default=0)
    devices = [_device(name, each) for name, each in added.devices.items()]
    tenants = [
        _tenant(name, device, tenant, each, memory.get(name, {}).get(tenant), accountant.age(controller.runtime(name, tenant)))
        for name, device in added.devices.items()
        for tenant, each in device.tenants.items()
    ]
    return json_response(schemas.Usage(_shown(now.wall - span), _shown(now.wall), span / NS, devices, tenants))


def _device(name: str, device: DeviceTotals) -> schemas.UsedDevice:
    tenants, at_rest = device.tenants.values(), None if device.energy is None else device.idle_energy
    return schemas.UsedDevice(
        name,
        device.unit,
        device.units,
        total=device.total / NS,
        granted=(device.total - device.free) / NS,
        free=device.free / NS,
        **{key: sum(getattr(each, key) for each in tenants) / NS for key in ("used", "idle", "lent", "borrowed")},
        energy_joules=_joules(device.energy),
        idle_energy_joules=_joules(at_rest),
        moved=None if device.moved is None else shown_moved(device.moved),
        background=None if device.moved is None else shown_moved(device.background, device.estimated),
        moved_seconds=device.moved_in / NS,
    )


def _tenant(
    where: str, device: DeviceTotals, name: str, tenant: TenantTotals, memory: TenantMemory | None, age: float
) -> schemas.UsedTenant:
    measured = device.energy is not None
    return schemas.UsedTenant(
        name,
        where,
        device.unit,
        tenant.share,
        **{key: getattr(tenant, key) / NS for key in ("granted", "used", "idle", "lent", "borrowed")},
        energy_joules=_joules(tenant.energy if measured else None),
        moved=None if tenant.moved is None else shown_moved(tenant.moved, tenant.estimated),
        device_memory_bytes=memory.used if memory else 0,
        age_seconds=round(age, 3),
        models=[_model(key, each, measured, tenant.moved is not None) for key, each in tenant.models.items()],
    )


def _model(key: str, model: ModelTotals, measured: bool, counted: bool) -> schemas.UsedModel:
    name, _, version = key.rpartition("/")
    energy = _joules(model.energy if measured else None)
    moved = shown_moved(model.moved, model.estimated) if counted else None
    return schemas.UsedModel(name, version, model.works, model.used / NS, model.borrowed / NS, energy, moved)


def shown_moved(moved: Moved, estimated: Moved = NOTHING) -> schemas.MovedBytes:
    """With whether it was measured."""
    return schemas.MovedBytes(*moved, by="estimated" if moved.has_much(estimated) else "measured")


def _joules(microjoules: int | None) -> float | None:
    return None if microjoules is None else microjoules / 10**6


def parse_since(text: str, now: int) -> int:
    """Nanoseconds from 1970 to the time that the parameter `since` names; `now` is the latest. Raises BadRequest."""
    found = _parsed(text)
    if found is None:
        forms = "a time such as 2026-11-22T16:00:00Z (RFC 3339), a date such as 2026-11-22 (midnight UTC)"
        raise BadRequest(f"since: {show(text)} is not a time; expected {forms}, or seconds since 1970")
    if found > now:
        raise BadRequest(f"since: {show(text)} is in the future; here it is {_shown(now)}")
    return found


def _parsed(text: str) -> int | None:
    try:
        nanoseconds = float(text) * NS
    except ValueError:
        pass
    else:
        return int(nanoseconds) if 0 <= nanoseconds < math.inf else None
    try:
        moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)  # A + in a query is a space.
    except ValueError:
        return None
    if _DATE.fullmatch(text):
        moment = moment.replace(tzinfo=UTC)
    if moment.tzinfo is None:
        return None
    return int(moment.timestamp() * 10**6) * 1000


def _shown(wall: int) -> str:
    """RFC 3339 with milliseconds."""
    return datetime.fromtimestamp(wall / NS, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_DEVICE = ["device", "unit"]
_TENANT = ["tenant", *_DEVICE]
_MODEL = ["model", "version", *_TENANT]


def families(controller: Controller, accountant: Accountant) -> Iterator[Metric]:
    """The account by the last reports, as Prometheus counters; the label `unit` says whether units are cores or SMs."""
    devices = [((name, each.unit), each) for name, each in accountant.totals().devices.items()]
    tenants = [((tenant, *labels), each) for labels, device in devices for tenant, each in device.tenants.items()]
    models = [((*key.rpartition("/")[::2], *labels), each) for labels, tenant in tenants for key, each in tenant.models.items()]
    metered = [(labels, each) for labels, each in devices if each.energy is not None]
    with_meter = {labels for labels, _ in metered}

    def of_devices(name: str, about: str, field: str) -> Metric:
        return counter(name, about, _DEVICE, ((labels, getattr(each, field) / NS) for labels, each in devices))

    def of_models(name: str, about: str, field: str) -> Metric:
        return counter(name, about, _MODEL, ((labels, getattr(each, field) / NS) for labels, each in models))

    yield of_devices("greenlane_device_unit_seconds", "Seconds of every unit of the device", "total")
    yield of_devices("greenlane_free_unit_seconds", "Seconds of units that no tenant was granted", "free")
    granted = ((labels, each.granted / NS) for labels, each in tenants)
    yield counter("greenlane_granted_unit_seconds", "Seconds of units in the tenant's share", _TENANT, granted)
    idle = (((tenant, device, unit), accountant.idle(device, tenant) / NS) for (tenant, device, unit), _ in tenants)
    yield counter("greenlane_idle_unit_seconds", "Seconds of granted units in which nothing ran on them", _TENANT, idle)
    lent = ((labels, each.lent / NS) for labels, each in tenants)
    yield counter("greenlane_lent_unit_seconds", "Seconds of granted units in which other tenants ran on them", _TENANT, lent)
    yield of_models("greenlane_used_unit_seconds", "Seconds of the tenant's own units in which the model ran", "used")
    yield of_models("greenlane_borrowed_unit_seconds", "Seconds of others' units in which the model ran", "borrowed")
    works = ((labels, each.works) for labels, each in models)
    yield counter("greenlane_works", "Runs of the model, failed and stopped ones included", _MODEL, works)
    energy = ((labels, each.energy / 10**6) for labels, each in models if labels[-2:] in with_meter)
    yield counter("greenlane_energy_joules", "Energy by use, without the device's idle power", _MODEL, energy)
    taken = ((labels, (each.energy or 0) / 10**6) for labels, each in metered)
    yield counter("greenlane_device_energy_joules", "Energy that the device took", _DEVICE, taken)
    at_rest = ((labels, each.idle_energy / 10**6) for labels, each in metered)
    yield counter("greenlane_device_idle_energy_joules", "Energy that the device takes when nothing runs", _DEVICE, at_rest)
    moving = {labels for labels, each in devices if each.moved is not None}
    counted = {labels for labels, each in tenants if each.moved is not None}
    moved_by = [(labels, each.moved, each.estimated) for labels, each in models if labels[-3:] in counted]
    moved_by += [(("", "", *labels), each.rest, NOTHING) for labels, each in tenants if any(each.rest)]
    moved = (
        ((*labels, path, by), count)
        for labels, whole, estimated in moved_by
        for by, part in (("measured", whole.less(estimated)), ("estimated", estimated))
        for path, count in part._asdict().items()
    )
    about = "Bytes that the model moved, by a fit of what the device moved to what ran, or by an estimate"
    yield counter("greenlane_moved_bytes", about, [*_MODEL, "path", "by"], moved)
    background = (
        ((*labels, path), count)
        for labels, each in devices
        if labels in moving
        for path, count in each.background._asdict().items()
    )
    about = "Bytes that the device moved and no model"
    yield counter("greenlane_background_moved_bytes", about, [*_DEVICE, "path"], background)
    residuals = (
        ((*labels, path), fit.residual)
        for labels in moving
        if (traffic := accountant.traffic(labels[0]))
        for path, fit in zip(Moved._fields, traffic.fits, strict=True)
    )
    about = "What the fit does not foresee of what the device moves, 0 to 1; figures are measured up to 0.15"
    yield gauge("greenlane_moved_residual_ratio", about, [*_DEVICE, "path"], residuals)
    served = ((tenant, device, controller.runtime(device, tenant)) for (tenant, device, _), _ in tenants)
    ages = (((tenant, device), accountant.age(runtime)) for tenant, device, runtime in served if runtime is not None)
    yield gauge("greenlane_usage_age_seconds", "Age of what was reported of use", ["tenant", "device"], ages)
