"""A request and its reply, independent of the transport that carries them."""

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

Message = MutableMapping[str, Any]
"""ASGI's, of which `Receive` takes the next and `Send` sends one."""
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = dict[bytes, bytes]

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
"""The status line by status code, with its line end."""


MAX_BODY = "(server.max_body)"


class ReadBody(Protocol):
    """Reads a request body, which may still be arriving."""

    def __call__(self, limit: int, grow: Callable[[int], None] | None = None, where: str = MAX_BODY) -> Awaitable[bytes]:
        """The whole body. `grow` is called with the size of each chunk, if the body is not already counted; it may raise.
        `where` ends the text on the limit.

        Raises ClientGone if the body never completes, TooLarge if it exceeds `limit` bytes.
        """


class Call(NamedTuple):
    """A request's head, with header names in lower case, and how to read its body.

    `receive` is ASGI's, to detect a disconnect; None where a disconnect cancels the task that serves the call. `client` is
    address and port. `fields` are all headers, where `headers` has only the last of each name.
    """

    method: str
    raw_path: bytes
    query: bytes
    headers: Headers
    body: ReadBody
    receive: Receive | None
    client: tuple[str, int] | None
    fields: Sequence[tuple[bytes, bytes]] | None = None

    @property
    def path(self) -> str:
        """The path as text, percent-decoded."""
        return unquote(self.raw_path.decode("latin-1"))


class Reply(NamedTuple):
    """A complete answer; `fields` are its headers without Content-Length.

    `tensors` follow the body. They may be in a slot, and are then valid only while the reply is written.
    """

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes
    tensors: Sequence[bytes | memoryview] = ()
