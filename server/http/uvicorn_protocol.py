"""uvicorn's HTTP protocol with five changes: upgrade offers are ignored, requests are refused in JSON, the bytes kept per
connection are bounded, a client that does not read its answers cannot delay a shutdown, and a close after an answer does not
destroy it.

httptools and uvicorn keep the request line, headers and trailers until they are complete, without any limit, so one client
that never completes them could fill the memory of the process. Bounded here are the bytes that arrive without completing
headers or delivering body.
"""

import asyncio
from typing import Any
from weakref import ref

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..tenants.model_changes import is_change
from ..tenants.unread import UnreadAnswers
from .asgi import below_root
from .body import Linger, close_when_sent, may_be_much
from .connection_limits import Activity, connections
from .inference import CLOSE
from .paths import is_infer, split_target
from .strict import HEADER_TIMEOUT, HEADER_TIMEOUT_TEXT, LONG_HEADERS, MAX_HEADER_BYTES, Violation, find_violation

UNREAD = "greenlane.unread"
"""In uvicorn's state of the application: returns the `UnreadAnswers` of a request with these headers, or None."""


class JsonHttpToolsProtocol(HttpToolsProtocol):
    """One connection. Belongs to the event loop."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.connections: Any = connections(self.server_state)
        self.parser: Any = Parser(self)
        self._pending = 0
        self._violation: Violation | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._between_requests = True
        self._lingers = False  # The last answer was written, and what still comes is dropped.
        self._unread: UnreadAnswers | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self._forget_unread()
        self.parser.close()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep the half-closed connection: only for a cheap answer; see `HttpConnection.eof_received`."""
        waits = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        # Not self.scope: the head of the next request may be incomplete, without a path yet.
        if waits and not is_infer(path := below_root(dict(self.cycle.scope))["path"]) and not is_change(path):
            self.cycle.keep_alive = False
            return True
        return False

    def data_received(self, data: bytes) -> None:
        last = self.cycle is not None and not self.cycle.keep_alive and not self.cycle.more_body
        if self._violation or last:  # What comes behind the last request of a connection is dropped.
            return
        self._pending += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._violation:
            return
        if self._pending > MAX_HEADER_BYTES:
            self._refuse_in_turn(LONG_HEADERS)
        elif self._pending and self._between_requests and not self._header_timer:
            self._start_header_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        self._pending, self._between_requests = 0, False
        self._cancel_header_timer()
        if found := find_violation(self.parser.get_http_version(), self.url, self.headers):
            self._violation = found
            raise ValueError(found.text)  # Stops the parser, and makes uvicorn call `send_400_response`.
        self.expect_100_continue = self.expect_100_continue and self.parser.get_http_version() != "1.0"
        if not self.url.startswith(b"/"):  # uvicorn knows no absolute URI without a path.
            path, query = split_target(self.url)
            self.url = b"%b?%b" % (path, query) if path else self.url
        super().on_headers_complete()
        self.cycle.transport = closing = _Closing(self, self.cycle)  # type: ignore[assignment]
        if may_be_much(dict(self.headers)):
            self.cycle.send = closing.send  # type: ignore[method-assign]
        if self.scope["http_version"] == "1.0" and self.parser.should_keep_alive():
            _keep(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending, self._between_requests = 0, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._lingers:
            self.server_state.total_requests += 1
            return
        if self._violation and len(self.pipeline) == 1 and self.cycle.more_body:
            self.pipeline.clear()  # It is the damaged request, and all before it are answered.
            self._refuse(self._violation)
            return
        super().on_response_complete()
        if self._violation and self.cycle.response_complete and not self.transport.is_closing():
            self._refuse(self._violation)

    def pause_writing(self) -> None:
        super().pause_writing()
        find = self.app_state.get(UNREAD)
        if find and self.cycle is not None and self._unread is None:
            self._unread = find(dict(self.cycle.scope["headers"]))
            if self._unread:
                self._unread.add(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()
        if self.transport.is_closing():
            close_when_sent(self.transport)

    def unread(self) -> int:
        """Bytes of answers that the socket has not taken."""
        return self.transport.get_write_buffer_size()

    def timeout_keep_alive_handler(self) -> None:
        if self.flow.write_paused:  # `UnreadAnswers` says how long the client may take to read.
            super().timeout_keep_alive_handler()
        elif not self.transport.is_closing():
            close_when_sent(self.transport)

    def _forget_unread(self) -> None:
        if self._unread:
            self._unread.discard(self)
            self._unread = None

    def activity(self) -> Activity:
        """What this connection is doing; see `server.http.connection_limits`."""
        if self.cycle is None or self._pending or self.cycle.more_body:
            return Activity.RECEIVING
        return Activity.IDLE if self.cycle.response_complete else Activity.ANSWERING

    def abort(self) -> None:
        """Close at once."""
        self.transport.abort()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            close_when_sent(self.transport)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when a request is not HTTP, or a violation was found in it."""
        self._refuse_in_turn(self._violation or Violation(b"400 Bad Request", f"the request is not HTTP: {msg}"))

    def _refuse_in_turn(self, found: Violation) -> None:
        """Refuse what came now, after the requests before it are answered."""
        self._violation = found
        if self.cycle is None or self.cycle.response_complete or (self.cycle.more_body and not self.pipeline):
            self._refuse(found)

    def _refuse(self, found: Violation) -> None:
        """Answer with `{"error": ...}` and close, after reading and dropping what still comes."""
        self._violation = found
        body = orjson.dumps({"error": found.text})
        parts = [b"HTTP/1.1 ", found.status, b"\r\n"]
        for name, value in self.server_state.default_headers:
            parts += [name, b": ", value, b"\r\n"]
        parts.append(b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join([*parts, body]))
        self._unset_keepalive_if_required()
        self.linger()

    def linger(self) -> None:
        """Close the connection so that the client can read its answers, whatever it still sends."""
        if not self.transport.can_write_eof():  # TLS: a client that waits for the end would wait for longer.
            self.transport.close()
        elif not self._lingers:
            self._lingers = True
            self.connection_lost(ConnectionAbortedError())
            Linger(self.transport, self.connections).begin()

    def _start_header_timer(self) -> None:
        """The headers of the next request must be complete within `HEADER_TIMEOUT`."""
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT, self._on_header_timeout)

    def _cancel_header_timer(self) -> None:
        if self._header_timer:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_header_timer()  # The requests before it must be answered first.
        elif self._pending:
            self._refuse(Violation(b"408 Request Timeout", HEADER_TIMEOUT_TEXT))
        else:
            self.transport.close()


class _Closing:
    """The transport of one request, as uvicorn sees it: a close lingers, unless `Body.discard` has done so."""

    def __init__(self, protocol: JsonHttpToolsProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = ref(cycle)  # Which refers to this object.
        self._must_linger = False

    async def send(self, message: Any) -> None:
        """Send this of an answer. If it begins before the body is there, it ends the connection."""
        cycle = self._cycle()
        assert cycle
        fields = message.get("headers", ())
        if message["type"] == "http.response.start" and cycle.more_body and CLOSE not in fields:
            others = [each for each in fields if each[0] != CLOSE[0]]  # HTTP/1.0 may have been promised to be kept.
            message, self._must_linger = {**message, "headers": [*others, CLOSE]}, True
        await RequestResponseCycle.send(cycle, message)

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol._lingers or self._protocol.transport.is_closing()

    def close(self) -> None:
        if (cycle := self._cycle()) and cycle.more_body and not self._must_linger:
            self._protocol.transport.close()
        else:
            self._protocol.linger()


def _keep(cycle: RequestResponseCycle) -> None:
    """Keep the connection of an HTTP/1.0 client that asked for it, and confirm it; uvicorn would close it."""
    send, cycle.keep_alive = cycle.send, True

    async def send_keep_alive(message: Any) -> None:
        if message["type"] == "http.response.start" and all(name != b"connection" for name, _ in message.get("headers", ())):
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"keep-alive")]}
        await send(message)

    cycle.send = send_keep_alive  # type: ignore[method-assign]


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
