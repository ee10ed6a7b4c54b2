"""What routes of the process that owns the device depend on: its runtime."""

from typing import Annotated

from fastapi import Depends, Request

from ..device.runtime import Runtime


def runtime(request: Request) -> Runtime:
    """The runtime behind this application. Raises Unavailable before there is one."""
    found: Runtime = request.app.state.runtime()
    return found


TheRuntime = Annotated[Runtime, Depends(runtime)]
