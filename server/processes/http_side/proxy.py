"""Requests that an HTTP process forwards to the supervisor: administration, metrics, and loading of models."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response

from ...api.body import read_body
from ...api.dependencies import RequireAdmin, ServiceDep
from ...api.framework import cancel_on_disconnect
from ...http import asgi
from ...http.exchange import Call
from ..channels.http_protocols import ForwardedAnswer, ForwardedRequest

router = APIRouter(include_in_schema=False)

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""All of them: the supervisor decides which are allowed for a path."""


Forward = Callable[[ForwardedRequest], Awaitable[ForwardedAnswer]]
"""Sends a request to the supervisor and returns its answer. Raises Unavailable if that process is gone."""


async def _forwarding(request: Request) -> Forward:
    found: Forward = request.app.state.forward
    return found


ForwardDep = Annotated[Forward, Depends(_forwarding)]


async def _open_turn(request: Request) -> asyncio.Lock:
    found: asyncio.Lock = request.app.state.open_turn
    return found


@router.get("/v2/logging")
async def settings(forward: ForwardDep, turn: Annotated[asyncio.Lock, Depends(_open_turn)], request: Request) -> Response:
    """Anybody may ask. So one is forwarded at a time: the supervisor answers so many at once, and others of this process are
    administrators'. Its body is not read, as the memory for bodies is theirs, too.
    """

    async def forwarded() -> Response:
        async with turn:
            return await _forwarded(forward, request, b"")

    return await cancel_on_disconnect(request, forwarded())


@router.api_route("/admin/{_:path}", methods=_METHODS, dependencies=[RequireAdmin])
@router.get("/metrics", dependencies=[RequireAdmin])
@router.post("/v2/logging", dependencies=[RequireAdmin])
async def administer(service: ServiceDep, forward: ForwardDep, request: Request) -> Response:
    body = await read_body(request, service.uploads)
    return await cancel_on_disconnect(request, _forwarded(forward, request, body))


class RemoteModelControl:
    """Forwards loads and unloads to the supervisor, which answers them; see `server.api.model_control`."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    async def load(self, request: Request, tenant: str, name: str, config: str | None) -> Response:
        body = b"" if config is None else orjson.dumps({"parameters": {"config": config}})
        return await _forwarded(self._forward, request, body)

    async def unload(self, request: Request, tenant: str, name: str) -> Response:
        return await _forwarded(self._forward, request, b"")


async def _forwarded(forward: Forward, request: Request, body: bytes) -> Response:
    scope = request.scope
    headers = {**dict(scope["headers"]), b"content-length": b"%d" % len(body), b"content-encoding": b"identity"}
    reply = await forward(
        ForwardedRequest(scope["method"], scope["raw_path"], scope["query_string"], headers, body, scope["client"])
    )
    response = Response(reply.body, reply.status)
    response.raw_headers = [*reply.fields, (b"content-length", b"%d" % len(reply.body))]
    return response


async def answer(application: asgi.Application, request: ForwardedRequest) -> ForwardedAnswer:
    """The answer of the supervisor's application to a forwarded request."""

    async def body(limit: int, grow: Callable[[int], None] | None = None, where: str = "") -> bytes:
        return request.body

    call = Call(request.method, request.raw_path, request.query, request.headers, body, None, request.client)
    reply: Any = await asgi.respond(application, call)
    return ForwardedAnswer(reply.status, reply.fields, reply.body)
