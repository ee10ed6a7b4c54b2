"""An HTTP protocol for uvicorn that answers inference requests itself and leaves every other one to uvicorn's own.

ASGI costs a request more than a small inference does. So a connection begins here: as long as its requests are plain ones
to an infer path (HTTP/1.1, POST, Content-Length, nothing to negotiate) they are parsed by httptools, answered by `Infer`,
and written at once. At the first other request the connection is handed to uvicorn's protocol for good, with every byte
of that request; the answers there are the same.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from .body import LINGER, SPARED
from .errors import ClientGone
from .infer import Call, Infer, Reply, is_infer

MOST_HEADERS = 64 * 1024
"""Bytes of headers beyond which a request is left to uvicorn, which refuses it."""
MOST_AHEAD = 64 * 1024
"""Bytes to read ahead of a request that is being answered."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Head:
    """The request line and headers of one request, as httptools calls them out."""

    def __init__(self, data: bytes) -> None:
        self.path = b""
        self.headers: dict[bytes, bytes] = {}
        self.plain = True
        self.complete = False
        self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.plain = False
        self.method = self._parser.get_method().decode("latin-1")

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in self.headers or name in (b"expect", b"transfer-encoding", b"upgrade"):
            self.plain = False
        self.headers[name] = value

    def on_headers_complete(self) -> None:
        self.complete = True

    @property
    def is_ours(self) -> bool:
        """Whether this is a plain request for `Infer`."""
        path, _, _ = self.path.partition(b"?")
        self.path = path
        return (
            self.plain
            and self.complete
            and self._parser.get_http_version() == "1.1"
            and self._parser.should_keep_alive()
            and b"content-length" in self.headers
            and self.method == "POST"
            and is_infer(path.decode("latin-1"))
        )

    @property
    def length(self) -> int:
        """Bytes of the body; httptools has seen to it that this is a number."""
        return int(self.headers[b"content-length"])


class Front(asyncio.Protocol):
    """One connection. Belongs to the event loop; the arguments but the first are those that uvicorn gives its protocols."""

    def __init__(
        self,
        infer: Infer,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._infer = infer
        self._server_state = server_state
        self._make_rest: Callable[[], HttpToolsProtocol] = lambda: HttpToolsProtocol(config, server_state, app_state, _loop)
        self._keep_alive = config.timeout_keep_alive
        self._loop = _loop or asyncio.get_event_loop()
        self._transport: Any = None
        self._buffer = bytearray()
        self._head: Head | None = None
        self._start = 0
        self._discard = 0
        self._body: asyncio.Future[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._writable = True
        self._closing = False
        self._active = True

    def __repr__(self) -> str:
        return f"<Front {'answering' if self._task else 'idle'}, {len(self._buffer)} bytes ahead>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # It is asked for nothing but `shutdown`.
        self._loop.call_later(self._keep_alive, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        self._closing = True
        if self._body and not self._body.done():
            self._body.set_exception(ClientGone("the client closed its connection before the body was whole"))
        elif self._task:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._active = True
        if self._discard:
            data = self._drop(data)
        self._buffer += data
        if self._task is None:
            self._next()
        elif self._body is not None:
            self._take_body()
        elif len(self._buffer) > MOST_AHEAD:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._task is None:
            self._next()

    def shutdown(self) -> None:
        """Close as soon as the request that is being answered was; uvicorn calls this when it stops."""
        self._closing = True
        if self._task is None:
            self._transport.close()

    def _next(self) -> None:
        """Begin to answer the next request, if its headers are there and the last answer is on its way."""
        if self._closing or not self._writable or not self._buffer:
            return
        end = self._buffer.find(b"\r\n\r\n") + 4
        if end < 4:
            if len(self._buffer) > MOST_HEADERS or not _may_be_ours(self._buffer):
                self._hand_over()
            return
        head = Head(bytes(self._buffer[:end]))
        if not head.is_ours:
            self._hand_over()
            return
        self._head, self._start, self._body = head, end, self._loop.create_future()
        self._task = self._loop.create_task(self._answer(head, self._body))
        self._take_body()
        self._server_state.tasks.add(self._task)
        self._task.add_done_callback(self._server_state.tasks.discard)

    def _take_body(self) -> None:
        assert self._head is not None
        assert self._body is not None
        end = self._start + self._head.length
        if len(self._buffer) >= end:
            body = bytes(memoryview(self._buffer)[self._start : end])
            del self._buffer[:end]
            if not self._body.done():
                self._body.set_result(body)
            self._body = None

    async def _answer(self, head: Head, body: "asyncio.Future[bytes]") -> None:
        async def whole(_: int) -> bytes:
            return await body

        reply = await self._infer.answer(Call(head.method, head.path, head.headers, whole, None))
        self._task = None
        if reply is None or self._transport.is_closing():
            return
        self._skip_body(head)
        self._write(reply)
        if self._discard and self._closing:
            self._loop.call_later(LINGER, self._transport.close)
        elif self._closing:
            self._transport.close()
        else:
            self._transport.resume_reading()
            self._next()

    def _write(self, reply: Reply) -> None:
        parts = [_STATUS_LINES[reply.status]]
        for name, value in (*self._server_state.default_headers, *reply.fields):
            parts += (name, b": ", value, b"\r\n")
        if self._closing:
            parts.append(b"connection: close\r\n")
        parts += (b"content-length: %d\r\n\r\n" % len(reply.body), reply.body)
        self._transport.write(b"".join(parts))

    def _skip_body(self, head: Head) -> None:
        """A request that was refused early may still be sending its body: forget what comes, and hang up if it is much."""
        if self._body is not None:
            self._body.cancel()
            self._body = None
            self._discard = self._start + head.length
            self._buffer = bytearray(self._drop(bytes(self._buffer)))
            if self._discard > SPARED:
                self._closing, self._discard = True, SPARED

    def _drop(self, data: bytes) -> bytes:
        dropped = min(len(data), self._discard)
        self._discard -= dropped
        if self._closing and not self._discard:
            self._transport.close()
        return data[dropped:]

    def _hand_over(self) -> None:
        """Leave this connection to uvicorn, from the first byte of the request that is not ours."""
        self._server_state.connections.discard(self)
        rest, data, self._buffer = self._make_rest(), bytes(self._buffer), bytearray()
        self._closing = True
        rest.connection_made(self._transport)
        self._transport.set_protocol(rest)
        rest.data_received(data)

    def _close_if_idle(self) -> None:
        if self._closing:
            return
        if self._task is None and not self._active:
            self._transport.close()
            return
        self._active = False
        self._loop.call_later(self._keep_alive, self._close_if_idle)


def _may_be_ours(data: bytearray) -> bool:
    """Whether these first bytes of a request could become an infer request's."""
    begin = b"POST /v2/models/"
    return begin.startswith(data[: len(begin)])
