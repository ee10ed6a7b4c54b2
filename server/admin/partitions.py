"""Administration: devices, their partitions, repartitioning while serving, tenants that change devices, and draining."""

import json
from typing import Annotated

from fastapi import BackgroundTasks, Path, Query, Request, Response

from partitions.strain import STRAINS, check

from ..api.body import read_object
from ..api.dependencies import ServiceDep
from ..api.framework import json_response
from ..api.openapi import errors, request_body
from ..control.controlled_device import ControlledDevice
from ..control.controller import Controller
from ..control.descriptions import Beside
from ..control.together import completed
from ..errors import BadRequest, WrongMethod
from ..protocol.json_document import Object, show
from . import schemas
from .dependencies import ControllerDep, admin_router

router = admin_router()


@router.get("/device", response_model=schemas.Device)
async def device(controller: ControllerDep) -> Response:
    """Every device: its granules, its tenants, and whether it serves. Fields of a single one are repeated outside."""
    devices = [_device(controller, each) for each in controller.devices]
    only = {key: getattr(devices[0], key) for key in ("kind", "description", "unit", "granules")} if len(devices) == 1 else {}
    return json_response({**only, "devices": devices})


@router.get("/partitions", response_model=schemas.Partitions)
async def partitions(
    controller: ControllerDep,
    probe: Annotated[bool, Query(description="405 if true: see `POST /admin/partitions/probe`.")] = False,
) -> Response:
    """Which tenant has which granules."""
    if probe:  # Earlier versions probed on GET. But a probe runs work, and any web page can make a browser send a GET.
        raise WrongMethod("GET with 'probe'", "POST", "/admin/partitions/probe")
    return json_response(await _partitions(controller))


@router.post("/partitions/probe", response_model=schemas.Probed, responses=errors(409, 500))
async def probe(controller: ControllerDep) -> Response:
    """Run a small amount of work in every partition and report on which units (cores or SMs) it ran."""
    probed = [(each.name, *await controller.probe(each)) for each in controller.devices]
    found = await _partitions(controller)  # Now, as tenants may have come and gone while the probes waited.
    for device, placements, _ in probed:  # Units of different devices have the same numbers.
        for name in placements.keys() & found["partitions"].keys():
            partition, placement = found["partitions"][name], placements[name]
            if partition["device"] == device:
                partition["located"] = sorted(placement) if isinstance(placement, frozenset) else None
    shared = [overlap for _, _, overlaps in probed for overlap in overlaps]
    found["overlaps"] = [schemas.Overlap([a, b], sorted(units)) for a, b, units in shared]
    return json_response(found)


@router.put(
    "/partitions",
    response_model=schemas.Moved,
    responses=errors(409, 413, 500),
    openapi_extra=request_body(schemas.Counts, {"acme": 4}, required=True),
)
async def repartition(service: ServiceDep, controller: ControllerDep, request: Request) -> Response:
    """Give tenants other numbers of granules while all are served; they may be of several devices.

    All change or none: 409, and nothing has changed, for what does not fit, where a tenant that moves does not halt within
    `server.max_pause`, or after a minute behind another change, such as a reload that loads models.
    """
    counts = await read_object(request, service.uploads)
    if not counts:
        raise BadRequest(f"the request body names no tenant; expected granules by tenant, such as {_example(controller)}")
    moved = await completed(controller.repartition(counts))  # Even if its client disconnects.
    return json_response({**await _partitions(controller), "moved": moved})


@router.put(
    "/tenants/{tenant}/device",
    response_model=schemas.Partitions,
    responses=errors(404, 409, 413, 500),
    openapi_extra=request_body(schemas.Transfer, {"device": "1", "granules": 4}, required=True),
)
async def transfer(
    service: ServiceDep,
    controller: ControllerDep,
    request: Request,
    tenant: Annotated[str, Path(description="The tenant's name.")],
) -> Response:
    """Move a tenant to another device while it is served: its requests wait for a moment, and none fails.

    Its models are loaded there first, which may take as long as at the start. 409, and nothing has changed, for what does not
    fit, where a model cannot be served there, where the tenant's inferences do not end within `server.max_pause`, or after a
    minute behind another change. The move lasts until the server ends: the configuration's `device` is where it starts.
    """
    given = await read_object(request, service.uploads)
    if unknown := sorted(given.keys() - {"device", "granules"}):
        raise BadRequest(f"{', '.join(unknown)}: unknown; expected 'device', and perhaps 'granules'")
    to = given.get("device")
    if not isinstance(to, str):
        names = " or ".join(show(each.name) for each in controller.devices)
        raise BadRequest(f"device: {show(to)} is no text; expected {names}")
    count = given.get("granules")
    if "granules" in given and type(count) is not int:
        raise BadRequest(f"granules: {show(count)} granules; expected an integer of at least 1")
    await completed(controller.transfer(tenant, to, count))
    return json_response(await _partitions(controller))


