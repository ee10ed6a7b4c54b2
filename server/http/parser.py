"""httptools' parser of requests, for a server that never switches protocols."""

from typing import Any

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")


class Parser:
    """Reads requests for `protocol`, whose `on_...` methods it calls as httptools does.

    A request that offers an upgrade (`Connection: Upgrade`, as Java's client and curl --http2 send it) is read like any
    other: RFC 9110, 7.8 lets a server ignore the offer. httptools would end such a request after its headers, and take its
    body for the next one; so the body is given to a second parser of httptools, with headers that frame it the same way.

    Belongs to the event loop. `close` lets go of `protocol`.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._framing: list[bytes] = []
        self._framing_again = False
        self._parser = self._fresh()

    def feed_data(self, data: bytes) -> None:
        """Read on. Raises httptools.HttpParserError for what is no HTTP, and after what a callback raised."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as ended:
                data = data[ended.args[0] :]
                self._read_body()

    def close(self) -> None:
        """Read no more."""
        self._protocol = self._parser = None

    def get_method(self) -> bytes:
        """The method of the request whose headers were read last."""
        method: bytes = self._parser.get_method()
        return method

    def get_http_version(self) -> str:
        """Its version, as in `1.1`."""
        version: str = self._parser.get_http_version()
        return version

    def should_keep_alive(self) -> bool:
        """Whether it leaves its connection open."""
        keeps: bool = self._parser.should_keep_alive()
        return keeps

    def should_upgrade(self) -> bool:
        """Never."""
        return False

    def set_dangerous_leniencies(self, **leniencies: bool) -> None:
        """uvicorn asks for one that is given anyway, see `_fresh`."""

    def on_message_begin(self) -> None:
        if not self._framing_again:
            self._framing = []
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._framing_again:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._framing_again:
            if name.lower() in _FRAMING:
                self._framing += (name, b": ", value, b"\r\n")
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._framing_again:
            self._protocol.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._protocol.on_message_complete()

    def _read_body(self) -> None:
        """Have another parser read on, from the body of the request whose headers were read."""
        self._parser, self._framing_again = self._fresh(), True
        try:
            self._parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *self._framing, b"\r\n"]))
        finally:
            self._framing_again = False

    def _fresh(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # An answer may go out before what follows is refused.
        return parser
