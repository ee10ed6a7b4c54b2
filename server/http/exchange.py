"""A request and its answer, whatever brought the one and takes the other."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple, Protocol
from urllib.parse import unquote

from .disconnects import Receive

Headers = dict[bytes, bytes]

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
"""What answers begin with."""


class Read(Protocol):
    """How to get a body, which may still be on its way."""

    def __call__(self, limit: int, grow: Callable[[int], None] | None = None) -> Awaitable[bytes]:
        """All of it; `grow` is told of its bytes as they come, where nothing else counts them, and may raise.

        Raises ClientGone if it never comes whole, TooLarge once it is over `limit`.
        """


class Call(NamedTuple):
    """A request as its headers tell it, by lower-case name, and how to get the body.

    `received` says how much of it came, where `body` tells of no parts. `receive` tells when the
    client goes away, as ASGI's does; None where whoever calls cancels the call instead. `client` is an address and a port.
    """

    method: str
    raw_path: bytes
    query: bytes
    headers: Headers
    body: Read
    receive: Receive | None
    client: tuple[str, int] | None
    received: Callable[[], int] | None = None

    @property
    def path(self) -> str:
        """The path as text, its escapes resolved."""
        return unquote(self.raw_path.decode("latin-1"))


class Reply(NamedTuple):
    """A whole answer; `fields` lack only Content-Length."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes
