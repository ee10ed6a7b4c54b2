"""The bodies of requests while they come in, and what becomes of the rest of one when its request was refused before.

Many clients read nothing before all is sent, and a connection that is closed with something unread is reset, with the answer
that was on its way. So what is small is left to arrive, which keeps the connection; of what may be large no more is kept, but
it is read on for a while before the connection is closed: lingering, as nginx calls it.
"""

import asyncio
from collections.abc import Callable, Mapping, MutableSet
from contextlib import suppress
from typing import Any

from ..errors import ClientGone, TooLarge
from .connection_limits import Standing
from .disconnects import Receive

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

    async def read(self, limit: int, grow: Callable[[int], None] | None = None) -> bytes:
        """All of it; `grow` is told of each part's bytes. Raises what that does, TooLarge beyond `limit`, ClientGone."""
        grow = grow or _ignore
        first = await self._next()
        grow(len(first))
        if self._whole and len(first) <= limit:
            return first
        body = bytearray(first)
        while not self._whole and len(body) <= limit:
            part = await self._next()
            grow(len(part))
            body += part
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

    def standing(self) -> Standing:
        """It waits for nothing but an end; see `server.http.connection_limits`."""
        return Standing.UNFINISHED

    def give_way(self) -> None:
        """Close at once."""
        self._transport.abort()

    def shutdown(self) -> None:
        """uvicorn calls this when it stops."""
        self._end = min(self._end, self._loop.time() + LAST)

    def _look(self) -> None:
        if not self._active or self._loop.time() >= self._end:
            hang_up(self._transport)
        elif not self._transport.is_closing():
            self._active = False
            self._loop.call_later(SILENCE, self._look)


def told(length: str | bytes | None) -> int:
    """The bytes that a value of Content-Length tells; 0 where there is none, or what is no number."""
    return int(length) if length and length.isdigit() else 0


def _ignore(_: int) -> None:
    """Told of a part of a body."""


def hang_up(transport: Any) -> None:
    """Close this once what was written is read, or `LAST` seconds have passed; whoever reads nothing holds up nobody."""
    unread = transport.get_write_buffer_size()
    transport.close()
    if unread:
        asyncio.get_running_loop().call_later(LAST, transport.abort)