@router.post(
    "/tenants/{tenant}/strain",
    response_model=schemas.Strained,
    responses=errors(404, 409, 413, 500),
    openapi_extra=request_body(schemas.Straining, {"kind": "memory read", "seconds": 0.5}, required=True),
)
async def strain(
    service: ServiceDep,
    controller: ControllerDep,
    request: Request,
    tenant: Annotated[str, Path(description="The tenant's name.")],
) -> Response:
    """Move bytes by a tenant's cores or SMs, as fast as they can, to see what its neighbours feel. While they are at work it is
    held to the tenant's `memory_bandwidth` and `pcie` as works of its models are. It is counted as the tenant's own.

    One at a time, and four with those that wait. It ends after `seconds`, also if the client disconnects, and frees what memory
    it took. Granules stay where they are meanwhile. `PCIe out` writes to the host from all SMs, which no model's copies do:
    every kernel of the GPU may take tens of times as long then. 409 for a kind that the device does not have, as cores have no
    PCIe; if four run or wait already; and for one that would take more than half of the memory that is free.
    """
    given = await read_object(request, service.uploads)
    if given.keys() != {"kind", "seconds"}:
        raise BadRequest(f"the request body has {show(sorted(given))}; expected 'kind' and 'seconds'")
    kind, seconds = given["kind"], given["seconds"]
    if kind not in STRAINS:
        raise BadRequest(f"kind: {show(kind)}; expected one of {', '.join(map(json.dumps, STRAINS))}")
    if type(seconds) not in (int, float):
        raise BadRequest(f"seconds: {show(seconds)}; expected a number")
    try:
        check(kind, seconds)
    except ValueError as error:
        raise BadRequest(f"seconds: {error}") from error
    done = await completed(controller.strain(tenant, kind, float(seconds)))
    return json_response(schemas.Strained(tenant, kind, done.nbytes, round(done.seconds, 6), round(done.rate, 3)))


@router.get("/tenants", response_model=schemas.Tenants)
async def tenants(controller: ControllerDep) -> Response:
    """Every tenant's models and limits, its requests now, and how many were refused."""
    found = [
        {
            "name": tenant.name,
            "queue": tenant.queue,
            "credits": tenant.in_flight,
            "models": [entry.as_json() for entry in report.index],
            **{key: count for key, count in report.lane._asdict().items() if key not in ("limited", "ran")},
            "age_seconds": round(report.age, 3),
        }
        for tenant, report in await controller.reports()
    ]
    return json_response({"tenants": found})


@router.post("/drain", status_code=202, response_model=schemas.Draining)
async def drain(controller: ControllerDep, tasks: BackgroundTasks) -> Response:
    """Stop accepting work, for good.

    Readiness is 503 at once. `server.drain_grace` seconds later new work is 503 as well, and what was accepted is answered. A
    second call changes nothing. The process stays until a signal ends it.
    """
    tasks.add_task(controller.drain, controller.config.server.drain_grace)
    return json_response(schemas.Draining("draining"), 202)


def _example(controller: Controller) -> str:
    """A body for the first tenant."""
    return json.dumps({next(iter(controller.tenants)): 2})


def _device(controller: Controller, device: ControlledDevice) -> schemas.NamedDevice:
    info, state = device.info, controller.device_state(device)
    granules = [schemas.Granule(index, size) for index, size in enumerate(info.granules)]
    return schemas.NamedDevice(device.name, info.kind, info.description, info.unit, granules, list(device.runtimes), state)


async def _partitions(controller: Controller) -> Object:
    """Totals of each device, and outside of them those of a single one; partitions in the order of the configuration."""
    beside = await controller.placements.states()
    devices = [
        schemas.DeviceGranules(each.name, each.info.unit, len(each.info.granules), each.free) for each in controller.devices
    ]
    held = {
        name: {
            "granules": list(p.granules),
            "size": p.size,
            "device": device.name,
            **({"fence": each.fence} if each.fence else {}),
            **({"wide": each.wide} if each.wide else {}),
            **({"ladder": each.ready} if each.ready else {}),
        }
        for device in controller.devices
        for name, p in device.held.items()
        for each in (beside.get(name, Beside(None, None, [])),)
    }
    only = {key: getattr(devices[0], key) for key in ("unit", "granules", "free")} if len(devices) == 1 else {}
    return {**only, "devices": devices, "partitions": {name: held[name] for name in controller.tenants if name in held}}
