"""uvicorn's HTTP protocol with three differences: it refuses in JSON, as all else here does, it bounds what it remembers, and
who reads no answers holds up no end.

httptools and uvicorn keep the request line, headers and trailers until they are whole, however long that takes; so one client
that never ends them would fill the memory of all. What is bounded is the bytes that come without bringing a request forward.
"""

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .body import hang_up

MOST_HEADERS = 64 * 1024
"""Bytes of request line and headers, of trailers, or between two chunks, beyond which a request is refused."""


class JsonHttpToolsProtocol(HttpToolsProtocol):
    """One connection. Belongs to the event loop."""

    _pending = 0

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
