"""An HTTP/1.1 connection, which answers plain inferences without ASGI, each in one write, and calls the application for others.

ASGI costs more per request than a small inference. No request leaves its connection other than it was: the next one may be of
any kind, and of any tenant. What is not HTTP is passed to uvicorn's protocol, which refuses it and ends the connection; the
answers are the same there.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import httptools
import orjson
from uvicorn.config import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.server import ServerState

from ..errors import ClientGone, RequestError, TooSlow, Unavailable
from ..inference.inference import DAMAGED
from ..protocol.arriving_body import ArrivingBody
from ..tenants import audit
from ..tenants.model_changes import is_change
from ..tenants.unread import UnreadAnswers
from ..tenants.uploads import Uploads
from . import asgi
from .body import MAX_DISCARDED, ChunkedBody, Linger, LongLines, close_when_sent
from .connection_limits import Activity, Connections, connections
from .exchange import Reply
from .head import Head, could_be_direct
from .infer import Calls, Infer
from .inference import CLOSE, HttpInference, Outcome, refusal
from .paths import is_text
from .reply_writer import ReplyWriter
from .slot_reader import SlotReader
from .strict import HEADER_TIMEOUT, HEADER_TIMEOUT_TEXT, LONG_HEADERS, MAX_HEADER_BYTES, NOT_HTTP, Violation
from .uvicorn_protocol import UNREAD, JsonHttpToolsProtocol

MAX_READ_AHEAD = 64 * 1024
"""Bytes read beyond the request being answered, before reading pauses."""
RETRY_SECONDS = 0.005
"""Until a connection is handed over for which there was no room."""
REQUESTS_PER_TURN = 16
"""Pipelined requests of one connection answered per event-loop iteration, if none of them has to wait."""

# The phases of a connection. They are integers because mypyc compares those without a call.
READING_HEAD: Final = 0  # No request is being served; the buffer may hold the beginning of one.
DISCARDING: Final = 1  # No request is being served; the rest of a refused request's body is being dropped.
READING_BODY: Final = 2  # A head was read; its body is incomplete.
ANSWERING: Final = 3  # The body is complete; the reply is being made.
_JSON = (b"content-type", b"application/json")
_PHASES = ("reading a head", "discarding", "reading a body", "answering")

HandOff = Callable[[Head, asyncio.BaseTransport, bytes | bytearray], bool | None]


class HttpConnection(asyncio.Protocol):
    """One connection. Belongs to the event loop; `config` and the arguments after it are those of uvicorn's protocols.

    `infer` answers inferences, `application` everything else. `hand_off(head, transport, unread)` is called before a request is
    answered, unless its target is known from an earlier one with the same head. It returns True if it moved the connection to
    another process; the socket is not used after that. It returns None if it would, but cannot yet: because of answers that are
    not sent, or for want of room. If uvicorn has wrapped the application so that a proxy's headers name the client, requests
    with such headers go through the application.
    """

    def __init__(
        self,
        infer: Infer,
        application: asgi.Application,
        hand_off: HandOff | None,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._infer = infer
        self._calls = Calls(infer, application, server_state.tasks)
        self._hand_off = hand_off
        self._trusts_proxies = isinstance(application, ProxyHeadersMiddleware)
        self._connections: Connections = connections(server_state)  # Not uvicorn's set, which compiled code would insist on.
        infer.connections = self._connections
        state = {**app_state, UNREAD: infer.unread}
        self._make_fallback = partial(JsonHttpToolsProtocol, config, server_state, state, _loop)
        self._keep_alive = config.timeout_keep_alive
        self._loop = _loop or asyncio.get_event_loop()
        self._transport: Any = None
        self._writer = ReplyWriter(server_state)
        self._reader: SlotReader | None = None
        self._buffer = bytearray()
        self._phase = READING_HEAD
        self._head: Head | None = None  # Of the current request, or else of the last one.
        self._body_start = 0
        self._discard_bytes = 0
        self._on_body: Callable[[bytes], None] | None = None
        self._deliver: Callable[[bytes, bool], int] | None = None  # Of a body that is passed on in pieces.
        self._chunks: ChunkedBody | None = None
        self._body_left = 0  # Bytes of such a body that have not arrived, if it comes not in chunks.
        self._awaits_continue = False  # The client waits for 100 Continue before it sends that body.
        self._held = False  # Reading pauses until that body is wanted.
        self._in_parts = False  # The answer is being written in parts.
        self._drained: asyncio.Future[None] | None = None  # Done when the client has taken what is written.
        self._inference: HttpInference | None = None
        self._task: asyncio.Task[None] | None = None
        self._uploads: Uploads | None = None
        self._unread: UnreadAnswers | None = None
        self._in_loop = False  # Of `_answer_next`, which is not entered twice.
        self._yielding = False  # Other connections have their turn.
        self._writable = True
        self._closing = False  # No further request is answered.
        self._active = True  # Something arrived since `_close_if_idle` looked last.
        self._surplus = False  # It was one more than its tenant may have.
        self._eof = False  # The client half-closed, and still gets its answers.
        self._header_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._refusal_timer: asyncio.TimerHandle | None = None  # A 401 waits for its turn; nothing is read meanwhile.

    def __repr__(self) -> str:
        return f"<HttpConnection {_PHASES[self._phase]}, {len(self._buffer)} bytes buffered>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._writer.open(transport)
        self._connections.add(self)
        self._surplus = self._connections.surplus
        self._idle_timer = self._loop.call_later(self._keep_alive, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._closing = True
        self._cancel_timers()
        self._end_upload()
        self._forget_unread()
        if self._inference:
            self._inference.cancel(ClientGone("the client closed its connection"))
        elif self._task:
            self._task.cancel()
        # Large, or in cycles with this object: freed now rather than by the garbage collector.
        self._buffer, self._on_body, self._task, self._reader = bytearray(), None, None, None
        self._end_pieces()

    def data_received(self, data: bytes) -> None:
        self._active = True
        last = self._head
        if last and self._phase == READING_HEAD and not self._buffer and last.is_head_of(data) and self._repeat(last, data):
            return
        if self._phase == DISCARDING:
            dropped = min(len(data), self._discard_bytes)
            self._discard_bytes -= dropped
            data = data[dropped:]
            if not self._discard_bytes:
                self._phase = READING_HEAD
        self._buffer += data
        if self._phase == READING_HEAD and not self._yielding:
            self._answer_next()
        elif self._phase == READING_BODY:
            if self._deliver is not None:
                self._deliver_piece()
            else:
                self._deliver_body()
                self._place_tensors()
        elif len(self._buffer) > MAX_READ_AHEAD:
            self._transport.pause_reading()

    def body_received(self, body: ArrivingBody) -> None:
        """The current body is complete, its tensors in their slot."""
        self._active, self._phase, self._on_body = True, ANSWERING, None
        self._end_upload()
        if self._inference and self._head:
            self._inference.begin_received(body, self._head.headers, self._on_done)

    def leave_slot(self, received: bytearray) -> None:
        """A complete request needs the slot: the body, of which this has been received, goes on arriving in the buffer."""
        self._buffer, self._body_start = received, 0
        if self._inference:
            self._inference.return_slot()

    def eof_received(self) -> bool:
        """Whether to keep a half-closed connection: for pipelined requests, or for a cheap answer that is being made.

        Otherwise it counts as a disconnect: no inference and no change of models is made for a client that may be gone.
        """
        head = self._head
        path = head.path.decode("latin-1") if head is not None else ""
        cheap = head is not None and not (head.is_infer or is_change(path) or is_text(path))
        self._eof = self._yielding or (self._task is not None and self._phase == ANSWERING and cheap)
        return self._eof

    def pause_writing(self) -> None:
        self._writable = False
        self._unread = self._infer.unread(self._head.headers if self._head else {})
        if self._unread:
            self._unread.add(self)

    def resume_writing(self) -> None:
        self._writable = True
        self._forget_unread()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._transport.is_closing():
            close_when_sent(self._transport)
        elif self._refusal_timer is None:
            self._transport.resume_reading()
            self._answer_next()

    def unread(self) -> int:
        """Bytes of answers that the socket has not taken."""
        unread: int = self._transport.get_write_buffer_size()
        return unread

    def activity(self) -> Activity:
        """What this connection is doing; see `server.http.connection_limits`."""
        if self._refusal_timer is not None:
            return Activity.RECEIVING
        if self._phase == ANSWERING:
            return Activity.ANSWERING
        receiving = self._phase != READING_HEAD or self._buffer or self._head is None
        return Activity.RECEIVING if receiving else Activity.IDLE

    def forget_head(self) -> None:
        """The configuration has changed: identify whose the next request is, also if it has the same head."""
        if self._head is not None:
            self._head.forget()

    def abort(self) -> None:
        """Close this process's socket at once, without sending anything."""
        self._closing = True
        self._transport.abort()

    def shutdown(self) -> None:
        """Close once the current request is answered, without the rest of its body; uvicorn calls this when it stops."""
        self._closing = True
        if self._buffer or self._phase == DISCARDING:
            if self._phase in (READING_HEAD, DISCARDING):
                self._close()
        elif self._phase == READING_HEAD:
            close_when_sent(self._transport)
        self.refuse(Unavailable("the server is stopping"))

    def received(self) -> int:
        """How many bytes of the current request's body have arrived."""
        body = self._reader.body if self._reader is not None else None
        return body.received if body is not None else len(self._buffer) - self._body_start

    def refuse(self, error: RequestError) -> None:
        """Answer with this error if the current request's body is incomplete; otherwise do nothing."""
        if self._phase != READING_BODY or self._head is None or self._in_parts:
            return
        self._end_upload()
        if self._inference:
            self._inference.cancel(error)
        elif self._task:
            self._task.cancel()
        self._finish(self._head, refusal(error, self._head.target))

    def _answer_next(self) -> None:
        """Answer buffered requests, until one has to wait, or `REQUESTS_PER_TURN` are answered."""
        if self._in_loop or self._yielding:
            return
        self._in_loop, left = True, REQUESTS_PER_TURN
        try:
            while left and self._buffer and self._may_begin() and self._begin():
                left -= 1
        finally:
            self._in_loop = False
        if not left and self._buffer and self._may_begin():
            self._yielding = True
            self._loop.call_soon(self._resume)
        if self._phase == READING_HEAD and len(self._buffer) > MAX_READ_AHEAD:
            self._transport.pause_reading()
        if self._eof and self._phase in (READING_HEAD, DISCARDING) and not self._yielding and not self._closing:
            close_when_sent(self._transport)  # Nothing more can come.

    def _resume(self) -> None:
        """Answer more buffered requests, after the other connections had their turn."""
        self._yielding = False
        if self._may_begin():
            self._active = True
            self._transport.resume_reading()
            self._answer_next()

    def _may_begin(self) -> bool:
        return self._phase == READING_HEAD and self._writable and not self._closing and not self._transport.is_closing()

    def _repeat(self, head: Head, data: bytes) -> bool:
        """Answer a single complete request with the same head as the last one; False if it has to go the usual way."""
        if not (head.is_plain_infer and self._may_begin()):
            return False
        if self._hand_off and head.target is None and (moved := self._hand_off(head, self._transport, data)) is not False:
            if moved:
                self.abort()
            return bool(moved)
        self._phase = ANSWERING
        if inference := self._admit(head):
            inference.begin(data[len(head.data) :], head.headers, self._on_done, None, True)
        return True

    def _begin(self) -> bool:
        """Begin the first request in the buffer; False if its headers are incomplete, or the connection was handed over.

        Empty lines before a request are ignored, as some clients send one after a body (RFC 9112, 2.2).
        """
        if self._buffer[0] in b"\r\n":
            del self._buffer[: len(self._buffer) - len(self._buffer.lstrip(b"\r\n"))]
            if not self._buffer:
                return False
        end = self._buffer.find(b"\r\n\r\n") + 4
        if end < 4:
            # With longer headers it goes to uvicorn, which refuses it.
            if len(self._buffer) > MAX_HEADER_BYTES or not could_be_direct(self._buffer):
                self._fall_back()
            elif self._header_timer is None:
                self._header_timer = self._loop.call_later(HEADER_TIMEOUT, self._on_header_timeout)
            return False
        self._cancel_header_timer()
        data, head = bytes(self._buffer[:end]), self._head
        if head is None or head.data != data:  # Most connections repeat the same head.
            head = self._head = Head(data)
        if self._hand_off and head.is_routable and head.target is None:
            moved = self._hand_off(head, self._transport, self._buffer)
            if moved is not False:
                if moved:
                    self.abort()
                else:
                    self._wait_to_hand_off()
                return False
        if self._surplus and self._refuse_surplus(head):
            return False
        if not head.is_direct:
            self._fall_back()
            return False
        self._body_start, self._phase = end, READING_BODY
        self._closing = self._closing or not head.keeps
        if not head.is_plain_infer or (self._trusts_proxies and head.is_forwarded):
            self._begin_call(head)
            return True
        if inference := self._admit(head):
            self._on_body = partial(inference.begin, headers=head.headers, on_done=self._on_done)
            if head.tensors_at >= 0:
                self._reader = self._reader or SlotReader(self, self._transport)
                self._reader.expect(head)
        if self._phase == READING_BODY:
            self._deliver_body()
        if self._phase == READING_BODY and self._inference and head.target:
            try:
                head.target.tenant.uploads.add(self, head.length)
                self._uploads = head.target.tenant.uploads
                self._place_tensors()
            except RequestError as error:
                self.refuse(error)
        return True

    def _begin_call(self, head: Head) -> None:
        """Have a coroutine answer a request, and read its body in pieces."""
        through_application = self._trusts_proxies and head.is_forwarded
        if through_application:
            head.is_plain_infer = False
        self._task, self._deliver = self._calls.start(head, self._transport, self, through_application)
        self._body_left, self._awaits_continue = head.length, head.expects_continue
        if head.is_chunked:
            self._chunks = ChunkedBody()
        self._deliver_piece()

    def _deliver_piece(self) -> None:
        """Pass on what has arrived of a body that is read in pieces, and pause reading while too much of it waits."""
        data = bytes(memoryview(self._buffer)[self._body_start :])
        used, chunks = min(self._body_left, len(data)), self._chunks
        try:
            if chunks is not None:
                used = chunks.feed(data)
        except httptools.HttpParserError:
            self._end_request(NOT_HTTP)
            return
        except LongLines:
            self._end_request(LONG_HEADERS)
            return
        del self._buffer[: self._body_start + used]
        self._body_start = 0
        if chunks is not None:
            piece, complete = chunks.take(), chunks.complete
        else:
            self._body_left -= used
            piece, complete = data[:used], not self._body_left
        deliver = self._deliver
        if deliver is None or not (piece or complete):
            return
        waiting = deliver(piece, complete)
        if complete:
            self._phase, self._deliver, self._chunks = ANSWERING, None, None
            self._read_on()
        elif waiting > MAX_READ_AHEAD:
            self._held = True
            self._transport.pause_reading()

    def want_body(self) -> None:
        """The body of the current request is wanted: read on, and have a client that waits for that send it."""
        if self._awaits_continue and not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._awaits_continue = False
        self._read_on()

    def _read_on(self) -> None:
        """Read the rest of a body, if reading pauses until it is wanted."""
        if self._held:
            self._held = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def begin_parts(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """Write the head of an answer whose body comes in parts."""
        head = self._head
        if head is not None and not self._transport.is_closing():
            unknown = head.is_http_1_0 and all(name != b"content-length" for name, _ in fields)
            self._closing = self._closing or CLOSE in fields or unknown or self._is_last()
            self._in_parts = True
            self._writer.begin_parts(status, fields, self._closing, head.is_http_1_0)

    async def write_part(self, data: bytes, last: bool) -> None:
        """Write a part of it, once the client has taken those before."""
        if not self._writable:
            self._drained = self._loop.create_future()
            await self._drained
        if not self._transport.is_closing():
            self._writer.write_part(data, last)

    def end_parts(self, head: Head) -> None:
        """Finish the current request, whose answer was written in parts."""
        if not self._transport.is_closing():
            self._finish(head, None)

    def _place_tensors(self) -> None:
        """Have the tensors of an incomplete body received straight into a slot, if there is one, once the JSON has arrived."""
        head, reader = self._head, self._reader
        if self._phase == READING_BODY and reader is not None and reader.active and head and self._inference:
            if head.tensors_at < 0:
                reader.stop()
            elif reader.place(head, self._buffer, self._body_start, self._inference):
                self._buffer = bytearray()

    def _admit(self, head: Head) -> HttpInference | None:
        """Start an inference; None if it was refused, and answered so."""
        try:
            if head.target is None:
                head.target = self._infer.resolve(head.method, head.path, head.headers, head.tenant, head.query)
            inference = HttpInference(head.target, head.length)
            if not head.fits:
                inference.expect(head.length, head.headers)
                head.fits = True
        except Exception as error:
            client, path = self._transport.get_extra_info("peername"), head.path.decode("latin-1")
            audit.refused(error, head.method, path, client, head.headers.get(b"authorization"))
            self.answer(head, refusal(error, head.target))
            return None
        self._inference = inference
        return inference

    def _forget_unread(self) -> None:
        if self._unread:
            self._unread.discard(self)
            self._unread = None

    def _end_upload(self) -> None:
        if self._uploads:
            self._uploads.discard(self)
            self._uploads = None

    def _deliver_body(self) -> None:
        """Pass the body on if it is complete."""
        end = self._body_start + (self._head.length if self._head else 0)
        if len(self._buffer) >= end and self._on_body:
            body = bytes(memoryview(self._buffer)[self._body_start : end])
            del self._buffer[:end]
            on_body, self._on_body, self._phase = self._on_body, None, ANSWERING
            self._end_upload()
            on_body(body)

    def _on_done(self, outcome: Outcome) -> None:
        head, inference = self._head, self._inference
        if head is None or inference is None:
            return
        if isinstance(outcome, Exception):
            self._finish(head, refusal(outcome, head.target))
            return
        self._inference, self._phase = None, READING_HEAD
        if not self._transport.is_closing():
            self._closing = self._closing or self._is_last()
            self._writer.write_success(outcome, self._closing, head.is_http_1_0)
            if self._buffer:
                inference.return_slot()  # The next request may need it, before this one's owner returns it.
            self._go_on()

    def answer(self, head: Head, reply: Reply) -> None:
        """Finish the current request with this reply; a 401 waits for its turn, where those are paced."""
        refusals = self._infer.refusals if reply.status == 401 else None
        wait = refusals.wait() if refusals is not None else 0.0
        if wait and not self._transport.is_closing():
            self._task = None
            self._transport.pause_reading()
            self._refusal_timer = self._loop.call_later(wait, self._finish, head, reply)
        else:
            self._finish(head, reply)

    def _finish(self, head: Head, reply: Reply | None) -> None:
        """Write the reply to the current request, unless it was written in parts, and go on to the next one."""
        waited, self._refusal_timer = self._refusal_timer, None
        body_incomplete = self._phase == READING_BODY
        unread = self._body_left if self._deliver is not None else head.length - self.received()
        self._phase, self._inference, self._task, self._on_body = READING_HEAD, None, None, None
        if self._reader is not None:
            self._reader.body = None
        if self._transport.is_closing():
            self._end_pieces()
            return
        if waited is not None:
            waited.cancel()
            self._transport.resume_reading()
        if body_incomplete:
            self._skip_body(head, unread)
        self._end_pieces()
        if reply is not None:
            self._closing = self._closing or CLOSE in reply.fields or self._is_last()
            self._writer.write(reply, self._closing, head.is_http_1_0, head.method == "HEAD")
        self._go_on()

    def _end_pieces(self) -> None:
        """Nothing more of a body is passed on in pieces."""
        if self._chunks is not None:
            self._chunks.close()
        self._deliver, self._chunks, self._drained, self._in_parts = None, None, None, False

    def _is_last(self) -> bool:
        """Whether the reply ends this connection, since the server drains and no other request has arrived."""
        return not self._buffer and self._infer.ending

    def _go_on(self) -> None:
        """A reply was written: go on to the next request, or close."""
        if self._closing:
            self._close()
        elif self._buffer or self._eof:
            self._transport.resume_reading()
            self._answer_next()

    def _skip_body(self, head: Head, unread: int) -> None:
        """Drop the body of a request that was refused before it was complete; close afterwards if the rest is large.

        Or if it is unknown whether, or for how long, the client goes on to send it.
        """
        if self._deliver is None:
            del self._buffer[: self._body_start + head.length]  # In place: thousands of requests are not copied for each.
        self._discard_bytes = max(0, unread)
        if self._discard_bytes:
            self._phase = DISCARDING
        self._read_on()
        self._closing = self._closing or head.is_chunked or head.expects_continue or self._discard_bytes > MAX_DISCARDED

    def _close(self) -> None:
        """Close after the last answer, so that the client can read it, whatever it still sends."""
        self._cancel_timers()
        self._connections.discard(self)
        self._forget_unread()
        self._reader = None  # Which refers to this object.
        Linger(self._transport, self._connections).begin()

    def _fall_back(self) -> None:
        """Pass what is not HTTP to uvicorn, which refuses it and closes the connection."""
        if self._surplus and self._refuse_surplus(None):
            return
        self._connections.discard(self)
        self._cancel_timers()
        fallback, data, self._buffer = self._make_fallback(), bytes(self._buffer), bytearray()
        self._closing, self._reader = True, None
        fallback.connection_made(self._transport)
        self._transport.set_protocol(fallback)
        fallback.data_received(data)

    def _end_request(self, violation: Violation) -> None:
        """Refuse a request whose body is not HTTP, and close."""
        task, head = self._task, self._head
        if task is not None:
            task.cancel(DAMAGED)
        if head is not None and head.is_infer:
            self._infer.count_invalid(head)
        if head is not None and not self._in_parts:
            self._closing = True
            self._finish(head, Reply(int(violation.status[:3]), [_JSON], orjson.dumps({"error": violation.text})))
        else:
            self.abort()

    def _wait_to_hand_off(self) -> None:
        """Hand this connection over a little later: once all answers are sent, or in a moment, when there is room."""
        if self._transport.get_write_buffer_size():
            self._transport.set_write_buffer_limits(0)  # `resume_writing` is called once they are.
        else:
            self._yielding = True
            self._loop.call_later(RETRY_SECONDS, self._resume)

    def _refuse_surplus(self, head: Head | None) -> bool:
        """Answer the first request of a connection that is one more than its tenant may have, and close; False if it is not."""
        self._surplus = self._connections.surplus
        if self._surplus:
            self._closing = True
            self._writer.write(
                refusal(self._connections.refuse(), None), True, False, head is not None and head.method == "HEAD"
            )
            self._close()
        return self._surplus

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self._buffer and self._may_begin():
            self._closing = True
            self._writer.write(refusal(TooSlow(HEADER_TIMEOUT_TEXT), None), True, False)
            self._close()

    def _cancel_header_timer(self) -> None:
        if self._header_timer:
            self._header_timer.cancel()
            self._header_timer = None

    def _cancel_timers(self) -> None:
        """They would keep this object, which is done with, until they fire: for `server.keep_alive`."""
        self._cancel_header_timer()
        if self._idle_timer:
            self._idle_timer.cancel()
        if self._refusal_timer:
            self._refusal_timer.cancel()

    def _close_if_idle(self) -> None:
        if self._phase in (READING_HEAD, DISCARDING) and not self._active and not self._closing:
            if self._writable:
                close_when_sent(self._transport)
            else:
                self._transport.close()  # Most of an answer is unread; `UnreadAnswers` says how long that may take.
        elif not self._closing:
            self._active = False
            self._idle_timer = self._loop.call_later(self._keep_alive, self._close_if_idle)


def forget_heads(open_connections: "Connections | None") -> None:
    """Have the next request on each of these identified, as keys may have changed."""
    for each in list(open_connections or ()):
        if isinstance(each, HttpConnection):
            each.forget_head()
