"""`POST /v2/models/NAME[/versions/V]/infer`, from headers and body to an answer: a bare ASGI application, or less than that.

What it is called by is `Infer.__call__` under any ASGI server, and `server.front` where there is nothing in between.
"""

import logging
import time
import uuid
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import orjson

from . import compression
from .body import Body
from .catalog import Served
from .departures import Departures, Receive
from .errors import (
    BadRequest,
    ClientGone,
    DeadlineExceeded,
    Failed,
    NotFound,
    QueueFull,
    TooLarge,
    Unavailable,
    WrongMethod,
    answer,
    status_of,
)
from .protocol.request import InferRequest
from .protocol.response import InferResponse, encode
from .runtime import Runtime
from .slots import Slot
from .tenancy import Tenant
from .ticket import Done

log = logging.getLogger("greenlane.infer")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]

_UNTIMED = b"queue;dur=0, execute;dur=0"


class Call(NamedTuple):
    """A request as its headers tell it, by lower-case name, and how to get the body, which may still be on its way.

    `body` raises ClientGone if it never comes whole, TooLarge once it is over the limit it is given. `receive` tells when the
    client goes away, as ASGI's does; None where whoever calls cancels the call instead.
    """

    method: str
    raw_path: bytes
    headers: Headers
    body: Callable[[int], Awaitable[bytes]]
    receive: Receive | None


class Reply(NamedTuple):
    """A whole answer; `fields` lack only Content-Length."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes


class Infer:
    """Serves inference requests of every tenant. `runtime` gives the runtime once there is one."""

    def __init__(self, runtime: Callable[[], Runtime]) -> None:
        self._runtime = runtime
        self._departures = Departures()

    def __repr__(self) -> str:
        return f"<Infer {self._departures!r}>"

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request as an ASGI application."""
        headers: Headers = dict(scope["headers"])
        body = Body(headers, receive)
        reply = await self.answer(Call(scope["method"], scope["raw_path"], headers, body.read, receive))
        if reply:
            await _send(reply, body, send)

    async def answer(self, call: Call) -> Reply | None:
        """Answer one request, whatever it is; None if its client is gone."""
        tenant = "-"
        try:
            name, version = _target(call)
            runtime = self._runtime()
            who = runtime.tenancy.identify(_text(call.headers, b"authorization"), _text(call.headers, b"x-tenant"))
            tenant = who.name
            return await self._serve(runtime, who, name, version, call)
        except ClientGone:
            return None
        except Exception as error:
            return _refusal(error, tenant)

    async def _serve(self, runtime: Runtime, tenant: Tenant, name: str, version: str | None, call: Call) -> Reply:
        arrived = time.monotonic_ns()
        served = tenant.catalog.find(name, version)
        try:
            tenant.lane.check()  # Before the body: a flood is turned away at the cost of its headers.
            body = await _unpacked(call, runtime.config.server.max_body)
            served = tenant.catalog.find(name, version)  # Again: it may have been reloaded while the body came in.
            response, timing = await self._infer(runtime, tenant, served, call, body)
        except (Exception, CancelledError) as error:
            served.statistics.failed(time.monotonic_ns() - arrived, _reason(error))
            raise
        return await _reply(response, timing, call.headers)

    async def _infer(
        self, runtime: Runtime, tenant: Tenant, served: Served, call: Call, body: bytes
    ) -> tuple[InferResponse, bytes]:
        arrived = time.monotonic_ns()
        slot = tenant.lane.admit()
        try:
            request = served.plans.decode(body, _header_length(call.headers), served.signature, slot, runtime.limits)
            decoded = time.monotonic_ns()
            done = await self._wait(tenant, served, slot, request, call.receive)
            response = encode(served.name, served.version, request, served.signature, slot, done.outputs)
        finally:
            tenant.lane.release(slot)
        encoded, rows = time.monotonic_ns(), served.signature.rows(request.shapes)
        served.statistics.succeeded(arrived, decoded, done, encoded, rows, int(time.time() * 1000))
        queued, executed = (done.began - decoded) / 1e6, (done.ended - done.began) / 1e6
        return response, b"queue;dur=%.3f, execute;dur=%.3f" % (queued, executed)

    async def _wait(self, tenant: Tenant, served: Served, slot: Slot, request: InferRequest, receive: Receive | None) -> Done:
        future = tenant.lane.submit(slot, served.key, request.shapes, request.priority, request.timeout)
        if receive is None:
            return await future
        self._departures.note(future, receive)
        try:
            return await future
        finally:
            self._departures.forget(future)


