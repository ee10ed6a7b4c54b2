"""An httptools request parser for a server that never switches protocols."""

from typing import Any

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")


class Parser:
    """Parses requests and calls the `on_...` methods of `protocol` as httptools does.

    A request that offers an upgrade (`Connection: Upgrade`, as Java's client and curl --http2 send it) is parsed like any
    other: RFC 9110, 7.8 lets a server ignore the offer. httptools would end such a request after its headers and parse its
    body as the next request. So the body goes to a second httptools parser, which first gets headers with the same framing.

    Belongs to the event loop. `close` drops the reference to `protocol`, which refers to this parser too.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._framing: list[bytes] = []
        self._replaying = False
        self._parser = self._new_parser()

    def feed_data(self, data: bytes) -> None:
        """Parse more bytes. Raises httptools.HttpParserError if they are not HTTP, or if a callback raised."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._read_body()

    def close(self) -> None:
        """Drop the references to the protocol and the parser; nothing may be fed afterwards."""
        self._protocol = self._parser = None

    def get_method(self) -> bytes:
        """The method of the request whose headers were parsed last."""
        method: bytes = self._parser.get_method()
        return method

    def get_http_version(self) -> str:
        """Its HTTP version, such as `1.1`."""
        version: str = self._parser.get_http_version()
        return version

    def should_keep_alive(self) -> bool:
        """Whether it keeps its connection open."""
        keeps: bool = self._parser.should_keep_alive()
        return keeps

    def should_upgrade(self) -> bool:
        """Always False."""
        return False

    def set_dangerous_leniencies(self, **leniencies: bool) -> None:
        """Called by uvicorn for a leniency that is always on, see `_new_parser`."""

    def on_message_begin(self) -> None:
        if not self._replaying:
            self._framing = []
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._replaying:
            if name.lower() in _FRAMING:
                self._framing += (name, b": ", value, b"\r\n")
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._replaying:
            self._protocol.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._protocol.on_message_complete()

    def _read_body(self) -> None:
        """Replace the parser by one that continues with the body of the request whose headers were parsed."""
        self._parser, self._replaying = self._new_parser(), True
        try:
            self._parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *self._framing, b"\r\n"]))
        finally:
            self._replaying = False

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # To answer before refusing what follows.
        return parser
