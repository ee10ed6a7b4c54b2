"""Serves requests of a connection to an ASGI application, without a server of its own: one at a time, in a task for each."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import quote

from ..errors import Failed
from .body import content_length
from .exchange import Call, Message, Receive, Reply, Send

Application = Callable[[Message, Receive, Send], Awaitable[None]]


MAX_BODY_BYTES = 1 << 20
"""The longest body of a request that came by no connection: it is passed in one piece."""


class Client(Protocol):
    """The connection that a request came by."""

    def want_body(self) -> None:
        """More of the body is wanted: read on."""

    def begin_parts(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """Write the head of an answer whose body comes in parts."""

    async def write_part(self, data: bytes, last: bool) -> None:
        """Write a part of it, once the client has taken those before."""


class Exchange:
    """ASGI's `receive` and `send` for one request. Belongs to the event loop.

    An answer in parts is written to `client` as they come, if there is one. `answered` is done with any other answer, and at
    the end of one in parts.
    """

    def __init__(self, client: Client | None = None) -> None:
        self.answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._client = client
        self._pieces: list[bytes] = []
        self._size = 0
        self._complete = self._taken = False  # All of the body has arrived; the application has it.
        self._arrival: asyncio.Future[None] | None = None
        self._status = 500
        self._fields: list[tuple[bytes, bytes]] = []
        self._body = b""
        self.in_parts = False
        """Whether the answer is being written in parts."""

    def deliver(self, data: bytes, complete: bool) -> int:
        """Add a piece of the body, the last one or not; how many bytes wait for the application to ask for them."""
        self._pieces.append(data)
        self._size += len(data)
        self._complete = complete
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        return self._size

    async def receive(self) -> Message:
        """What has arrived of the body since the last call, at least a piece of it.

        After the answer this returns that the client has gone; before, a call after the last piece never returns.
        """
        if self.answered.done():
            return {"type": "http.disconnect"}
        if self._client is not None:
            self._client.want_body()
        while self._taken or not self._pieces:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._size, self._taken = [], 0, self._complete
        return {"type": "http.request", "body": data, "more_body": not self._complete}

    async def send(self, message: Message) -> None:
        """Answer with this message. What is sent after the whole answer is ignored."""
        if self.answered.done():
            return
        if message["type"] == "http.response.start":
            self._status, self._fields = message["status"], list(message.get("headers", ()))
            return
        data, more = message.get("body", b""), message.get("more_body", False)
        length = next((value for name, value in self._fields if name == b"content-length"), None)
        if self._client is not None and (self.in_parts or (more and (length is None or len(data) < content_length(length)))):
            if not self.in_parts:
                self.in_parts = True
                self._client.begin_parts(self._status, self._fields)
            await self._client.write_part(data, not more)
        else:
            self._body += data
        if not more or (length is not None and not self.in_parts and len(self._body) >= content_length(length)):
            fields = [field for field in self._fields if field[0] != b"content-length"]
            self.answered.set_result(Reply(self._status, fields, self._body))


async def respond(application: Application, call: Call, exchange: Exchange | None = None, version: str = "1.1") -> Reply:
    """The application's answer; empty if `exchange`, the one of a connection, has written it in parts.

    Raises what the application raises before it has answered. The application may answer before the request body has arrived;
    it waits for the body only if it asks for it. It may keep running in the background after its answer.
    """
    if exchange is None:
        exchange = Exchange()
        exchange.deliver(await call.body(MAX_BODY_BYTES), True)
    running = asyncio.ensure_future(application(_scope(call, version), exchange.receive, exchange.send))
    try:
        ends: list[asyncio.Future[Any]] = [running, exchange.answered]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError as error:
        running.cancel(*error.args)
        raise
    if not exchange.answered.done():
        await running
        raise Failed("the application gave no answer")
    running.add_done_callback(_retrieve_exception)
    return exchange.answered.result()


def below_root(scope: Message) -> Message:
    """The scope of a request as if the application were at the root: without what the server (uvicorn's `--root-path`), or an
    application around this one, has put in front of the path.
    """
    root: str = scope.get("root_path", "")
    full: str = scope.get("path", "")
    path = full.removeprefix(root)
    if path == full or path[:1] not in ("/", "*"):
        return scope
    raw_path: bytes = scope["raw_path"]
    front = max((root.encode(), quote(root).encode()), key=raw_path.startswith)
    return {**scope, "root_path": "", "path": path, "raw_path": raw_path.removeprefix(front)}


def _retrieve_exception(running: "asyncio.Future[None]") -> None:
    """Mark an error after the answer as seen: the framework re-raises what it has already answered and logged."""
    if not running.cancelled():
        running.exception()


def _scope(call: Call, version: str) -> Message:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": version,
        "scheme": "http",
        "method": call.method,
        "path": call.path,
        "raw_path": call.raw_path,
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers.items()) if call.fields is None else call.fields,
        "client": call.client,
        "server": None,
    }
