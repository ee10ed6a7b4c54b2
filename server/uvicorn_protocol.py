"""uvicorn's HTTP protocol with four differences: a request that offers an upgrade is answered like any other, what is refused
is refused in JSON, as all else here, what is remembered is bounded, and clients that read no answers hold up no end.

httptools and uvicorn keep the request line, headers and trailers until they are whole, however long that takes; so one client
that never ends them would fill the memory of all. What is bounded is the bytes that come without bringing a request forward.
"""

from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .body import hang_up
from .parser import Parser

MOST_HEADERS = 64 * 1024
"""Bytes of request line and headers, of trailers, or between two chunks, beyond which a request is refused."""


class JsonHttpToolsProtocol(HttpToolsProtocol):
    """One connection. Belongs to the event loop."""

    _pending = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.parser: Any = Parser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.parser.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._pending += len(data)
        super().data_received(data)
        if self._pending > MOST_HEADERS and not self.transport.is_closing():
            self._refuse(
                b"431 Request Header Fields Too Large", f"more than {MOST_HEADERS} bytes of headers, which is the limit"
            )

    def on_message_begin(self) -> None:
        self._pending = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._pending = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending = 0
        super().on_message_complete()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            hang_up(self.transport)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when something is no HTTP."""
        self._refuse(b"400 Bad Request", f"the request is not HTTP: {msg}")

    def _refuse(self, status: bytes, text: str) -> None:
        """Say in `{"error": ...}` what is wrong with what came, and hang up."""
        body = orjson.dumps({"error": text})
        parts = [b"HTTP/1.1 ", status, b"\r\n"]
        for name, value in self.server_state.default_headers:
            parts += [name, b": ", value, b"\r\n"]
        parts.append(b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join([*parts, body]))
        self.transport.close()


def install() -> None:
    """Have uvicorn make this protocol wherever it makes its own of httptools, as `uvicorn server.app:app` does by default.

    An application cannot tell uvicorn its protocol otherwise: uvicorn has chosen one before it imports the application.
    """
    HttpToolsProtocol.__new__ = staticmethod(_make)  # type: ignore[method-assign, assignment]


def _make(kind: type[HttpToolsProtocol], *_: Any, **__: Any) -> HttpToolsProtocol:
    return object.__new__(kind if issubclass(kind, JsonHttpToolsProtocol) else JsonHttpToolsProtocol)
