"""What is changed of a server while it runs: its configuration, read again, and what it logs.

Of Triton's log settings the switches by severity are one level here, for all processes but the dispatcher.
"""

import logging
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from ..api.body import read_object
from ..api.dependencies import RequireAdmin, ServiceDep
from ..api.framework import json_response
from ..api.openapi import errors, operation_id
from ..control.reload import Reloader
from ..control.together import completed
from ..errors import BadRequest
from ..host import logs
from ..protocol.json_document import Object, show
from . import schemas
from .dependencies import admin_router

log = logging.getLogger("greenlane.admin")

router = admin_router()
log_router = APIRouter(include_in_schema=False, generate_unique_id_function=operation_id)
SetLevel = Callable[[str], None]
"""Sets the level of all processes: debug, info, warning or error."""

_SEVERITIES = ("log_error", "log_warning", "log_info")
"""Triton's switches, the most severe first. A level logs all that are more severe too."""
_VERBOSE = "log_verbose_level"
_LEVELS = ("error", "warning", "info", "debug")


async def set_level(request: Request) -> SetLevel:
    """Who sets the level in this form of the server."""
    found: SetLevel = request.app.state.set_log_level
    return found


@log_router.get("/v2/logging")
async def settings(service: ServiceDep) -> Response:
    """What is logged, in Triton's words."""
    return json_response(_settings(service.config.server.log_format))


@log_router.post("/v2/logging", dependencies=[RequireAdmin])
async def change(service: ServiceDep, request: Request, set_level: Annotated[SetLevel, Depends(set_level)]) -> Response:
    """Change what is logged until the server ends, and return what is logged then. All or nothing."""
    style = service.config.server.log_format
    level = _level(await read_object(request, service.uploads), _settings(style))
    set_level(level)
    log.info("the log's level is %s now", level)
    return json_response(_settings(style))


def _settings(style: str) -> Object:
    level = _LEVELS.index(logs.level())
    return {
        "log_file": "",
        **{name: level >= at for at, name in reversed(list(enumerate(_SEVERITIES)))},
        _VERBOSE: int(level == 3),
        "log_format": "default" if style == "text" else style,
    }


def _level(given: Object, now: Object) -> str:
    """The level that is asked for. Raises BadRequest for what no level means."""
    for name, value in given.items():
        if name not in now:
            raise BadRequest(f"{name}: there is no such log setting; there are {', '.join(now)}")
        expected = "true or false" if name in _SEVERITIES else "a whole number of at least 0"
        if name in _SEVERITIES and type(value) is not bool:
            raise BadRequest(f"{name}: {show(value)}; expected {expected}")
        if name == _VERBOSE and (type(value) is not int or value < 0):
            raise BadRequest(f"{name}: {show(value)}; expected {expected}")
        if name == "log_file" and value != "":
            raise BadRequest(f"log_file: {show(value)}; the log goes to standard error, redirect that")
        if name == "log_format" and value != now["log_format"]:
            raise BadRequest(f"log_format: {show(value)}; set server.log_format, and restart the server")
    if given.get(_VERBOSE):  # It includes the others, unless they are refused.
        now = {**now, **dict.fromkeys(_SEVERITIES, True)}
    wanted = {**now, **given}
    switches = {name: bool(wanted[name]) for name in (*_SEVERITIES, _VERBOSE)}
    on = list(switches.values())
    if not on[0] or on != sorted(on, reverse=True):
        asked = ", ".join(f"{name} {show(wanted[name])}" for name in switches if name != _VERBOSE or wanted[name])
        raise BadRequest(f"{asked}: errors are always logged, and what is more severe than something that is logged is too")
    return _LEVELS[sum(on) - 1]


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
