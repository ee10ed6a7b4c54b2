"""`POST /admin/reload`: reads the configuration's file again, and changes what can be changed while it is served."""

from typing import Annotated

from fastapi import Depends, Request, Response

from ..api.framework import json_response
from ..api.openapi import errors
from ..control.reload import Reloader
from ..control.together import completed
from . import schemas
from .dependencies import admin_router

router = admin_router()


async def _reloader(request: Request) -> Reloader:
    """The reloader behind this application. Raises Unavailable while the server starts."""
    found: Reloader = request.app.state.reloader()
    return found


@router.post("/reload", response_model=schemas.Reloaded, responses=errors(409))
async def reload(reloader: Annotated[Reloader, Depends(_reloader)]) -> Response:
    """Read the configuration's file again: keys, limits, models, tenants and what else may change while it runs; all of it or
    nothing.

    409 with every problem of the file, with every key that needs a restart, with every added model that cannot be loaded, or
    with the arithmetic of shares that do not fit; what was served stays then. Tenants and models that are added are made ready
    before the answer, which takes as long.
    """
    changes = await completed(reloader.reload_on_request())  # As a load is, even if its client disconnects.
    return json_response(schemas.Reloaded([schemas.ChangedKey(each.key, each.old, each.new) for each in changes]))
