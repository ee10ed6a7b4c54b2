"""Requests that an HTTP process forwards, over its channel, to the process that owns the device."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple

import orjson
from fastapi import APIRouter, Depends, Request, Response

from ..api.body import read_body
from ..api.dependencies import RequireAdmin
from ..api.framework import cancel_on_disconnect
from ..http import asgi
from ..http.exchange import Call, Headers, Reply

router = APIRouter(include_in_schema=False)

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""All methods: the other process refuses those that a path does not have."""


class Forwarded(NamedTuple):
    """A whole request; its body is what is left of it when it was checked."""

    method: str
    raw_path: bytes
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None


Ask = Callable[[Forwarded], Awaitable[Reply]]


def _ask(request: Request) -> Ask:
    found: Ask = request.app.state.ask
    return found


AskDep = Annotated[Ask, Depends(_ask)]


@router.api_route("/admin/{_:path}", methods=_METHODS, dependencies=[RequireAdmin])
@router.get("/metrics", dependencies=[RequireAdmin])
async def forward(ask: AskDep, request: Request) -> Response:
    return await cancel_on_disconnect(request, _forwarded(ask, request, await read_body(request)))


class RemoteModelControl:
    """Has the process that owns the device make changes, see `server.api.model_control`. It answers as itself."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def __repr__(self) -> str:
        return "<RemoteModelControl>"

    async def load(self, request: Request, tenant: str, name: str, config: str | None) -> Response:
        body = b"" if config is None else orjson.dumps({"parameters": {"config": config}})
        return await _forwarded(self._ask, request, body)

    async def unload(self, request: Request, tenant: str, name: str) -> Response:
        return await _forwarded(self._ask, request, b"")


async def _forwarded(ask: Ask, request: Request, body: bytes) -> Response:
    scope = request.scope
    headers = {**dict(scope["headers"]), b"content-length": b"%d" % len(body)}
    reply = await ask(Forwarded(scope["method"], scope["raw_path"], scope["query_string"], headers, body, scope["client"]))
    response = Response(reply.body, reply.status)
    response.raw_headers = [*reply.fields, (b"content-length", b"%d" % len(reply.body))]
    return response


async def answer(application: asgi.Application, asked: Forwarded) -> Reply:
    """What the application that holds the device says to a forwarded request."""

    async def body(limit: int, grow: Callable[[int], None] | None = None) -> bytes:
        return asked.body

    call = Call(asked.method, asked.raw_path, asked.query, asked.headers, body, None, asked.client)
    reply: Any = await asgi.respond(application, call)
    return Reply(*reply)
