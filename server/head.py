"""The request line and headers of one request, and whether it is one of those that `server.front` answers itself."""

from typing import Any

import httptools

from .asgi import MOST_BODY
from .infer import is_infer
from .inference import Target

METHODS = ("GET", "POST", "PUT", "DELETE")


class Head:
    """The request line and headers of one request, as httptools calls them out.

    `is_complete` is whether it is HTTP at all; `is_ours` whether this is a plain request, and, unless it is an inference, a
    small one; `is_plain_infer` whether it is an inference whose body is not, nor its answer may be, compressed; `length` is
    the bytes of the body. `target` is what `Infer.find` makes of it, once it did.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.path = self.query = b""
        self.headers: dict[bytes, bytes] = {}
        self.target: Target | None = None
        self._plain = True
        self._keeps = self.is_complete = False
        self._parser: Any = httptools.HttpRequestParser(self)
        parser = self._parser
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            self._plain = False
        except httptools.HttpParserUpgrade:
            pass  # An offer that is not taken up: the request is like any other.
        self._parser = None  # It has this object, and the two would be left to the garbage collector.
        self.path, _, self.query = self.path.partition(b"?")
        self.method = parser.get_method().decode("latin-1")
        self.length = int(self.headers.get(b"content-length", 0)) if self._plain else 0
        self.is_infer = self.method == "POST" and is_infer(self.path.decode("latin-1"))
        negotiates = b"content-encoding" in self.headers or b"accept-encoding" in self.headers
        self.is_plain_infer = self.is_infer and not negotiates
        self.is_ours = self._is_ours(parser)

    def is_head_of(self, data: bytes) -> bool:
        """Whether this is exactly one request with this head."""
        return len(data) == len(self.data) + self.length and data.startswith(self.data)

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in self.headers or name in (b"expect", b"transfer-encoding"):
            self._plain = False
        self.headers[name] = value

    def on_headers_complete(self) -> None:
        self.is_complete = True
        self._keeps = self._parser.should_keep_alive()  # Once a request without a body has ended, it is always said to be.

    def _is_ours(self, parser: httptools.HttpRequestParser) -> bool:
        return (
            self._plain
            and self.is_complete
            and parser.get_http_version() == "1.1"
            and self._keeps
            and (b"content-length" in self.headers or self.method == "GET")
            and self.path.startswith(b"/")
            and (self.is_infer or (self.method in METHODS and self.length <= MOST_BODY))
        )
