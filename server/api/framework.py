"""A FastAPI application from routers, with the server's own errors. Calls that change something are audited.

Inference requests do not come here.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from msgspec.json import encode
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Lifespan

from engines import EngineError
from partitions import PartitionError

from ..errors import BadRequest, NotFound, RequestError, WrongMethod, answer
from ..http import asgi
from ..http.asgi import Application
from ..http.exchange import Call, Message, Receive, Send
from ..http.paths import in_v2, nothing_at
from ..tenants import audit
from ..tenants.model_changes import is_change
from . import text_messages
from .schemas import Error

log = logging.getLogger("greenlane")

ERRORS = (RequestError, EngineError, PartitionError, HTTPException, RequestValidationError, Exception)
"""What an application answers in our own words."""
_CLIENT_CLOSED_REQUEST = 499
"""As in the logs of many servers: the client is gone, and the answer goes nowhere."""


def build(routers: Sequence[APIRouter], lifespan: Lifespan[FastAPI] | None = None, **state: Any) -> FastAPI:
    """An application of these routers. `state` becomes attributes of `request.app.state`; see `dependencies`.

    FastAPI's own pages are off; `openapi` describes the routes instead.
    """
    web = FastAPI(title="Greenlane", lifespan=lifespan, redirect_slashes=False, docs_url=None, redoc_url=None, openapi_url=None)
    for name, value in state.items():
        setattr(web.state, name, value)
    web.state.routers = routers
    for router in routers:
        web.include_router(router)
    for kind in ERRORS:
        web.add_exception_handler(kind, _on_error)
    return web


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """This content, which may have facts in it, as JSON.

    Routes return a Response, which FastAPI neither validates nor copies: their response models only document. Tests compare
    every answer with its model (tests/end_to_end/test_openapi.py).
    """
    return Response(encode(content), status, headers, "application/json")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Do this work and return its response, but cancel it when the client disconnects; what still comes of its body is lost."""
    working, disconnecting = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        working.cancel()
        disconnecting.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _on_error(request: Request, error: Exception) -> Response:  # A plain function is called on another thread.
    audit.refused(error, request.method, request.url.path, request.client, request.headers.get("authorization"))
    request_id = uuid.uuid4().hex
    found = answer(_translate(request, error), request_id)
    if found.status == 500:
        log.error("%s %s: %s", request.method, request.url.path, error, extra={"request_id": request_id})
    content: Any = Error(found.text)
    if _is_openai(request.scope["path"]):
        content = text_messages.error(found.status, found.text, routed=not isinstance(error, HTTPException))
    return json_response(content, found.status, dict(found.headers))


def _is_openai(path: str) -> bool:
    """Whether clients expect errors of this path as OpenAI has them."""
    return (path.startswith("/v1/") and not in_v2(path)) or path.endswith("/rerank")


def _translate(request: Request, error: Exception) -> Exception:
    """The framework's errors as ours; others as they are."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return BadRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    if isinstance(error, HTTPException) and (path := in_v2(request.scope["path"])):
        return NotFound(f"this is KServe's protocol v1, which the server does not speak; use v2: POST {path}")
    if isinstance(error, HTTPException) and error.status_code == 405:
        return WrongMethod(request.method, _allowed(request))
    if isinstance(error, HTTPException):
        return nothing_at(request.url.path)
    return error


def _allowed(request: Request) -> str:
    """The methods of a path. Several routes may share it, and the framework names only the methods of the first."""
    found = [route for router in request.app.state.routers for route in router.routes]
    routes = [route for route in found if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes if isinstance(route, Route) for method in route.methods or ()}))


async def ask(
    application: asgi.Application, method: str, path: str, headers: Mapping[str, str], body: bytes, client: tuple[str, int]
) -> tuple[int, bytes]:
    """The status and body of the answer. `path` is percent-encoded, names of headers are in lower case."""

    async def read(limit: int, grow: Callable[[int], None] | None = None, where: str = "") -> bytes:
        return body

    fields = {name.encode(): value.encode("latin-1", "replace") for name, value in headers.items()}
    fields |= {b"content-length": b"%d" % len(body), b"content-encoding": b"identity"}
    reply = await asgi.respond(application, Call(method, path.encode(), b"", fields, read, None, client))
    return reply.status, reply.body


_READS = ("GET", "HEAD", "OPTIONS")


def audited(application: Application) -> Application:
    """The application with a line for each call below /admin, and each load and unload; not for calls that only read.

    One that is refused for lack of a key has a line where it is refused.
    """

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _READS or not _is_watched(scope["path"]):
            await application(scope, receive, send)
            return

        async def send_and_record(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] != 401:
                given = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
                audit.call(scope, given, message["status"])
            await send(message)

        await application(scope, receive, send_and_record)

    return answer


def _is_watched(path: str) -> bool:
    return path.startswith("/admin/") or is_change(path)
