"""FastAPI dependencies of the process that decides: its controller."""

from typing import Annotated

from fastapi import Depends, Request

from ..control.controller import Controller


def controller(request: Request) -> Controller:
    """The controller behind this application. Raises Unavailable while the server starts."""
    found: Controller = request.app.state.controller()
    return found


ControllerDep = Annotated[Controller, Depends(controller)]
