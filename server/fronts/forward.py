"""What a front does not answer itself: it asks the process that holds the device, over the channel."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Request, Response

from .. import asgi
from ..call import Call, Headers, Reply
from ..caller import IsAdmin, tenant
from ..routes import body_of

router = APIRouter()

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""Every one: which are allowed where is for the other process to say."""


class Forwarded(NamedTuple):
    """A whole request, to be sent as it is."""

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
@router.post("/v2/repository/models/{_}/load", dependencies=[Depends(tenant)])
@router.post("/v2/repository/models/{_}/unload", dependencies=[Depends(tenant)])
async def forward(ask: TheAsk, request: Request) -> Response:
    scope, body = request.scope, await body_of(request)
    headers = dict(scope["headers"])
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
