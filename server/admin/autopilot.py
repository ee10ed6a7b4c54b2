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
from ..protocol.json_document import show
from . import schemas
from .dependencies import ControllerDep, ObserversDep, admin_router

router = admin_router("Autopilot")


@router.get("/moves", response_model=schemas.Moves)
async def moves(controller: ControllerDep) -> Response:
    """The last 256 moves of granules, the newest first: who wanted them, why, and how long they took."""
    return json_response(schemas.Moves(list(controller.moves)))


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


def _state(controller: Controller, pilot: Pilot) -> schemas.Autopilot:
    tenants = {}
    for name, tenant in controller.tenants.items():
        held, need = controller.partition(name), pilot.needs.get(name)
        piloted = tenant.target_p99 is not None or tenant.min_granules is not None
        tenants[name] = schemas.Piloted(
            len(held.granules) if held else 0,
            pilot.own(name),
            tenant.min_granules or 1 if piloted else None,
            None if tenant.target_p99 is None else milliseconds(tenant.target_p99),
            shown_need(need) if need else None,
        )
    return schemas.Autopilot(pilot.mode, round(pilot.paused_for, 1), pilot.notes, tenants)


def shown_need(need: Need) -> schemas.Measured:
    """What was measured, in milliseconds."""
    p99 = None if need.p99 is None else milliseconds(need.p99)
    return schemas.Measured(
        round(need.seconds, 1), need.requests, round(need.busy, 3), milliseconds(need.queue), p99, need.turned_away
    )
