"""Administration: the device, its partitions, repartitioning while serving, and draining."""

import asyncio
import json
from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Query, Request, Response

from partitions.probe import overlaps

from ..api.body import read_object
from ..api.dependencies import RequireAdmin, ServiceDep
from ..api.framework import json_response
from ..api.openapi import errors, operation_id, request_body
from ..control.controller import Controller
from ..errors import BadRequest, WrongMethod
from ..protocol.json_document import Object
from . import schemas
from .dependencies import ControllerDep

router = APIRouter(
    prefix="/admin",
    tags=["Administration"],
    dependencies=[RequireAdmin],
    responses=errors(400, 401, 503),
    generate_unique_id_function=operation_id,
)


@router.get("/device", response_model=schemas.Device)
async def device(controller: ControllerDep) -> Response:
    """The device and its granules."""
    found = controller.devices[0].info
    return json_response(
        {
            "kind": found.kind,
            "description": found.description,
            "unit": found.unit,
            "granules": [{"index": index, "size": size} for index, size in enumerate(found.granules)],
        }
    )


@router.get("/partitions", response_model=schemas.Partitions)
async def partitions(
    controller: ControllerDep,
    probe: Annotated[bool, Query(description="405 if true: see `POST /admin/partitions/probe`.")] = False,
) -> Response:
    """Which tenant has which granules."""
    if probe:  # Earlier versions probed on GET. But a probe runs work, and any web page can make a browser send a GET.
        raise WrongMethod("GET with 'probe'", "POST", "/admin/partitions/probe")
    return json_response(_partitions(controller))


@router.post("/partitions/probe", response_model=schemas.Probed, responses=errors(500))
async def probe(controller: ControllerDep) -> Response:
    """Run a small amount of work in every partition and report on which units (cores or SMs) it ran."""
    found, placements = _partitions(controller), await controller.probe(controller.devices[0])
    for name, units in placements.items():
        found["partitions"][name]["located"] = sorted(units)
    found["overlaps"] = [{"tenants": [a, b], "units": sorted(units)} for a, b, units in overlaps(placements)]
    return json_response(found)


@router.put(
    "/partitions",
    response_model=schemas.Moved,
    responses=errors(409, 413, 500),
    openapi_extra=request_body(schemas.Counts, {"acme": 4}, required=True),
)
async def repartition(service: ServiceDep, controller: ControllerDep, request: Request) -> Response:
    """Give tenants other numbers of granules while all are served.

    409, and nothing has changed, for what does not fit, or where a tenant that is to move does not halt within
    `server.max_pause`.
    """
    counts = await read_object(request, service.uploads)
    if not counts:
        raise BadRequest(f"the request body names no tenant; expected granules by tenant, such as {_example(controller)}")
    # Shielded: a repartition that has begun is completed, even if its client disconnects.
    move = await asyncio.shield(asyncio.ensure_future(controller.repartition(counts)))
    return json_response({**_partitions(controller), "moved": list(move.movers)})


@router.get("/tenants", response_model=schemas.Tenants)
async def tenants(controller: ControllerDep) -> Response:
    """Every tenant's models and limits, its requests now, and how many were refused."""
    found = [
        {
            "name": tenant.name,
            "queue": tenant.queue,
            "credits": tenant.in_flight,
            "models": [entry.as_json() for entry in report.index],
            **report.lane._asdict(),
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
    return json_response({"state": "draining"}, 202)


def _example(controller: Controller) -> str:
    """A body for the first tenant."""
    return json.dumps({next(iter(controller.config.tenants)): 2})


def _partitions(controller: Controller) -> Object:
    device = controller.devices[0]
    total, held = len(device.info.granules), device.held
    return {
        "unit": device.info.unit,
        "granules": total,
        "free": total - sum(len(partition.granules) for partition in held.values()),
        "partitions": {name: {"granules": list(p.granules), "size": p.size} for name, p in held.items()},
    }
