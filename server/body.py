"""The bodies of requests while they come in, and what becomes of the rest of one when its request was refused before.

Many clients read nothing before all is sent, and a connection that is closed with something unread is reset, with the answer
that was on its way. So what is small is left to arrive, which keeps the connection; of what may be large no more is kept, but
it is read on for a while before the connection is closed: lingering, as nginx calls it.
"""

import asyncio
from collections.abc import Awaitable, Mapping, MutableSet
from contextlib import suppress
from typing import Any, Protocol

from .departures import Receive
from .errors import ClientGone, TooLarge, Unavailable

SPARED = 1 << 20
"""Bytes that may arrive for nothing on a connection that is kept."""
MOST_DROPPED = 256 << 20
"""Bytes that may arrive for nothing before a connection is closed."""
LINGER = 10.0
"""Seconds for which they may."""
SILENCE = 1.0
"""Seconds without any after which it is closed; where somebody only looks so often, up to twice that."""
LAST = 3.0
"""Seconds that a client may take to read its last answer, if nobody waits for more of its body, before it is cut off."""


class Body:
    """One request's body. `read` may be called once; belongs to the event loop."""

    def __init__(self, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        self._headers = headers
        self._receive = receive
        self._whole = False

    def __repr__(self) -> str:
        return f"<Body {'whole' if self._whole else 'on its way'}>"

    async def read(self, limit: int) -> bytes:
        """All of it. Raises TooLarge beyond `limit` bytes, ClientGone if the rest never comes."""
        first = await self._next()
        if self._whole and len(first) <= limit:
            return first
        body = bytearray(first)
        while not self._whole and len(body) <= limit:
            body += await self._next()
        if len(body) > limit:
            raise TooLarge(f"a body of more than {limit} bytes, which is the limit (server.max_body)")
        return bytes(body)

    @property
    def whole(self) -> bool:
        """Whether nothing more of it comes."""
        return self._whole

    @property
    def unwanted(self) -> bool:
        """Whether so much of it may still come, or nothing at all, that the connection is better closed."""
        uncertain = b"transfer-encoding" in self._headers or b"expect" in self._headers
        return not self._whole and (uncertain or int(self._headers.get(b"content-length", 0)) > SPARED)

    async def discard(self) -> None:
        """Read on for a while: until it ends, the client leaves or falls silent, or its time or bytes are used up."""
        left = MOST_DROPPED
        with suppress(ClientGone, TimeoutError):
            async with asyncio.timeout(LINGER):
                while left > 0 and not self._whole:
                    async with asyncio.timeout(SILENCE):
                        left -= len(await self._next())

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed its connection before the body was whole")
        self._whole = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part


class Upload(Protocol):
    """A connection that waits for a body."""

    def refuse(self, reason: str) -> None:
        """Answer now."""


class Uploads:
    """The bodies that are on their way to one tenant, for their clients to be told when nothing can come of them any more.

    Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._connections: set[Upload] = set()
        self._waiting: set[asyncio.Task[Any]] = set()
        self._reason = ""

    def __repr__(self) -> str:
        return f"<Uploads {len(self._waiting)} waited for by tasks, {len(self._connections)} by connections>"

    def add(self, connection: Upload) -> None:
        """It waits for a body."""
        self._connections.add(connection)

    def discard(self, connection: Upload) -> None:
        """It waits no more, if it did."""
        self._connections.discard(connection)

    async def wait(self, body: Awaitable[bytes]) -> bytes:
        """The same, unless it is refused before it came: then Unavailable is raised."""
        task = asyncio.current_task()
        assert task
        self._waiting.add(task)
        try:
            return await body
        except asyncio.CancelledError:
            if task in self._waiting or task.uncancel():  # It was not, or not only, refused.
                raise
            raise Unavailable(self._reason) from None
        finally:
            self._waiting.discard(task)

    def refuse(self, reason: str) -> None:
        """Tell everyone so whose body is on its way."""
        self._reason = reason
        while self._waiting:
            self._waiting.pop().cancel()
        while self._connections:
            self._connections.pop().refuse(reason)


class Linger(asyncio.Protocol):
    """Drops what still comes on a connection whose last answer was written, up to so many bytes, and then closes it.

    Belongs to the event loop. `connections` are those that uvicorn waits for when it stops; then less time is left.
    """

    def __init__(self, transport: Any, left: float, connections: MutableSet[Any]) -> None:
        self._transport = transport
        self._left = min(left, MOST_DROPPED)
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + LINGER
        self._active = False

    def __repr__(self) -> str:
        return f"<Linger {self._left} bytes left>"

    def begin(self) -> None:
        """Take the connection over, and say that nothing more will be said."""
        self._connections.add(self)
        self._transport.set_protocol(self)
        self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(SILENCE, self._look)

    def data_received(self, data: bytes) -> None:
        self._active = True
        self._left -= len(data)
        if self._left <= 0:
            hang_up(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)

    def shutdown(self) -> None:
        """uvicorn calls this when it stops."""
        self._end = min(self._end, self._loop.time() + LAST)

    def _look(self) -> None:
        if not self._active or self._loop.time() >= self._end:
            hang_up(self._transport)
        elif not self._transport.is_closing():
            self._active = False
            self._loop.call_later(SILENCE, self._look)


def hang_up(transport: Any) -> None:
    """Close this once what was written is read, or `LAST` seconds have passed; whoever reads nothing holds up nobody."""
    unread = transport.get_write_buffer_size()
    transport.close()
    if unread:
        asyncio.get_running_loop().call_later(LAST, transport.abort)
