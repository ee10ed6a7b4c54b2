"""A request and its answer, whatever brought the one and takes the other."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import unquote

from .departures import Receive

Headers = dict[bytes, bytes]


class Call(NamedTuple):
    """A request as its headers tell it, by lower-case name, and how to get the body, which may still be on its way.

    `body` raises ClientGone if it never comes whole, TooLarge once it is over the limit it is given. `receive` tells when the
    client goes away, as ASGI's does; None where whoever calls cancels the call instead. `client` is an address and a port.
    """

    method: str
    raw_path: bytes
    query: bytes
    headers: Headers
    body: Callable[[int], Awaitable[bytes]]
    receive: Receive | None
    client: tuple[str, int] | None

    @property
    def path(self) -> str:
        """The path as text, its escapes resolved."""
        return unquote(self.raw_path.decode("latin-1"))


class Reply(NamedTuple):
    """A whole answer; `fields` lack only Content-Length."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes
