"""The request line and headers of one request, and whether `server.http.connection` can answer it."""

import re
from typing import Any

import httptools

from ..protocol.request_cache import MAX_JSON_BYTES
from .inference import Target
from .paths import is_generate, is_infer, split_target
from .strict import SINGLE_HEADERS, find_violation

MIN_STRAIGHT_BYTES = 32 * 1024
"""Fewer bytes of tensors are copied sooner than received in a piece of their own."""
_METHODS = (
    *("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "COPY", "LOCK", "MKCOL", "MOVE", "PROPFIND"),
    *("PROPPATCH", "SEARCH", "UNLOCK", "BIND", "REBIND", "UNBIND", "ACL", "REPORT", "MKACTIVITY", "CHECKOUT", "MERGE"),
    *("M-SEARCH", "NOTIFY", "SUBSCRIBE", "UNSUBSCRIBE", "PURGE", "MKCALENDAR", "LINK", "UNLINK", "SOURCE"),
)
_BEGINNINGS = [f"{method} {target}".encode() for method in _METHODS for target in ("/", "*", "http://", "https://")]
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")


class Head:
    """A parsed request line and headers.

    - `fields`: all headers as they came, names in lower case; `headers` has the last of each name.
    - `is_routable`: it is HTTP, and no header of `SINGLE_HEADERS`, such as tenant or key, is repeated.
    - `is_http_1_0`: the answer must confirm that the connection is kept.
    - `is_direct`: it is HTTP, and the connection answers it; otherwise uvicorn refuses it, and the connection ends.
    - `keeps`: its connection stays open for another request.
    - `is_chunked`: the body comes in chunks; otherwise it has `length` bytes.
    - `expects_continue`: the client waits for `100 Continue` before it sends the body.
    - `is_forwarded`: a proxy has named the client (X-Forwarded-For or X-Forwarded-Proto).
    - `is_call`: an inference that `Infer.answer` can take; everything else is for the application.
    - `is_plain_infer`: such an inference, of known length, with nothing to negotiate: neither body nor answer is compressed.
    - `tensors_at`: where its binary tensors begin, if they may be received straight into a slot; -1 if not.
    - `tenant`: the name of its tenant where routing has identified it, else None.
    - `target`: the result of `Infer.resolve`, once known; it stays valid while the connection repeats this head.
    - `fits`: a body of its length is known to be allowed (`HttpInference.expect`).
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.path = self.query = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.tenant: str | None = None
        self.target: Target | None = None
        self._complete = self.keeps = self.fits = False
        self._parser: Any = httptools.HttpRequestParser(self)
        parser, valid = self._parser, True
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            valid = False
        except httptools.HttpParserUpgrade:
            pass  # The offer to upgrade is ignored.
        self._parser = None  # Breaks the cycle of parser and head, which only the garbage collector would free.
        headers = self.headers = dict(self.fields)
        ambiguous = len(headers) < len(self.fields) and self._is_ambiguous()
        target, (self.path, self.query) = self.path, split_target(self.path)
        self.method = parser.get_method().decode("latin-1")
        self.is_http_1_0 = parser.get_http_version() == "1.0"
        valid = valid and find_violation(parser.get_http_version(), target, self.fields) is None
        self.is_routable = self._complete and not ambiguous
        self.is_direct = valid and self._complete and (self.path.startswith(b"/") or self.path == b"*")
        self.is_chunked = b"transfer-encoding" in headers
        self.length = int(headers.get(b"content-length", 0)) if valid else 0
        self.expects_continue = b"expect" in headers and not self.is_http_1_0 and self._expects_continue()
        path = self.path.decode("latin-1")
        self.is_infer = self.method == "POST" and is_infer(path)
        self.is_forwarded = b"x-forwarded-for" in headers or b"x-forwarded-proto" in headers
        self.is_call = self.is_infer and not ambiguous and b"origin" not in headers and not is_generate(path)
        negotiates = b"content-encoding" in headers or b"accept-encoding" in headers or self.expects_continue
        self.is_plain_infer = self.is_call and not negotiates and not self.is_chunked
        self.tensors_at = self._find_tensors() if self.is_plain_infer else -1

    def is_head_of(self, data: bytes) -> bool:
        """Whether `data` is exactly one request, with this head and a complete body."""
        return len(data) == len(self.data) + self.length and data.startswith(self.data)

    def forget(self) -> None:
        """Have the next request of its connection parsed and identified, also if its head is the same."""
        self.data, self.is_plain_infer = b"", False

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self._complete = True
        self.keeps = self._parser.should_keep_alive()  # After the end of a request without a body it would always be true.

    def _is_ambiguous(self) -> bool:
        """Whether a header is repeated that may not be."""
        names = [name for name, _ in self.fields]
        return any(names.count(name) > 1 for name in SINGLE_HEADERS)

    def _expects_continue(self) -> bool:
        return any(name == b"expect" and value.lower() == b"100-continue" for name, value in self.fields)

    def _find_tensors(self) -> int:
        said = self.headers.get(b"inference-header-content-length", b"")
        start = int(said) if said.isdigit() and len(said) < 10 else -1
        return start if 0 <= start <= MAX_JSON_BYTES and self.length - start >= MIN_STRAIGHT_BYTES else -1


def could_be_direct(data: bytearray) -> bool:
    """Whether these incomplete headers may still become a request with `Head.is_direct`."""
    return any(begin.startswith(data[: len(begin)]) for begin in _BEGINNINGS) and not has_bare_line_feed(data)


def has_bare_line_feed(data: bytes | bytearray) -> bool:
    """Whether a line ends in a line feed alone. That is not HTTP, and the end of such headers may never be recognised."""
    return _BARE_LINE_FEED.search(data) is not None
