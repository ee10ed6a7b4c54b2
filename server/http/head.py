"""The request line and headers of one request, and whether `server.http.connection` answers that request itself."""

import re
from typing import Any

import httptools

from ..protocol.request_cache import MAX_JSON_BYTES
from .asgi import MAX_BODY_BYTES
from .inference import Target
from .paths import is_generate, is_infer
from .strict import SINGLE_HEADERS, find_violation

MIN_STRAIGHT_BYTES = 32 * 1024
"""Fewer bytes of tensors are copied sooner than received in a piece of their own."""
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS")
_BEGINNINGS = [f"{method} /".encode() for method in METHODS]
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")


class Head:
    """A parsed request line and headers.

    - `is_routable`: it is HTTP, and no header of `SINGLE_HEADERS`, such as tenant or key, is repeated.
    - `is_http_1_0`: the answer must confirm that the connection is kept.
    - `is_direct`: the connection answers this request itself; otherwise uvicorn does.
    - `is_forwarded`: a proxy has named the client (X-Forwarded-For or X-Forwarded-Proto).
    - `has_origin`: a browser sent it on behalf of a web page (Origin header).
    - `is_plain_infer`: an inference without Origin, whose body and answer are not compressed.
    - `length`: bytes of the body.
    - `tensors_at`: where its binary tensors begin, if they may be received straight into a slot; -1 if not.
    - `tenant`: the name of its tenant where routing has identified it, else None.
    - `target`: the result of `Infer.resolve`, once known; it stays valid while the connection repeats this head.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.path = self.query = b""
        self.headers: dict[bytes, bytes] = {}
        self.tenant: str | None = None
        self.target: Target | None = None
        self._plain = True
        self._keeps = self._complete = self._ambiguous = False
        self._parser: Any = httptools.HttpRequestParser(self)
        parser = self._parser
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            self._plain = False
        except httptools.HttpParserUpgrade:
            pass  # The offer to upgrade is ignored.
        self._parser = None  # Breaks the cycle of parser and head, which only the garbage collector would free.
        self.path, _, self.query = self.path.partition(b"?")
        self.method = parser.get_method().decode("latin-1")
        self.is_http_1_0 = parser.get_http_version() == "1.0"
        fields = self.headers.items()
        self._plain = self._plain and find_violation(parser.get_http_version(), self.path + self.query, fields) is None
        self.length = int(self.headers.get(b"content-length", 0)) if self._plain else 0
        path = self.path.decode("latin-1")
        self._is_generate = is_generate(path)
        self.is_infer = self.method == "POST" and is_infer(path)
        self.is_forwarded = b"x-forwarded-for" in self.headers or b"x-forwarded-proto" in self.headers
        self.has_origin = b"origin" in self.headers
        negotiates = self.has_origin or b"content-encoding" in self.headers or b"accept-encoding" in self.headers
        self.is_plain_infer = self.is_infer and not negotiates
        self.tensors_at = self._find_tensors() if self.is_plain_infer else -1
        self.is_routable = self._complete and not self._ambiguous
        self.is_direct = self._is_direct()

    def is_head_of(self, data: bytes) -> bool:
        """Whether `data` is exactly one request, with this head and a complete body."""
        return len(data) == len(self.data) + self.length and data.startswith(self.data)

    def forget(self) -> None:
        """Have the next request of its connection parsed and identified, also if its head is the same."""
        self.data, self.is_plain_infer = b"", False

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in self.headers:
            self._plain, self._ambiguous = False, self._ambiguous or name in SINGLE_HEADERS
        if name in (b"expect", b"transfer-encoding"):
            self._plain = False
        self.headers[name] = value.strip(b" \t")

    def on_headers_complete(self) -> None:
        self._complete = True
        self._keeps = self._parser.should_keep_alive()  # After the end of a request without a body it would always be true.

    def _find_tensors(self) -> int:
        said = self.headers.get(b"inference-header-content-length", b"")
        start = int(said) if said.isdigit() and len(said) < 10 else -1
        return start if 0 <= start <= MAX_JSON_BYTES and self.length - start >= MIN_STRAIGHT_BYTES else -1

    def _is_direct(self) -> bool:
        return (
            self._plain
            and self._complete
            and self._keeps
            and not self._is_generate
            and (b"content-length" in self.headers or self.method in ("GET", "OPTIONS"))
            and self.path.startswith(b"/")
            and (self.is_infer or (self.method in METHODS and self.length <= MAX_BODY_BYTES))
        )


def could_be_direct(data: bytearray) -> bool:
    """Whether these incomplete headers may still become a request with `Head.is_direct`."""
    return any(begin.startswith(data[: len(begin)]) for begin in _BEGINNINGS) and not has_bare_line_feed(data)


def has_bare_line_feed(data: bytes | bytearray) -> bool:
    """Whether a line ends in a line feed alone. That is not HTTP, and the end of such headers may never be recognised."""
    return _BARE_LINE_FEED.search(data) is not None
