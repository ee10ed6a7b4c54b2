"""What all routes of the administration share: the controller behind them, and how their routers are made."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from ..api.dependencies import RequireAdmin
from ..api.openapi import errors, operation_id
from ..control.controller import Controller


async def controller(request: Request) -> Controller:
    """The controller behind this application. Raises Unavailable while the server starts."""
    found: Controller = request.app.state.controller()
    return found


ControllerDep = Annotated[Controller, Depends(controller)]


def admin_router(tag: str = "Administration") -> APIRouter:
    """A router of paths below /admin, which only an administrator may use; `tag` is their heading in the documentation."""
    return APIRouter(
        prefix="/admin",
        tags=[tag],
        dependencies=[RequireAdmin],
        responses=errors(400, 401, 503),
        generate_unique_id_function=operation_id,
    )
