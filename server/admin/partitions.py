"""Administration: the device, who holds what of it, repartition while serving, and draining."""

import asyncio
import json

from fastapi import APIRouter, BackgroundTasks, Request

from partitions.probe import overlaps

from ..api.dependencies import IsAdmin
from ..api.metadata import document
from ..device.runtime import Runtime
from ..errors import BadRequest, WrongMethod
from ..protocol.json_document import Object
from .dependencies import TheRuntime

router = APIRouter(prefix="/admin", dependencies=[IsAdmin])


@router.get("/device")
async def device(runtime: TheRuntime) -> Object:
    found = runtime.device
    return {
        "kind": found.kind,
        "description": found.describe(),
        "unit": found.unit,
        "granules": [{"index": index, "size": size} for index, size in enumerate(found.granules)],
    }


@router.get("/partitions")
async def partitions(runtime: TheRuntime, probe: bool = False) -> Object:
    if probe:  # As it once was. It runs work, which a link or a picture of a web page could ask for.
        raise WrongMethod("GET with 'probe'", "POST", "/admin/partitions/probe")
    return _plan(runtime)


@router.post("/partitions/probe")
async def probe(runtime: TheRuntime) -> Object:
    plan, placements = _plan(runtime), await runtime.probe()
    for name, units in placements.items():
        plan["partitions"][name]["located"] = sorted(units)
    plan["overlaps"] = [{"tenants": [a, b], "units": sorted(units)} for a, b, units in overlaps(placements)]
    return plan


@router.put("/partitions")
async def repartition(runtime: TheRuntime, request: Request) -> Object:
    counts = await document(request)
    if not counts:
        raise BadRequest(f"the request body names no tenant; expected granules by tenant, such as {_example(runtime)}")
    # Shielded: a change that has begun goes on to its end, though the client that asked for it went away.
    move = await asyncio.shield(asyncio.ensure_future(runtime.repartition(counts)))
    return {**_plan(runtime), "moved": list(move.movers)}


@router.get("/tenants")
async def tenants(runtime: TheRuntime) -> Object:
    return {
        "tenants": [
            {
                "name": tenant.name,
                "queue": tenant.queue,
                "credits": tenant.in_flight,
                "models": [entry.as_json() for entry in report.index],
                **report.lane._asdict(),
                "age_seconds": round(report.age, 3),
            }
            for tenant, report in await runtime.reports()
        ]
    }


@router.post("/drain", status_code=202)
async def drain(runtime: TheRuntime, tasks: BackgroundTasks) -> Object:
    tasks.add_task(runtime.drain, runtime.config.server.drain_grace)
    return {"state": "draining"}


def _example(runtime: Runtime) -> str:
    """A body for the first tenant."""
    return json.dumps({next(iter(runtime.config.tenants)): 2})


def _plan(runtime: Runtime) -> Object:
    held = runtime.manager.held
    statistics = runtime.manager.statistics()
    return {
        "unit": runtime.device.unit,
        "granules": statistics.granules,
        "free": statistics.free,
        "partitions": {name: {"granules": list(p.granules), "size": p.size} for name, p in held.items()},
    }
