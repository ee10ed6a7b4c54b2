"""Reading request bodies, also in chunks, and discarding the rest where a request was refused early (nginx: "lingering").

Many clients read no answer before they have sent everything, and closing a socket with unread bytes resets the connection,
which can destroy an answer still in flight. So a small rest is read and dropped, and the connection is kept. A large rest is
read and dropped only for a limited time before the connection is closed.

That is done twice: `Body.discard` for ASGI, which hands out no transport and cannot half-close a connection, and `Linger` for
connections that are answered without ASGI, which have no `receive`, and would need a task each to have one.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import httptools

from ..errors import ClientGone, TooLarge
from .connection_limits import Activity, Connections
from .exchange import MAX_BODY, Receive
from .strict import MAX_HEADER_BYTES

MAX_DISCARDED = 1 << 20
"""Bytes of a refused body that are discarded while the connection stays open for the next request."""
LINGER_BYTES = 256 << 20
"""Bytes that are discarded at most before a connection is closed."""
LINGER_SECONDS = 10.0
"""How long bytes are discarded at most before a connection is closed."""
LINGER_IDLE_SECONDS = 1.0
"""A lingering connection is closed when nothing has arrived for this long; `Linger` checks once per interval, so up to twice
as late."""
SHUTDOWN_IDLE_SECONDS = 0.1
"""The same once the server stops, which a client that only keeps its connection must not delay."""
CLOSE_SECONDS = 3.0
"""How long a client may take to read the last answer once nothing more of its body is awaited; then the socket is aborted."""


class Body:
    """The body of one ASGI request. `read` may be called once; belongs to the event loop."""

    def __init__(self, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        self._headers = headers
        self._receive = receive
        self._complete = False

    async def read(self, limit: int, grow: Callable[[int], None] | None = None, where: str = MAX_BODY) -> bytes:
        """The whole body. `grow` is called with the size of each chunk before it is kept, and may raise.

        `where` ends the text on the limit. Raises what `grow` raises, TooLarge beyond `limit` bytes, and ClientGone.
        """
        grow = grow or _ignore
        first = await self._next()
        grow(len(first))
        if self._complete and len(first) <= limit:
            return first
        body = bytearray(first)
        while not self._complete and len(body) <= limit:
            chunk = await self._next()
            grow(len(chunk))
            body += chunk
        if len(body) > limit:
            raise TooLarge(f"a body of more than {limit} bytes, which is the limit {where}")
        return bytes(body)

    @property
    def complete(self) -> bool:
        """Whether the last byte has been received."""
        return self._complete

    @property
    def must_close(self) -> bool:
        """Whether the unread rest is too large, or of unknown length, to keep the connection: it is better closed."""
        return not self._complete and may_be_much(self._headers)

    async def discard(self) -> None:
        """Read and drop the rest, until it ends, the client disconnects or goes silent, or a `LINGER_...` limit is reached."""
        left = LINGER_BYTES
        with suppress(ClientGone, TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while left > 0 and not self._complete:
                    async with asyncio.timeout(LINGER_IDLE_SECONDS):
                        left -= len(await self._next())

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed its connection before the body was whole")
        self._complete = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk


class Linger(asyncio.Protocol):
    """Ends a connection whose last answer was written: reads and drops what still comes, and then closes it.

    A close with bytes unread would reset the connection, and the client might lose answers that it has not read. This ends when
    the client closes its side, or when all answers are sent and nothing has come for a while; at the latest at one of the
    `LINGER_...` limits.

    Belongs to the event loop. `connections` is the set that uvicorn waits for at shutdown, which also shortens the time left.
    """

    def __init__(self, transport: Any, connections: Connections) -> None:
        self._transport = transport
        self._left = LINGER_BYTES
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + LINGER_SECONDS
        self._active = False

    def __repr__(self) -> str:
        return f"<Linger {self._left} bytes left>"

    def begin(self) -> None:
        """Take the connection over, and half-close it: the client sees the end of the answers."""
        self._connections.add_ending(self)
        self._transport.set_protocol(self)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(LINGER_IDLE_SECONDS, self._check)

    def data_received(self, data: bytes) -> None:
        self._active = True
        self._left -= len(data)
        if self._left <= 0:
            close_when_sent(self._transport)

    def eof_received(self) -> bool:
        """Whether to keep the connection: the client sends no more, and may not have read all answers yet."""
        return self._is_unsent()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)

    def activity(self) -> Activity:
        """A lingering connection is among the first to be closed; see `server.http.connection_limits`."""
        return Activity.RECEIVING

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def shutdown(self) -> None:
        """Linger for `CLOSE_SECONDS` more at most, and no longer than anything comes; uvicorn calls this when it stops."""
        self._end = min(self._end, self._loop.time() + CLOSE_SECONDS)
        self._active = False
        self._loop.call_later(SHUTDOWN_IDLE_SECONDS, self._check)

    def _is_unsent(self) -> bool:
        unsent: int = self._transport.get_write_buffer_size()
        return unsent > 0

    def _check(self) -> None:
        if self._transport.is_closing():
            return
        if self._loop.time() >= self._end or not (self._active or self._is_unsent()):
            close_when_sent(self._transport)
        else:
            self._active = False
            self._loop.call_later(LINGER_IDLE_SECONDS, self._check)


def may_be_much(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the body of a request with these headers is too large, or of unknown length, to wait for a rest of it."""
    unknown = b"transfer-encoding" in headers or b"expect" in headers
    return unknown or content_length(headers.get(b"content-length")) > MAX_DISCARDED


def content_length(value: str | bytes | None) -> int:
    """The value of a Content-Length header in bytes; 0 if it is absent or not a number."""
    return int(value) if value and value.isdigit() else 0


def _ignore(_: int) -> None:
    """The default `grow`: count nothing."""


def close_when_sent(transport: Any) -> None:
    """Close once everything written is sent; abort after `CLOSE_SECONDS`, so that a slow reader delays no shutdown."""
    unsent = transport.get_write_buffer_size()
    transport.close()
    if unsent:
        asyncio.get_running_loop().call_later(CLOSE_SECONDS, transport.abort)


_HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")


class LongLines(Exception):
    """More than `MAX_HEADER_BYTES` came without a byte of the body."""


class ChunkedBody:
    """Belongs to the event loop.

    httptools reads the chunks, as it does for uvicorn, but does not say where the last of them ends, and the next request
    begins. That is found here, and has to be where httptools finds the end: what two readers could understand differently is
    refused. Trailers are dropped.
    """

    def __init__(self) -> None:
        self.complete = False
        """Whether the last chunk and the trailers have come."""
        self._pieces: list[bytes] = []
        self._line = b""  # The beginning of a line of which the end has not come.
        self._lines = 0  # Bytes of lines since the last byte of the body.
        self._left = 0  # Bytes of the current chunk, with its line end, that have not come.
        self._last = False  # The last chunk has come: what follows are trailers.
        self._parser: Any = httptools.HttpRequestParser(self)
        self._parser.feed_data(_HEAD)

    def feed(self, data: bytes) -> int:
        """Read on; how many of these bytes belong to the body. Raises httptools.HttpParserError, LongLines."""
        end, ended = self._find_end(data)
        self._parser.feed_data(data if end == len(data) else data[:end])
        if ended != self.complete:
            raise httptools.HttpParserError("the last chunk ends in two places")
        if self._lines > MAX_HEADER_BYTES:
            raise LongLines
        if ended:
            self.close()
        return end

    def take(self) -> bytes:
        """What has come of the body since the last call."""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        return data

    def close(self) -> None:
        """Break the cycle of parser and body, which only the garbage collector would free. Nothing may be fed afterwards."""
        self._parser = None

    def on_body(self, data: bytes) -> None:
        """Called by httptools with a piece of the body."""
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Called by httptools after the trailers."""
        self.complete = True

    def _find_end(self, data: bytes) -> tuple[int, bool]:
        """How many of these bytes belong to the body, and whether it ends there."""
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                self._lines = 0
                at += step
                continue
            end = data.find(b"\n", at) + 1
            line = self._line + data[at : end or len(data)]
            self._lines += (end or len(data)) - at
            at = end or len(data)
            self._line = b"" if end else line[: MAX_HEADER_BYTES + 1]
            if not end:
                break
            if self._last:
                if line == b"\r\n":
                    return at, True
            elif size := _SIZE.match(line):
                self._last = int(size[0], 16) == 0
                self._left = 0 if self._last else int(size[0], 16) + 2
            else:
                return len(data), False  # It is no size, which httptools refuses.
        return at, False
