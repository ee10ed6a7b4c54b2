"""FastAPI dependencies of the process that owns the device: its runtime."""

from typing import Annotated

from fastapi import Depends, Request

from ..device.runtime import Runtime


def runtime(request: Request) -> Runtime:
    """The runtime behind this application. Raises Unavailable while the server starts."""
    found: Runtime = request.app.state.runtime()
    return found


RuntimeDep = Annotated[Runtime, Depends(runtime)]
