"""The framework, for everything but inference: routes to an application, and errors to answers."""

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Lifespan

from engines import EngineError
from partitions import PartitionError

from ..errors import BadRequest, NotFound, RequestError, WrongMethod, answer

log = logging.getLogger("greenlane")

_CLIENT_GONE = 499
"""As in the logs of many servers: nobody is there to be told."""


def build(routers: Sequence[APIRouter], lifespan: Lifespan[FastAPI] | None = None, **state: Any) -> FastAPI:
    """An application of these routers, which find `state` as `request.app.state`; its errors are answered as ours."""
    web = FastAPI(title="Greenlane", lifespan=lifespan, redirect_slashes=False, docs_url=None, redoc_url=None, openapi_url=None)
    for name, value in state.items():
        setattr(web.state, name, value)
    web.state.routers = routers
    for router in routers:
        web.include_router(router)
    for kind in (RequestError, EngineError, PartitionError, HTTPException, RequestValidationError, Exception):
        web.add_exception_handler(kind, _on_error)
    return web


async def while_there(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer that comes of some work, which is cancelled when the client goes away; the body has been received."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=_CLIENT_GONE)
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _on_error(request: Request, error: Exception) -> JSONResponse:
    request_id = uuid.uuid4().hex
    told = answer(_translate(request, error), request_id)
    if told.status == 500:
        log.error("%s %s: %s", request.method, request.url.path, error, extra={"request_id": request_id})
    return JSONResponse({"error": told.text}, told.status, dict(told.headers))


def _translate(request: Request, error: Exception) -> Exception:
    """The framework's own errors as ours."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return BadRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    if isinstance(error, HTTPException) and error.status_code == 405:
        return WrongMethod(request.method, _allowed(request))
    if isinstance(error, HTTPException):
        return NotFound(f"there is nothing at {request.url.path}")
    return error


def _allowed(request: Request) -> str:
    """The methods of a path; each may be a route of its own, and the framework names those of the first only."""
    found = [route for router in request.app.state.routers for route in router.routes]
    routes = [route for route in found if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes if isinstance(route, Route) for method in route.methods or ()}))
