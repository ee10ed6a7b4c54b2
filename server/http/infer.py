"""`POST /v2/models/NAME[/versions/V]/infer`, from headers and body to an answer: a bare ASGI application, or less than that.

What it is called by is `Infer.__call__` under any ASGI server, and `server.http.connection` where there is nothing in between.
"""

import asyncio
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from ..errors import Ambiguous, ClientGone, NotFound, WrongMethod
from ..tenants.service import Service
from . import compression, strict
from .body import Body, told
from .disconnects import Departures, Receive
from .exchange import Call, Headers, Reply
from .inference import CLOSE, Inference, Outcome, Success, Target, refusal, success

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Infer:
    """Serves inference requests of every tenant that is served here. `service` gives the service once there is one."""

    def __init__(self, service: Callable[[], Service]) -> None:
        self._service = service
        self._departures = Departures()

    def __repr__(self) -> str:
        return f"<Infer {self._departures!r}>"

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request as an ASGI application."""
        try:
            headers = strict.headers(scope["headers"])
        except Ambiguous as error:
            await _send(refusal(error, None), Body(dict(scope["headers"]), receive), send)
            return
        body = Body(headers, receive)
        query, client = scope["query_string"], scope.get("client")
        call = Call(scope["method"], scope["raw_path"], query, headers, body.read, receive, client)
        reply = await self.answer(call)
        if reply:
            await _send(reply, body, send)

    def find(self, method: str, raw_path: bytes, headers: Headers) -> Target:
        """Whose model a request with these headers is for. Raises what is wrong with them."""
        name, version = _named(method, raw_path)
        service = self._service()
        tenant = service.tenant(_text(headers, b"authorization"), _text(headers, b"x-tenant"))
        return Target(tenant, name, version, service.limits, service.config.server.max_body)

    async def answer(self, call: Call) -> Reply | None:
        """Answer one request, whatever it is; None if its client is gone."""
        target = None
        try:
            target = self.find(call.method, call.raw_path, call.headers)
            inference = Inference(target)
            inference.expect(told(call.headers.get(b"content-length")))
            outcome = await self._infer(inference, call, target)
            return await _packed(outcome, call.headers)
        except ClientGone:
            return None
        except Exception as error:
            return refusal(error, target)

    async def _infer(self, inference: Inference, call: Call, target: Target) -> "Success":
        try:
            body = await _unpacked(call, target)
        except (Exception, CancelledError) as error:
            inference.count(error)
            raise
        future: asyncio.Future[Success] = asyncio.get_running_loop().create_future()
        inference.begin(body, call.headers, partial(_resolve, future))
        del body  # It is in the tenant's slot by now.
        if call.receive is not None:
            self._departures.note(future, call.receive)
        try:
            return await future
        except (ClientGone, CancelledError) as error:
            inference.cancel(error)
            raise
        finally:
            if call.receive is not None:
                self._departures.forget(future)
            del future  # Its error knows this frame, and the two would be left to the garbage collector.


def _resolve(future: "asyncio.Future[Success]", outcome: Outcome) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def is_infer(path: str) -> bool:
    """Whether this path is for `Infer` to answer."""
    return path.endswith("/infer") and path.startswith("/v2/models/") and path != "/v2/models/infer"


def _named(method: str, raw_path: bytes) -> tuple[str, str | None]:
    """The model's name and version. Raises NotFound, or WrongMethod."""
    parts = raw_path.split(b"/")  # "", v2, models, NAME[, versions, V], infer
    versioned = len(parts) == 7 and parts[4] == b"versions" and parts[5].isdigit()
    if not versioned and len(parts) != 5:
        raise NotFound(f"there is nothing at {unquote(raw_path.decode('latin-1'))}")
    if method != "POST":
        raise WrongMethod(method, "POST")
    name = parts[3].decode("latin-1")
    return unquote(name) if "%" in name else name, parts[5].decode() if versioned else None


def _text(headers: Headers, name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


async def _unpacked(call: Call, target: Target) -> bytes:
    """The whole body, unpacked. Raises TooLarge, QueueFull, TooSlow or Unavailable as soon as that is known, ClientGone."""
    with target.tenant.uploads.expect(told(call.headers.get(b"content-length")), call.received) as upload:
        body = await call.body(target.max_body, upload.grow)
        upload.whole()
        if (encoding := call.headers.get(b"content-encoding")) is not None:
            body = await compression.unpack(body, encoding.decode("latin-1").lower(), target.max_body, upload.swell)
        return body


async def _packed(outcome: Success, headers: Headers) -> Reply:
    """The same, packed if its client takes that and it is worth it."""
    reply, accepted = success(outcome), headers.get(b"accept-encoding")
    worth = accepted and len(reply.body) >= compression.WORTHWHILE
    if accepted and worth and (encoding := compression.choose(accepted.decode("latin-1"))):
        body = await compression.pack(reply.body, encoding)
        fields = [*reply.fields, (b"content-encoding", encoding.encode()), (b"vary", b"accept-encoding")]
        return Reply(200, fields, body)
    return reply


async def _send(reply: Reply, body: Body, send: Send) -> None:
    fields = [*reply.fields, (b"content-length", b"%d" % len(reply.body))]
    last = CLOSE in fields
    if body.unwanted and not last:
        fields.append(CLOSE)
    lingers = body.unwanted or (last and not body.whole)
    await send({"type": "http.response.start", "status": reply.status, "headers": fields})
    await send({"type": "http.response.body", "body": reply.body, "more_body": lingers})
    if lingers:
        await body.discard()
        await send({"type": "http.response.body", "body": b""})
