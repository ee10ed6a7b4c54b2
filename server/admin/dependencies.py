"""What all routes of the administration share: the controller behind them, what watches it, and how their routers are made."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from ..api.dependencies import RequireAdmin
from ..api.openapi import errors, operation_id
from ..control.controller import Controller
from ..errors import BadRequest
from ..observing.observers import Observers
from ..protocol.json_document import show


async def controller(request: Request) -> Controller:
    """The controller behind this application. Raises Unavailable while the server starts."""
    found: Controller = request.app.state.controller()
    return found


async def observers(request: Request) -> Observers:
    """What watches the server. Raises Unavailable while it starts."""
    found: Observers = request.app.state.observers()
    return found


async def known_parameters(request: Request) -> None:
    """Raises BadRequest for a parameter of the query that would be ignored, as the route lacks it, or that is there twice."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            expected = f"{' or '.join(known)}, or none" if known else "none"
            raise BadRequest(f"{show(name)}: there is no such parameter; expected {expected}")
        if len(request.query_params.getlist(name)) > 1:
            raise BadRequest(f"{show(name)}: given twice; expected it once")


ControllerDep = Annotated[Controller, Depends(controller)]
ObserversDep = Annotated[Observers, Depends(observers)]


def admin_router(tag: str = "Administration") -> APIRouter:
    """A router of paths below /admin, which only an administrator may use; `tag` is their heading in the documentation."""
    return APIRouter(
        prefix="/admin",
        tags=[tag],
        dependencies=[RequireAdmin, Depends(known_parameters)],
        responses=errors(400, 401, 503),
        generate_unique_id_function=operation_id,
    )
