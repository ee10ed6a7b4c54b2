"""What all routes of the administration share: the controller behind them, what watches it, and how their routers are made."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from ..api.dependencies import RequireAdmin
from ..api.openapi import errors, operation_id
from ..control.controller import Controller
from ..observing.observers import Observers


async def controller(request: Request) -> Controller:
    """The controller behind this application. Raises Unavailable while the server starts."""
    found: Controller = request.app.state.controller()
    return found


async def observers(request: Request) -> Observers:
    """What watches the server. Raises Unavailable while it starts."""
    found: Observers = request.app.state.observers()
    return found


ControllerDep = Annotated[Controller, Depends(controller)]
ObserversDep = Annotated[Observers, Depends(observers)]


def admin_router(tag: str = "Administration") -> APIRouter:
    """A router of paths below /admin, which only an administrator may use; `tag` is their heading in the documentation."""
    return APIRouter(
        prefix="/admin",
        tags=[tag],
        dependencies=[RequireAdmin],
        responses=errors(400, 401, 503),
        generate_unique_id_function=operation_id,
    )
