"""`POST /v2/models/NAME[/versions/V]/infer` as a bare ASGI application: from bytes to a ticket without the framework."""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

import orjson

from . import compression
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


class Infer:
    """Serves inference requests of every tenant. `runtime` gives the runtime once there is one."""

    def __init__(self, runtime: Callable[[], Runtime]) -> None:
        self._runtime = runtime
        self._departures = Departures()

    def __repr__(self) -> str:
        return f"<Infer {self._departures!r}>"

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request, whatever it is."""
        tenant = "-"
        try:
            headers: Headers = dict(scope["headers"])
            name, version = _target(scope)
            runtime = self._runtime()
            who = runtime.tenancy.identify(_text(headers, b"authorization"), _text(headers, b"x-tenant"))
            tenant = who.name
            await self._serve(runtime, who, name, version, headers, receive, send)
        except ClientGone:
            pass
        except Exception as error:
            await _refuse(error, tenant, send)

    async def _serve(
        self, runtime: Runtime, tenant: Tenant, name: str, version: str | None, headers: Headers, receive: Receive, send: Send
    ) -> None:
        arrived = time.monotonic_ns()
        served = tenant.catalog.find(name, version)
        try:
            tenant.lane.check()  # Before the body: a flood is turned away at the cost of its headers.
            body = await _body(headers, receive, runtime.config.server.max_body)
            served = tenant.catalog.find(name, version)  # Again: it may have been reloaded while the body came in.
            response, timing = await self._infer(runtime, tenant, served, headers, body, receive)
        except Exception as error:
            served.statistics.failed(time.monotonic_ns() - arrived, _reason(error))
            raise
        await _respond(response, timing, headers, send)

    async def _infer(
        self, runtime: Runtime, tenant: Tenant, served: Served, headers: Headers, body: bytes, receive: Receive
    ) -> tuple[InferResponse, bytes]:
        arrived = time.monotonic_ns()
        slot = tenant.lane.admit()
        try:
            request = served.plans.decode(body, _header_length(headers), served.signature, slot, runtime.limits)
            decoded = time.monotonic_ns()
            done = await self._wait(tenant, served, slot, request, receive)
            response = encode(served.name, served.version, request, served.signature, slot, done.outputs)
        finally:
            tenant.lane.release(slot)
        encoded, rows = time.monotonic_ns(), served.signature.rows(request.shapes)
        served.statistics.succeeded(arrived, decoded, done, encoded, rows, int(time.time() * 1000))
        queued, executed = (done.began - decoded) / 1e6, (done.ended - done.began) / 1e6
        return response, b"queue;dur=%.3f, execute;dur=%.3f" % (queued, executed)

    async def _wait(self, tenant: Tenant, served: Served, slot: Slot, request: InferRequest, receive: Receive) -> Done:
        future = tenant.lane.submit(slot, served.key, request.shapes, request.priority, request.timeout)
        self._departures.note(future, receive)
        try:
            return await future
        finally:
            self._departures.forget(future)


def is_infer(path: str) -> bool:
    """Whether this path is for `Infer` to answer."""
    return path.endswith("/infer") and path.startswith("/v2/models/") and path != "/v2/models/infer"


def _target(scope: MutableMapping[str, Any]) -> tuple[str, str | None]:
    """The model's name and version. Raises NotFound, or WrongMethod."""
    parts = scope["raw_path"].split(b"/")  # "", v2, models, NAME[, versions, V], infer
    versioned = len(parts) == 7 and parts[4] == b"versions" and parts[5].isdigit()
    if not versioned and len(parts) != 5:
        raise NotFound(f"there is nothing at {scope['path']}")
    if scope["method"] != "POST":
        raise WrongMethod(scope["method"], "POST")
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


async def _body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The whole body, unpacked. Raises TooLarge as soon as that is known, ClientGone if the rest never comes."""
    if int(headers.get(b"content-length", 0)) > limit:
        raise TooLarge(f"a body of {int(headers[b'content-length'])} bytes; the limit is {limit}")
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        body = await _rest(body, receive, limit)
    elif message["type"] == "http.disconnect":
        raise ClientGone("the client closed its connection before the body was whole")
    if (encoding := headers.get(b"content-encoding")) is not None:
        body = await compression.unpack(body, encoding.decode("latin-1").lower(), limit)
    return body


async def _rest(first: bytes, receive: Receive, limit: int) -> bytes:
    body = bytearray(first)
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed its connection before the body was whole")
        body += message.get("body", b"")
        if len(body) > limit:
            raise TooLarge(f"a body of more than {limit} bytes, which is the limit")
        more = message.get("more_body", False)
    return bytes(body)


async def _respond(response: InferResponse, timing: bytes, headers: Headers, send: Send) -> None:
    body, length = response
    kind = b"application/json" if length is None else b"application/octet-stream"
    fields = [(b"content-type", kind), (b"server-timing", timing)]
    if length is not None:
        fields.append((b"inference-header-content-length", b"%d" % length))
    accepted = headers.get(b"accept-encoding")
    if accepted and len(body) >= compression.WORTHWHILE and (encoding := compression.choose(accepted.decode("latin-1"))):
        body = await compression.pack(body, encoding)
        fields += [(b"content-encoding", encoding.encode()), (b"vary", b"accept-encoding")]
    fields.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def _refuse(error: Exception, tenant: str, send: Send) -> None:
    request_id = uuid.uuid4().hex
    told = answer(error, request_id)
    if told.status == 500:
        unexpected = error if not isinstance(error, Failed) else None
        log.error("%s", error, exc_info=unexpected, extra={"tenant": tenant, "request_id": request_id})
    body = orjson.dumps({"error": told.text})
    fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"server-timing", _UNTIMED)]
    fields += [(name.encode(), value.encode()) for name, value in told.headers.items()]
    await send({"type": "http.response.start", "status": told.status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


def _reason(error: Exception) -> str:
    """Triton's reason for a failure, as in its metric nv_inference_request_failure."""
    if isinstance(error, QueueFull | DeadlineExceeded | Unavailable):
        return "REJECTED"
    if isinstance(error, ClientGone):
        return "CANCELED"
    return "BACKEND" if status_of(error) == 500 else "OTHER"