def is_infer(path: str) -> bool:
    """Whether this path is for `Infer` to answer."""
    return path.endswith("/infer") and path.startswith("/v2/models/") and path != "/v2/models/infer"


def _target(call: Call) -> tuple[str, str | None]:
    """The model's name and version. Raises NotFound, or WrongMethod."""
    parts = call.raw_path.split(b"/")  # "", v2, models, NAME[, versions, V], infer
    versioned = len(parts) == 7 and parts[4] == b"versions" and parts[5].isdigit()
    if not versioned and len(parts) != 5:
        raise NotFound(f"there is nothing at {unquote(call.raw_path.decode('latin-1'))}")
    if call.method != "POST":
        raise WrongMethod(call.method, "POST")
    name = parts[3].decode("latin-1")
    return unquote(name) if "%" in name else name, parts[5].decode() if versioned else None


def _text(headers: Headers, name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


def _header_length(headers: Headers) -> int | None:
    value = headers.get(b"inference-header-content-length")
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise BadRequest(f"Inference-Header-Content-Length: {value.decode('latin-1')[:40]!r}; expected the bytes of JSON")
    return int(value)


async def _unpacked(call: Call, limit: int) -> bytes:
    """The whole body, unpacked. Raises TooLarge as soon as that is known, ClientGone if the rest never comes."""
    if (declared := int(call.headers.get(b"content-length", 0))) > limit:
        raise TooLarge(f"a body of {declared} bytes; the limit is {limit}")
    body = await call.body(limit)
    if (encoding := call.headers.get(b"content-encoding")) is not None:
        body = await compression.unpack(body, encoding.decode("latin-1").lower(), limit)
    return body


async def _reply(response: InferResponse, timing: bytes, headers: Headers) -> Reply:
    body, length = response
    kind = b"application/json" if length is None else b"application/octet-stream"
    fields = [(b"content-type", kind), (b"server-timing", timing)]
    if length is not None:
        fields.append((b"inference-header-content-length", b"%d" % length))
    accepted = headers.get(b"accept-encoding")
    if accepted and len(body) >= compression.WORTHWHILE and (encoding := compression.choose(accepted.decode("latin-1"))):
        body = await compression.pack(body, encoding)
        fields += [(b"content-encoding", encoding.encode()), (b"vary", b"accept-encoding")]
    return Reply(200, fields, body)


async def _send(reply: Reply, body: Body, send: Send) -> None:
    fields = [*reply.fields, (b"content-length", b"%d" % len(reply.body))]
    if unwanted := body.unwanted:
        fields.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": reply.status, "headers": fields})
    await send({"type": "http.response.body", "body": reply.body, "more_body": unwanted})
    if unwanted:
        await body.discard()
        await send({"type": "http.response.body", "body": b""})


def _refusal(error: Exception, tenant: str) -> Reply:
    request_id = uuid.uuid4().hex
    told = answer(error, request_id)
    if told.status == 500:
        unexpected = error if not isinstance(error, Failed) else None
        log.error("%s", error, exc_info=unexpected, extra={"tenant": tenant, "request_id": request_id})
    fields = [(b"content-type", b"application/json"), (b"server-timing", _UNTIMED)]
    fields += [(name.encode(), value.encode()) for name, value in told.headers.items()]
    return Reply(told.status, fields, orjson.dumps({"error": told.text}))


def _reason(error: BaseException) -> str:
    """Triton's reason for a failure, as in its metric nv_inference_request_failure."""
    if isinstance(error, QueueFull | DeadlineExceeded | Unavailable):
        return "REJECTED"
    if isinstance(error, ClientGone | CancelledError):
        return "CANCELED"
    return "BACKEND" if status_of(error) == 500 else "OTHER"
