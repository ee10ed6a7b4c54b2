"""`POST /v2/models/NAME[/versions/V]/infer`, from head and body to a reply; and the way to `server.http.generate`.

Under any ASGI server `Infer` is an ASGI application of its own, without the framework. `server.http.connection` calls
`Infer.resolve` and `HttpInference` directly, without ASGI.
"""

import asyncio
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ..errors import Ambiguous, ClientGone, RequestError, Unavailable
from ..tenants import audit
from ..tenants.service import Service
from ..tenants.unread import UnreadAnswers
from . import asgi, compression, generate, strict
from .body import Body, content_length
from .connection_limits import Connections, Refusals
from .exchange import MAX_BODY, Call, Headers, Message, Receive, Reply, Send
from .head import Head
from .inference import CLOSE, HttpInference, Outcome, Success, Target, refusal, success
from .paths import is_generate, parse_infer


@dataclass(slots=True)
class Watch:
    """A waiting request, and the task that listens for its disconnect, once started."""

    answer: "asyncio.Future[Any]"
    receive: Receive
    seen: bool = False
    task: "asyncio.Task[None] | None" = None


class DisconnectWatcher:
    """Fails the future of a waiting request with ClientGone when its client disconnects. Belongs to the event loop.

    Listening for a disconnect needs one task per request, which costs more than a short inference. So a waiting request is only
    recorded, and a timer that runs every few milliseconds starts a listener for each request that was already there the last
    time: after it has waited `patience` to twice `patience` seconds.
    """

    def __init__(self, patience: float = 0.01) -> None:
        self._patience = patience
        self._watches: dict[int, Watch] = {}
        self._scheduled = False

    def watch(self, answer: "asyncio.Future[Any]", receive: Receive) -> None:
        """Watch a request that starts to wait for `answer`; its body must have been received."""
        self._watches[id(answer)] = Watch(answer, receive)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(self._patience, self._check)

    def unwatch(self, answer: "asyncio.Future[Any]") -> None:
        """Stop watching: the request no longer waits."""
        watch = self._watches.pop(id(answer))
        if watch.task:
            watch.task.cancel()
            watch.task = None  # Breaks the cycle of task and watch, which only the garbage collector would free.

    def _check(self) -> None:
        for watch in self._watches.values():
            if watch.seen and watch.task is None:
                watch.task = asyncio.ensure_future(_listen(watch))
            watch.seen = True
        self._scheduled = bool(self._watches)
        if self._scheduled:
            asyncio.get_running_loop().call_later(self._patience, self._check)


async def _listen(watch: Watch) -> None:
    while (await watch.receive())["type"] != "http.disconnect":
        pass
    if not watch.answer.done():
        watch.answer.set_exception(ClientGone("the client closed its connection"))


