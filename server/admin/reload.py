"""`POST /admin/reload`: reads the configuration's file again, and changes what can be changed while it is served."""

from typing import Annotated

from fastapi import Depends, Request, Response

from ..api.framework import json_response
from ..api.openapi import errors
from ..control.reload import Reloader
from . import schemas
from .dependencies import admin_router

router = admin_router()


def _reloader(request: Request) -> Reloader:
    """The reloader behind this application. Raises Unavailable while the server starts."""
    found: Reloader = request.app.state.reloader()
    return found


@router.post("/reload", response_model=schemas.Reloaded, responses=errors(409))
async def reload(reloader: Annotated[Reloader, Depends(_reloader)]) -> Response:
    """Read the configuration's file again: keys, limits and what else may change while the server runs; all of it or nothing.

    409 with every problem of the file, or with every key that needs a restart; what was served stays then.
    """
    changes = await reloader.reload()
    return json_response({"changed": [{"key": each.key, "old": each.old, "new": each.new} for each in changes]})
