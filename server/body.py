"""The body of an ASGI request while it comes in, and what becomes of the rest of it when the request was refused before.

A client that still sends must come to read its answer, but not by sending all of a large body to nobody. So what is small
is left to arrive, which keeps the connection; of what may be large a little is read on, for a moment, and then the
connection is closed.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from .departures import Receive
from .errors import ClientGone, TooLarge

SPARED = 1 << 20
"""Bytes that may arrive for nothing."""
LINGER = 1.0
"""Seconds that a refused client may take to read its answer before it is hung up on."""


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
    def unwanted(self) -> bool:
        """Whether so much of it may still come, or nothing at all, that the connection is better closed."""
        uncertain = b"transfer-encoding" in self._headers or b"expect" in self._headers
        return not self._whole and (uncertain or int(self._headers.get(b"content-length", 0)) > SPARED)

    async def discard(self) -> None:
        """Read on for a moment: until it ends, the client leaves, or its time or `SPARED` bytes are used up."""
        spared = SPARED
        with suppress(ClientGone, TimeoutError):
            async with asyncio.timeout(LINGER):
                while spared > 0 and not self._whole:
                    spared -= len(await self._next())

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed its connection before the body was whole")
        self._whole = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part
