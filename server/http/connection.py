"""An HTTP protocol for uvicorn that answers plain requests itself and leaves every other one to uvicorn's own.

ASGI costs a request more than a small inference does. So a connection begins here: as long as its requests are plain ones
(HTTP/1.1, a length that is told, nothing to negotiate) they are parsed by httptools, answered by whoever this is given,
and written at once. At the first other request the connection is handed to uvicorn's protocol for good, with every byte
of that request; the answers there are the same.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from ..errors import ClientGone, RequestError, TooSlow, Unavailable
from ..tenants.model_changes import is_change
from ..tenants.uploads import Uploads
from . import asgi
from .body import SPARED, Linger, hang_up
from .connection_limits import Connections, Standing, connections
from .exchange import STATUS_LINES, Call, Reply
from .head import Head, may_be_plain
from .infer import Infer
from .inference import CLOSE, Inference, Outcome, Target, refusal, success
from .strict import HEADERS_WITHIN, TOO_SLOW
from .uvicorn_protocol import JsonHttpToolsProtocol

MOST_HEADERS = 64 * 1024
"""Bytes of headers beyond which a request is left to uvicorn, which refuses it."""
MOST_AHEAD = 64 * 1024
"""Bytes to read ahead of a request that is being answered."""
AT_ONCE = 16
"""Requests of one connection that are answered in one turn of the event loop, if none has to wait."""

PassOn = Callable[[Head, asyncio.BaseTransport, bytes | bytearray], bool]


class Front(asyncio.Protocol):
    """One connection. Belongs to the event loop; the arguments from `config` on are those that uvicorn gives its protocols.

    Inferences are answered by `infer`, everything else by `application`. `pass_on` is shown every request before it is
    answered, unless it is uvicorn's by then, and what has been read from it on; if it takes the connection it returns True.
    """

    def __init__(
        self,
        infer: Infer,
        application: asgi.Application,
        pass_on: PassOn | None,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._infer = infer
        self._application = application
        self._pass_on = pass_on
        self._server_state = server_state
        self._connections: Connections = connections(server_state)  # Not uvicorn's set, which compiled code would insist on.
        self._make_rest = partial(JsonHttpToolsProtocol, config, server_state, app_state, _loop)
        self._keep_alive = config.timeout_keep_alive
        self._loop = _loop or asyncio.get_event_loop()
        self._transport: Any = None
        self._buffer = bytearray()
        self._head: Head | None = None
        self._last: Head | None = None
        self._start = 0
        self._discard = 0
        self._take: Callable[[bytes], None] | None = None
        self._taken = True
        self._inference: Inference | None = None
        self._uploads: Uploads | None = None
        self._task: asyncio.Task[None] | None = None
        self._fields: list[tuple[bytes, bytes]] = []
        self._prefix = b""
        self._beginning = False
        self._resting = False
        self._writable = True
        self._closing = False
        self._active = True
        self._said_all = False
        self._deadline: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Front {'answering' if self._head else 'idle'}, {len(self._buffer)} bytes ahead>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.add(self)
        self._loop.call_later(self._keep_alive, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._closing = True
        self._expect_no_headers()
        self._expect_no_more()
        if self._inference:
            self._inference.cancel(ClientGone("the client closed its connection"))
        elif self._task:
            self._task.cancel()
        # These know this connection, or are large: they are not left to the garbage collector.
        self._buffer, self._take, self._task = bytearray(), None, None

    def data_received(self, data: bytes) -> None:
        self._active = True
        last = self._last
        if last and self._head is None and not self._buffer and last.is_head_of(data) and self._repeat(last, data):
            return
        if self._discard:
            data = self._drop(data)
        self._buffer += data
        if self._head is None and not self._resting:
            self._go_on()
        elif self._take is not None:
            self._take_body()
        elif len(self._buffer) > MOST_AHEAD:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """A client that says no more has gone, unless it can be told more at once, or waits for an answer that costs little."""
        self._said_all = self._resting or (self._task is not None and self._taken and self._costs_little())
        return self._said_all

    def _costs_little(self) -> bool:
        """Whether what is asked is neither an inference nor a change of the models: these are not made for nobody."""
        head = self._head
        return head is not None and not head.is_infer and not is_change(head.path.decode("latin-1"))

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._transport.resume_reading()
        self._go_on()

    def standing(self) -> Standing:
        """Whether this is answered, waits for more of a request, or for another one; see `server.http.connection_limits`."""
        if self._head is not None and self._taken:
            return Standing.ANSWERED
        unfinished = self._head is not None or self._buffer or self._discard or self._last is None
        return Standing.UNFINISHED if unfinished else Standing.IDLE

    def give_way(self) -> None:
        """Close at once."""
        self._transport.abort()

    def shutdown(self) -> None:
        """Close as soon as the request that is being answered was; uvicorn calls this when it stops."""
        self._closing = True
        if self._head is None:
            hang_up(self._transport)
        self.refuse(Unavailable("the server is stopping"))

    def received(self) -> int:
        """How many bytes of the body that is on its way came so far."""
        return len(self._buffer) - self._start

    def refuse(self, error: RequestError) -> None:
        """Nothing will come of a body that is still on its way: say so."""
        if self._head is None or self._taken:
            return
        self._expect_no_more()
        if self._inference:
            self._inference.cancel(error)
        elif self._task:
            self._task.cancel()
        self._finish(self._head, refusal(error, self._head.target))

    def _go_on(self) -> None:
        """Begin to answer what there is; what is answered at once is followed by the next, up to so many."""
        if self._beginning or self._resting:
            return
        self._beginning, left = True, AT_ONCE
        try:
            while left and self._has_next() and self._begin():
                left -= 1
        finally:
            self._beginning = False
        if not left and self._has_next():
            self._resting = True
            self._loop.call_soon(self._rested)
        if self._head is None and len(self._buffer) > MOST_AHEAD:
            self._transport.pause_reading()
        if self._said_all and self._head is None and not self._resting and not self._closing:
            hang_up(self._transport)

    def _has_next(self) -> bool:
        return bool(self._head is None and self._buffer) and self._may_answer()

    def _rested(self) -> None:
        """Everybody else had a turn."""
        self._resting = False
        if self._may_answer():
            self._active = True
            self._transport.resume_reading()
            self._go_on()

    def _repeat(self, head: Head, data: bytes) -> bool:
        """Answer a request that came alone and whole, with the head of the last one; False if that cannot be done now."""
        if not (head.is_plain_infer and self._may_answer()):
            return False
        if self._pass_on and self._pass_on(head, self._transport, data):
            self._leave()
            return True
        self._head, self._taken = head, True
        if inference := self._admit(head):
            inference.begin(data[len(head.data) :], head.headers, self._heard)
        return True

    def _may_answer(self) -> bool:
        return self._writable and not self._closing and not self._discard and not self._transport.is_closing()

    def _begin(self) -> bool:
        """Begin to answer the next request; False if its headers are not there yet, or the connection is another's now."""
        end = self._buffer.find(b"\r\n\r\n") + 4
        if end < 4:
            if len(self._buffer) > MOST_HEADERS or not may_be_plain(self._buffer):
                self._hand_over()
            elif self._deadline is None:
                self._deadline = self._loop.call_later(HEADERS_WITHIN, self._give_up)
            return False
        self._expect_no_headers()
        head = self._read(bytes(self._buffer[:end]))
        if self._pass_on and head.is_complete and not head.is_ambiguous and self._pass_on(head, self._transport, self._buffer):
            self._leave()
            return False
        if not head.is_ours:
            self._hand_over()
            return False
        self._head, self._start, self._taken = head, end, False
        if head.is_plain_infer:
            self._answer_inference(head)
        else:
            self._answer_call(head)
        self._take_body()
        if self._inference and not self._taken and head.target:
            self._wait_for_body(head.target)
        return True

    def _expect_no_headers(self) -> None:
        """None are on their way."""
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        """The headers of a request did not come in time."""
        self._deadline = None
        if self._head is None and self._buffer and self._may_answer():
            self._closing, self._discard = True, MOST_HEADERS
            self._write(refusal(TooSlow(TOO_SLOW), None), None)
            self._part()

    def _read(self, data: bytes) -> Head:
        """The request line and headers; those that a connection repeats, as most do, are not parsed again."""
        if self._last is None or self._last.data != data:
            self._last = Head(data)
        return self._last

    def _wait_for_body(self, target: Target) -> None:
        """The body of this inference is on its way, if its tenant has memory for it."""
        try:
            target.tenant.uploads.add(self, self._head.length if self._head else 0)
            self._uploads = target.tenant.uploads
        except RequestError as error:
            self.refuse(error)

    def _take_body(self) -> None:
        """Once the body is whole, give it to whoever answers."""
        if self._head is None or self._take is None:
            return
        end = self._start + self._head.length
        if len(self._buffer) >= end:
            body = bytes(memoryview(self._buffer)[self._start : end])
            del self._buffer[:end]
            take, self._take, self._taken = self._take, None, True
            self._expect_no_more()
            take(body)

    def _expect_no_more(self) -> None:
        """No body is on its way any longer."""
        if self._uploads:
            self._uploads.discard(self)
            self._uploads = None

    def _answer_inference(self, head: Head) -> None:
        """Without a task: what waits for the device is a callback."""
        if inference := self._admit(head):
            self._take = partial(inference.begin, headers=head.headers, heard=self._heard)

    def _admit(self, head: Head) -> Inference | None:
        """Begin an inference; None if it was refused."""
        try:
            if head.target is None:
                head.target = self._infer.find(head.method, head.path, head.headers)
            inference = Inference(head.target)
            inference.expect(head.length)
        except Exception as error:
            self._finish(head, refusal(error, head.target))
            return None
        self._inference = inference
        return inference

    def _heard(self, outcome: Outcome) -> None:
        head = self._head
        assert head
        self._finish(head, refusal(outcome, head.target) if isinstance(outcome, Exception) else success(outcome))

    def _answer_call(self, head: Head) -> None:
        """As a call of a coroutine, in a task of its own."""
        body: asyncio.Future[bytes] = self._loop.create_future()

        async def whole(limit: int, grow: Callable[[int], None] | None = None) -> bytes:
            return await body

        client = self._transport.get_extra_info("peername")
        call = Call(head.method, head.path, head.query, head.headers, whole, None, client and client[:2], self.received)
        task = self._loop.create_task(self._respond(head, call))
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)
        self._task, self._take = task, partial(_resolve, body)

    async def _respond(self, head: Head, call: Call) -> None:
        if head.is_infer and not head.is_of_page:  # What such a page may read is for the application to say.
            reply = await self._infer.answer(call)
        else:
            reply = await asgi.respond(self._application, call)
        if reply:
            self._finish(head, reply)

    def _finish(self, head: Head, reply: Reply) -> None:
        """Answer, and go on with what came meanwhile."""
        self._head = self._inference = self._task = self._take = None
        if self._transport.is_closing():
            return
        if not self._taken:
            self._skip_body(head)
        if reply.status >= 400 and CLOSE in reply.fields:
            self._closing = True
        self._write(reply, head)
        if self._closing:
            self._part()
        elif self._buffer or self._said_all:
            self._transport.resume_reading()
            self._go_on()

    def _write(self, reply: Reply, head: Head | None) -> None:
        parts = [STATUS_LINES[reply.status], self._defaults()]
        for name, value in reply.fields:
            parts += (name, b": ", value, b"\r\n")
        if self._closing:
            if CLOSE not in reply.fields:
                parts.append(b"connection: close\r\n")
        elif head and head.is_old:
            parts.append(b"connection: keep-alive\r\n")
        parts += (b"content-length: %d\r\n\r\n" % len(reply.body), reply.body)
        self._transport.write(b"".join(parts))

    def _defaults(self) -> bytes:
        """The fields that every answer has, of which uvicorn makes a new list each second."""
        if self._fields is not self._server_state.default_headers:
            self._fields = self._server_state.default_headers
            self._prefix = b"".join([b"%b: %b\r\n" % field for field in self._fields])
        return self._prefix

    def _skip_body(self, head: Head) -> None:
        """A request that was refused early may still be sending its body: forget what comes, and close if it is much."""
        self._taken = True
        whole = self._start + head.length
        self._discard = max(0, whole - len(self._buffer))
        del self._buffer[:whole]  # In place: a client that sends thousands ahead must not have them copied for each.
        self._closing = self._closing or self._discard > SPARED

    def _drop(self, data: bytes) -> bytes:
        dropped = min(len(data), self._discard)
        self._discard -= dropped
        return data[dropped:]

    def _part(self) -> None:
        """The last was said: close, but not on a client that still sends, for it would never read it."""
        if self._discard:
            self._connections.discard(self)
            Linger(self._transport, self._discard, self._connections).begin()
        else:
            hang_up(self._transport)

    def _hand_over(self) -> None:
        """Leave this connection to uvicorn, from the first byte of the request that is not ours."""
        self._connections.discard(self)
        self._expect_no_headers()
        rest, data, self._buffer = self._make_rest(), bytes(self._buffer), bytearray()
        self._closing = True
        rest.connection_made(self._transport)
        self._transport.set_protocol(rest)
        rest.data_received(data)

    def _leave(self) -> None:
        """Another process has the connection: let go of it here, without a word to the client."""
        self._closing = True
        self._transport.abort()

    def _close_if_idle(self) -> None:
        if self._closing:
            return
        if self._head is None and not self._active:
            self._transport.close()
            return
        self._active = False
        self._loop.call_later(self._keep_alive, self._close_if_idle)


def _resolve(future: "asyncio.Future[bytes]", body: bytes) -> None:
    if not future.done():
        future.set_result(body)
