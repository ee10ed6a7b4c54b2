"""Administration of the autopilot: what was moved and why, what tenants need, and switching it."""

from fastapi import Request, Response

from ..api.body import read_object
from ..api.dependencies import ServiceDep
from ..api.framework import json_response
from ..api.openapi import errors, request_body
from ..control.controller import Controller
from ..errors import BadRequest
from ..facts import milliseconds
from ..observing.need import Need
from ..observing.pilot import MODES, Mode, Pilot
from ..protocol.json_document import Object, show
from . import schemas
from .dependencies import ControllerDep, ObserversDep, admin_router

router = admin_router("Autopilot")


@router.get("/moves", response_model=schemas.Moves)
async def moves(controller: ControllerDep) -> Response:
    """The last 256 moves of granules, the newest first: who wanted them, why, and how long they took."""
    return json_response({"moves": list(controller.moves)})


@router.get("/autopilot", response_model=schemas.Autopilot)
async def autopilot(controller: ControllerDep, observers: ObserversDep) -> Response:
    """Whether it is on, what each tenant needed in the last window, and why tenants that miss their targets get nothing."""
    return json_response(_state(controller, observers.pilot))


@router.put(
    "/autopilot",
    response_model=schemas.Autopilot,
    responses=errors(413),
    openapi_extra=request_body(schemas.AutopilotMode, {"mode": "dry-run"}, required=True),
)
async def switch(service: ServiceDep, controller: ControllerDep, observers: ObserversDep, request: Request) -> Response:
    """Switch it until the server ends. It measures for some seconds before it moves anything."""
    given = await read_object(request, service.uploads)
    mode: Mode | None = next((each for each in MODES if given == {"mode": each}), None)
    if mode is None:
        expected = " or ".join(f'{{"mode": "{each}"}}' for each in MODES)
        raise BadRequest(f"the request body is {show(given)}; expected {expected}")
    observers.pilot.set_mode(mode)
    return json_response(_state(controller, observers.pilot))


def _state(controller: Controller, pilot: Pilot) -> Object:
    return {
        "mode": pilot.mode,
        "paused_for_seconds": round(pilot.paused_for, 1),
        "notes": pilot.notes,
        "tenants": {
            name: {
                "granules": len(held.granules) if (held := controller.partition(name)) else 0,
                "own_granules": pilot.own(name),
                "min_granules": tenant.min_granules or 1 if piloted else None,
                "target_ms": None if tenant.target_p99 is None else milliseconds(tenant.target_p99),
                "measured": shown_need(need) if (need := pilot.needs.get(name)) else None,
            }
            for name, tenant in controller.tenants.items()
            for piloted in [not tenant.spread and (tenant.target_p99 is not None or tenant.min_granules is not None)]
        },
    }


def shown_need(need: Need) -> Object:
    """As `schemas.Measured`."""
    return {
        "seconds": round(need.seconds, 1),
        "requests": need.requests,
        "busy": round(need.busy, 3),
        "queue_ms": milliseconds(need.queue),
        "p99_ms": None if need.p99 is None else milliseconds(need.p99),
        "turned_away": need.turned_away,
    }
