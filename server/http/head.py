"""The request line and headers of one request, and whether it is one of those that `server.http.connection` answers itself."""

import re
from typing import Any

import httptools

from .asgi import MOST_BODY
from .infer import is_infer
from .inference import Target
from .strict import ONCE, fault

METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS")
_BEGINNINGS = [f"{method} /".encode() for method in METHODS]
_LINE_FEED_ALONE = re.compile(rb"(?<!\r)\n")


class Head:
    """The request line and headers of one request, as httptools calls them out.

    `is_complete` is whether it is HTTP at all; `is_ambiguous` whether it names two tenants or keys; `is_old` whether it is
    of HTTP/1.0, whose clients have to be told that a connection is kept; `is_ours` whether this is a plain request, and,
    unless it is an inference, a small one; `is_of_page` whether a browser says which web page asks; `is_plain_infer` whether
    it is an inference, of no page, whose body is not, nor its answer may be, compressed; `length` is the bytes of the body.
    `target` is what `Infer.find` makes of it, once it did.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.path = self.query = b""
        self.headers: dict[bytes, bytes] = {}
        self.target: Target | None = None
        self._plain = True
        self._keeps = self.is_complete = self.is_ambiguous = False
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
        self.is_old = parser.get_http_version() == "1.0"
        fields = self.headers.items()
        self._plain = self._plain and fault(parser.get_http_version(), self.path + self.query, fields) is None
        self.length = int(self.headers.get(b"content-length", 0)) if self._plain else 0
        self.is_infer = self.method == "POST" and is_infer(self.path.decode("latin-1"))
        self.is_of_page = b"origin" in self.headers
        negotiates = self.is_of_page or b"content-encoding" in self.headers or b"accept-encoding" in self.headers
        self.is_plain_infer = self.is_infer and not negotiates
        self.is_ours = self._is_ours(parser)

    def is_head_of(self, data: bytes) -> bool:
        """Whether this is exactly one request with this head."""
        return len(data) == len(self.data) + self.length and data.startswith(self.data)

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in self.headers:
            self._plain, self.is_ambiguous = False, self.is_ambiguous or name in ONCE
        if name in (b"expect", b"transfer-encoding"):
            self._plain = False
        self.headers[name] = value.strip(b" \t")

    def on_headers_complete(self) -> None:
        self.is_complete = True
        self._keeps = self._parser.should_keep_alive()  # Once a request without a body has ended, it is always said to be.

    def _is_ours(self, parser: httptools.HttpRequestParser) -> bool:
        return (
            self._plain
            and self.is_complete
            and self._keeps
            and (b"content-length" in self.headers or self.method in ("GET", "OPTIONS"))
            and self.path.startswith(b"/")
            and (self.is_infer or (self.method in METHODS and self.length <= MOST_BODY))
        )


def may_be_plain(data: bytearray) -> bool:
    """Whether these first bytes of a request, whose headers have not ended yet, could become a plain one's."""
    return any(begin.startswith(data[: len(begin)]) for begin in _BEGINNINGS) and not is_damaged(data)


def is_damaged(data: bytes | bytearray) -> bool:
    """Whether a line of these headers ends in a line feed alone: it is no HTTP, and an end that is one may never come."""
    return _LINE_FEED_ALONE.search(data) is not None