class Infer:
    """Serves the inference requests of all tenants of this process. `service` returns the service, or raises Unavailable."""

    def __init__(self, service: Callable[[], Service]) -> None:
        self._service = service
        self._disconnects = DisconnectWatcher()
        self.connections: Connections | None = None
        """Those whose requests it answers; set by `HttpConnection`, None under a server of another kind."""
        self.refusals: Refusals | None = None
        """The pace of the 401 answers of `HttpConnection`; None where they do not wait, as in tenants' processes."""

    @property
    def ending(self) -> bool:
        """Whether the server drains: each answer is the last of its connection then, so that clients connect to another server
        before this one refuses them.
        """
        try:
            return self._service().state == "draining"
        except Unavailable:
            return False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request as an ASGI application."""
        try:
            headers = strict.headers(scope["headers"])
        except Ambiguous as error:
            await _send(refusal(error, None), Body(dict(scope["headers"]), receive), send, self.ending)
            return
        body = Body(headers, receive)
        query, client = scope["query_string"], scope.get("client")
        call = Call(scope["method"], scope["raw_path"], query, headers, body.read, receive, client)
        if is_generate(scope["path"]):
            resolve = partial(self.resolve, call.method, call.raw_path, headers, query=call.query)
            reply = await generate.respond(call, resolve, _read_body, receive, send, scope["http_version"])
        else:
            reply = await self.answer(call)
        if reply:
            await _send(reply, body, send, self.ending)

    def resolve(
        self, method: str, raw_path: bytes, headers: Headers, identified: str | None = None, query: bytes = b""
    ) -> Target:
        """The tenant and model that a request is for; `identified` is the tenant's name if the headers were checked before.

        Raises NotFound, WrongMethod, Unavailable, Unauthorized, Misdirected.
        """
        name, version = parse_infer(method, raw_path, query)
        service = self._service()
        tenant = service.tenants.get(identified) if identified else None
        if tenant is None:
            tenant = service.tenant(*strict.credentials(headers))
        return Target(tenant, name, version, service.limits, service.config.server.max_body)

    def unread(self, headers: Headers) -> UnreadAnswers | None:
        """Where the unread answers of a connection are limited whose last request has these headers; None while starting."""
        try:
            service = self._service()
        except Unavailable:
            return None
        try:
            return service.tenant(*strict.credentials(headers)).unread
        except RequestError:
            return service.unread

    def count_invalid(self, head: Head) -> None:
        """Count an inference whose body was refused because it is not HTTP, if it shows a tenant."""
        with suppress(RequestError):
            self.resolve(head.method, head.path, head.headers, head.tenant, head.query).tenant.lane.admission.count_invalid()

    async def answer(self, call: Call) -> Reply | None:
        """The reply to one request, errors included; None if its client has disconnected."""
        target = None
        try:
            target = self.resolve(call.method, call.raw_path, call.headers, query=call.query)
            length = content_length(call.headers.get(b"content-length"))
            inference = HttpInference(target, length)
            inference.expect(length, call.headers)
            outcome = await self._infer(inference, call, target)
            return await _compressed(outcome, call.headers)
        except ClientGone:
            return None
        except Exception as error:
            audit.refused(error, call.method, call.path, call.client, call.headers.get(b"authorization"))
            return refusal(error, target)

    async def _infer(self, inference: HttpInference, call: Call, target: Target) -> "Success":
        try:
            body = await _read_body(call, target)
        except (Exception, CancelledError) as error:
            inference.count(error)
            raise
        future: asyncio.Future[Success] = asyncio.get_running_loop().create_future()
        inference.begin(body, call.headers, partial(_resolve, future))
        del body  # Its tensors are in the tenant's slot now.
        if call.receive is not None:
            self._disconnects.watch(future, call.receive)
        try:
            return await future
        except (ClientGone, CancelledError) as error:
            inference.cancel(error)
            raise
        finally:
            if call.receive is not None:
                self._disconnects.unwatch(future)
            del future  # Breaks the cycle of its error and this frame, which only the garbage collector would free.


def _resolve(future: "asyncio.Future[Success]", outcome: Outcome) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        response, timing = outcome
        future.set_result((response.copied(), timing))  # The slot is released now, before the future's owner goes on.


async def _read_body(call: Call, target: Target, most: tuple[int, str] | None = None) -> bytes:
    """The whole body, decompressed. `most` is how many bytes it may have, if fewer, and what ends the text on that limit.

    Raises TooLarge, QueueFull, TooSlow or Unavailable as soon as that is known, ClientGone.
    """
    announced = content_length(call.headers.get(b"content-length"))
    limit, where = min((target.max_body, MAX_BODY), most or (target.max_body, MAX_BODY))
    with target.tenant.uploads.expect(announced) as upload:
        body = await call.body(limit, upload.add_received, where)
        upload.complete()
        if len(body) > announced:  # It came in chunks.
            target.tenant.lane.admission.charge(0, len(body))
        encoding = compression.encoding_of(call.headers.get(b"content-encoding"))
        return await compression.decompress(body, encoding, limit, upload.reserve_more, where)


async def _compressed(outcome: Success, headers: Headers) -> Reply:
    """The reply, compressed if the client accepts that and the body is large enough."""
    reply, accepted = success(outcome), headers.get(b"accept-encoding")
    large = accepted and len(reply.body) >= compression.MIN_COMPRESSED_BYTES
    if accepted and large and (encoding := compression.choose(accepted.decode("latin-1"))):
        body = await compression.compress(reply.body, encoding)
        fields = [*reply.fields, (b"content-encoding", encoding.encode()), (b"vary", b"accept-encoding")]
        return Reply(200, fields, body)
    return reply


async def _send(reply: Reply, body: Body, send: Send, last: bool) -> None:
    """Send a reply over ASGI, the `last` of its connection or not. Lingers if that closes with part of the body unread."""
    fields = [*reply.fields, (b"content-length", b"%d" % len(reply.body))]
    closes = CLOSE in fields
    if (body.must_close or last) and not closes:
        fields.append(CLOSE)
    lingers = body.must_close or (closes and not body.complete)
    await send({"type": "http.response.start", "status": reply.status, "headers": fields})
    await send({"type": "http.response.body", "body": reply.body, "more_body": lingers})
    if lingers:
        await body.discard()
        await send({"type": "http.response.body", "body": b""})


class Client(asgi.Client, Protocol):
    """The connection that a request came by."""

    def answer(self, head: Head, reply: Reply) -> None:
        """Finish the request with this reply."""

    def end_parts(self, head: Head) -> None:
        """Finish the request, whose answer was written in parts."""

    def abort(self) -> None:
        """Close at once."""


class Calls:
    """Answers such requests with `infer` or `application`, each in a task of its own, which `tasks` holds until it ends."""

    def __init__(self, infer: Infer, application: asgi.Application, tasks: "set[asyncio.Task[None]]") -> None:
        self._infer = infer
        self._application = application
        self._tasks = tasks

    def start(
        self, head: Head, transport: Any, client: Client, through_application: bool
    ) -> "tuple[asyncio.Task[None], Callable[[bytes, bool], int]]":
        """Begin to answer; the task, and what to call with each piece of the body: see `asgi.Exchange.deliver`."""
        exchange = asgi.Exchange(client)
        peer = transport.get_extra_info("peername")
        read = Body(head.headers, exchange.receive).read
        call = Call(head.method, head.path, head.query, head.headers, read, None, peer and peer[:2], head.fields)
        task = asyncio.get_running_loop().create_task(self._respond(head, call, exchange, client, through_application))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task, exchange.deliver

    async def _respond(
        self, head: Head, call: Call, exchange: asgi.Exchange, client: Client, through_application: bool
    ) -> None:
        reply: Reply | None
        try:
            if head.is_call and not through_application:
                reply = await self._infer.answer(call)
            else:
                reply = await asgi.respond(self._application, call, exchange, "1.0" if head.is_http_1_0 else "1.1")
        except Exception as error:
            if exchange.in_parts:
                client.abort()
                return
            reply = refusal(error, None)
        if exchange.in_parts:
            client.end_parts(head)
        elif reply:
            client.answer(head, reply)
