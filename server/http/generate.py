"""`POST /v2/models/NAME[/versions/V]/generate` and `generate_stream`: Triton's generate extension, on ASGI.

`generate_stream` answers with a Server-Sent Event for each part, `generate` with one JSON object. The next part of an answer is
asked for when the client has taken the one before: so a slow client slows its own answer only, and one that has gone stops it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from ..errors import BadRequest, ClientGone
from ..inference.in_parts import InferenceInParts
from ..link.messages import Done
from ..protocol.generate import check, decode, encode, event, most
from ..protocol.request import InferRequest
from ..tenants import audit
from .body import content_length
from .compression import encoding_of
from .exchange import Call, Headers, Receive, Reply, Send
from .inference import Target, refusal

_FIELDS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # Otherwise nginx collects events before it passes them on.
]
_GONE = "the client closed its connection"
_SINGLE = "generate expects a model to answer in exactly one part, and this answer has {}; use generate_stream"


class Generation:
    """One request, from its head to the end of its answer. Belongs to the event loop, and there to one task.

    The constructor raises as that of `Inference`. `receive` is ASGI's, `length` what is announced of the body.
    """

    def __init__(self, target: Target, receive: Receive, length: int = 0) -> None:
        self._target = target
        self._receive = receive
        self._inference = InferenceInParts(target.tenant, target.name, target.version, length)
        self._request: InferRequest | None = None
        self._coming: asyncio.Future[Done] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._has_given = self._ended = False

    def expect(self, length: int, headers: Headers) -> None:
        """Check what the headers say of the body. Raises TooLarge, UnsupportedEncoding."""
        encoding_of(headers.get(b"content-encoding"))
        check(length, self._target.limits)

    def begin(self, body: bytes, traceparent: bytes | None = None) -> None:
        """Decode the complete body and submit the request. Raises what it is refused with."""
        inference = self._inference
        if (sampler := self._target.tenant.tracing.sampler) is not None:
            inference.trace = sampler.start(traceparent, inference.arrived)
        inference.arrived = time.monotonic_ns()
        try:
            slot = inference.take_slot()
            served = inference.served
            reserve = served.request_cache.output_reserve
            request = self._request = decode(body, served.signature, slot, self._target.limits, reserve)
            self._coming = asyncio.get_running_loop().create_future()
            inference.submit(request.shapes, request.priority, request.timeout, self._on_end)
        except Exception as error:
            self._ended = True
            raise inference.fail(error) from error
        self._listening = asyncio.ensure_future(self._listen())

    async def next_part(self) -> bytes | None:
        """The next part of the answer as JSON, None at its end. Raises the error that it ends with, such as ClientGone."""
        if self._error:
            raise self._error
        if self._ended:
            return None
        if self._has_given:
            self._coming = asyncio.get_running_loop().create_future()
            self._inference.proceed()
        assert self._coming
        done = await self._coming
        if self._error:  # It came after the part, whose memory is not the request's any more.
            raise self._error
        part = self._encode(done) if done.outputs else None
        self._has_given = True
        if part is None or not self._inference.in_parts:
            self._ended = True
            self._inference.succeed(done)
        return part

    async def only_part(self) -> bytes:
        """The only part of an answer. Raises BadRequest if it has none or more, or else as `next_part`."""
        part = await self.next_part()
        if part is None:
            raise BadRequest(_SINGLE.format("none"))
        if await self.next_part() is not None:
            raise BadRequest(_SINGLE.format("more"))
        return part

    def close(self, error: BaseException) -> None:
        """Stop what has not ended, for this reason."""
        if not self._ended:
            self._ended = True
            self._inference.cancel(error)
        if self._listening:
            self._listening.cancel()
            self._listening = None

    def _encode(self, done: Done) -> bytes:
        inference, served = self._inference, self._inference.served
        assert self._request
        slot, nonfinite = inference.slot_of(done), self._target.limits.nonfinite
        part = encode(served.name, served.version, self._request, served.signature, slot, done.outputs, nonfinite)
        inference.encoded(done)
        return part

    def _on_end(self, end: Done | Exception) -> None:
        """A part has come, or the end. An error may also come between two parts: it is already counted."""
        if isinstance(end, Exception):
            self._ended = True
            self._fail(end)
        elif self._coming and not self._coming.done():
            self._coming.set_result(end)

    def _fail(self, error: Exception) -> None:
        if self._coming and not self._coming.done():
            self._coming.set_exception(error)
        else:
            self._error = error

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._fail(ClientGone(_GONE))


async def respond(
    call: Call,
    resolve: Callable[[], Target],
    read_body: Callable[[Call, Target, tuple[int, str]], Awaitable[bytes]],
    receive: Receive,
    send: Send,
    http_version: str = "1.1",
) -> Reply | None:
    """Answer a request: send its events, or return its reply; None if nothing more is to be sent."""
    streams = call.raw_path.endswith(b"/generate_stream")
    target: Target | None = None
    generation: Generation | None = None
    why: BaseException = ClientGone(_GONE)
    try:
        target = resolve()
        if streams and http_version == "1.0":
            raise BadRequest("HTTP/1.0 has no chunks, in which events are sent; use HTTP/1.1, or generate for a single part")
        length = content_length(call.headers.get(b"content-length"))
        generation = Generation(target, receive, length)
        generation.expect(length, call.headers)
        limit, key = most(target.limits)
        body = await read_body(call, target, (limit, f"for generate{key}"))
        generation.begin(body, call.headers.get(b"traceparent"))
        if not streams:
            return Reply(200, [(b"content-type", b"application/json")], await generation.only_part())
        first = await generation.next_part()
        await _send_events(generation, first, target, send)
    except ClientGone as error:
        why = error
    except Exception as error:
        why = error
        audit.refused(error, call.method, call.path, call.client, call.headers.get(b"authorization"))
        return refusal(error, target)
    except asyncio.CancelledError as error:
        why = error
        raise
    finally:
        if generation:
            generation.close(why)
    return None


async def _send_events(generation: Generation, part: bytes | None, target: Target, send: Send) -> None:
    """Send each part as an event when it comes; an error too, which ends the answer. Raises ClientGone."""
    await send({"type": "http.response.start", "status": 200, "headers": _FIELDS})
    last = b""
    try:
        while part is not None:
            await _send_body(event(part), True, target, send)
            part = await generation.next_part()
    except ClientGone:
        raise
    except Exception as error:
        generation.close(error)
        last = event(refusal(error, target).body)
    await _send_body(last, False, target, send)


async def _send_body(data: bytes, more: bool, target: Target, send: Send) -> None:
    """Send a piece of the body once the client has taken those before. Raises ClientGone."""
    try:
        async with asyncio.timeout(target.tenant.unread.seconds or None):
            await send({"type": "http.response.body", "body": data, "more_body": more})
    except TimeoutError:
        text = f"the client has not read its answer for {target.tenant.unread.seconds:g} s"
        raise ClientGone(text) from None  # Its connection, which is in `UnreadAnswers`, is closed there, and counted.
    except OSError as error:  # Some servers raise it once the client has gone.
        raise ClientGone(_GONE) from error
