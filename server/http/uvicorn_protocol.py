"""uvicorn's HTTP protocol with four differences: a request that offers an upgrade is answered like any other, what is refused
is refused in JSON, as all else here, what is remembered is bounded, and clients that read no answers hold up no end.

httptools and uvicorn keep the request line, headers and trailers until they are whole, however long that takes; so one client
that never ends them would fill the memory of all. What is bounded is the bytes that come without bringing a request forward.
"""

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..tenants.model_changes import is_change
from .body import MOST_DROPPED, Linger, hang_up
from .connection_limits import Standing, connections
from .infer import is_infer
from .parser import Parser
from .strict import HEADERS_WITHIN, TOO_SLOW, Fault, fault

MOST_HEADERS = 64 * 1024
"""Bytes of request line and headers, of trailers, or between two chunks, beyond which a request is refused."""


class JsonHttpToolsProtocol(HttpToolsProtocol):
    """One connection. Belongs to the event loop."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.connections: Any = connections(self.server_state)
        self.parser: Any = Parser(self)
        self._pending = 0
        self._fault: Fault | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._between = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self.parser.close()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that says no more has gone, unless it waits for an answer that costs little; see `Front.eof_received`."""
        waits = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        # Its own path: the head of the next request may have begun, of which no path is known yet.
        if waits and not is_infer(path := self.cycle.scope["path"]) and not is_change(path):
            self.cycle.keep_alive = False
            return True
        return False

    def data_received(self, data: bytes) -> None:
        if self._fault:
            return
        self._pending += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._fault:
            return
        if self._pending > MOST_HEADERS:
            text = f"more than {MOST_HEADERS} bytes of headers, which is the limit"
            self._refuse(Fault(b"431 Request Header Fields Too Large", text))
        elif self._pending and self._between and not self._deadline:
            self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        self._pending, self._between = 0, False
        self._expect_nothing()
        if found := fault(self.parser.get_http_version(), self.url, self.headers):
            self._fault = found
            raise ValueError(found.text)  # Has the parser read no further, and `send_400_response` called.
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.parser.should_keep_alive():
            _keep(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending, self._between = 0, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._fault and self.cycle.response_complete and not self.transport.is_closing():
            self._refuse(self._fault)

    def standing(self) -> Standing:
        """Whether this is answered, waits for more of a request, or for another one; see `server.http.connection_limits`."""
        if self.cycle is None or self._pending or self.cycle.more_body:
            return Standing.UNFINISHED
        return Standing.IDLE if self.cycle.response_complete else Standing.ANSWERED

    def give_way(self) -> None:
        """Close at once."""
        self.transport.abort()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            hang_up(self.transport)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when something is no HTTP, or none that is served here."""
        dropped = MOST_DROPPED if self._fault else MOST_HEADERS
        self._fault = self._fault or Fault(b"400 Bad Request", f"the request is not HTTP: {msg}")
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self._refuse(self._fault, dropped)  # Else those before it are to be answered first.

    def _refuse(self, found: Fault, left: int = MOST_HEADERS) -> None:
        """Say in `{"error": ...}` what is wrong with what came, and hang up, at the latest after so many bytes more."""
        self._fault = found
        body = orjson.dumps({"error": found.text})
        parts = [b"HTTP/1.1 ", found.status, b"\r\n"]
        for name, value in self.server_state.default_headers:
            parts += [name, b": ", value, b"\r\n"]
        parts.append(b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join([*parts, body]))
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():  # What nobody reads would take the answer along.
            self.connection_lost(ConnectionAbortedError())
            Linger(self.transport, left, self.connections).begin()
        else:
            self.transport.close()

    def _expect_headers(self) -> None:
        """Give those of the next request, or of the first, so much time."""
        self._deadline = self.loop.call_later(HEADERS_WITHIN, self._give_up)

    def _expect_nothing(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_headers()  # Nothing more may be read before those before it are answered.
        elif self._pending:
            self._refuse(Fault(b"408 Request Timeout", TOO_SLOW))
        else:
            self.transport.close()


def _keep(cycle: RequestResponseCycle) -> None:
    """Keep the connection of a client of HTTP/1.0 that asked for it, and tell it so; uvicorn keeps none of those."""
    send, cycle.keep_alive = cycle.send, True

    async def tell(message: Any) -> None:
        if message["type"] == "http.response.start" and all(name != b"connection" for name, _ in message.get("headers", ())):
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"keep-alive")]}
        await send(message)

    cycle.send = tell  # type: ignore[method-assign]


def install() -> None:
    """Have uvicorn make this protocol wherever it makes its own of httptools, as `uvicorn server.app:app` does by default.

    An application cannot tell uvicorn its protocol otherwise: uvicorn has chosen one before it imports the application.
    """
    HttpToolsProtocol.__new__ = staticmethod(_make)  # type: ignore[method-assign, assignment]


def _make(kind: type[HttpToolsProtocol], *_: Any, **__: Any) -> HttpToolsProtocol:
    return object.__new__(kind if issubclass(kind, JsonHttpToolsProtocol) else JsonHttpToolsProtocol)
