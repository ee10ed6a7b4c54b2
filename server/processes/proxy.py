"""What a front does not answer itself: it asks the process that holds the device, over the channel."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple

import orjson
from fastapi import APIRouter, Depends, Request, Response

from ..api.dependencies import IsAdmin, IsChanger, TheService, TheTenant
from ..api.framework import while_there
from ..api.metadata import body_of, document
from ..api.model_control import config_of, in_turn
from ..http import asgi
from ..http.exchange import Call, Headers, Reply
from ..protocol.json_document import parameters

router = APIRouter()

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""Every one: which are allowed where is for the other process to say."""


class Forwarded(NamedTuple):
    """A whole request; its body is what is left of it when it was checked."""

    method: str
    raw_path: bytes
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None


Ask = Callable[[Forwarded], Awaitable[Reply]]


def ask(request: Request) -> Ask:
    """How this application asks."""
    found: Ask = request.app.state.ask
    return found


TheAsk = Annotated[Ask, Depends(ask)]


@router.api_route("/admin/{_:path}", methods=_METHODS, dependencies=[IsAdmin])
@router.get("/metrics", dependencies=[IsAdmin])
async def forward(ask: TheAsk, request: Request) -> Response:
    return await while_there(request, _forwarded(ask, request, await body_of(request)))


@router.post("/v2/repository/models/{name}/load", dependencies=[IsChanger])
async def load(tenant: TheTenant, service: TheService, ask: TheAsk, request: Request, name: str) -> Response:
    with tenant.changes.place():
        config = await config_of(request, tenant.config, name, service.config.models.options)
        body = b"" if config is None else orjson.dumps({"parameters": {"config": config}})
        return await in_turn(tenant, request, lambda: _forwarded(ask, request, body))


@router.post("/v2/repository/models/{_}/unload", dependencies=[IsChanger])
async def unload(tenant: TheTenant, ask: TheAsk, request: Request) -> Response:
    with tenant.changes.place():
        parameters(await document(request))
        return await in_turn(tenant, request, lambda: _forwarded(ask, request, b""))


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
