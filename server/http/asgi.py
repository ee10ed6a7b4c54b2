"""Calls an ASGI application for one complete request and collects one complete answer: for small requests, without a server."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..errors import Failed
from .exchange import Call, Reply

Message = MutableMapping[str, Any]
Application = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

MAX_BODY_BYTES = 1 << 20
"""Larger request bodies are not served this way, because the body is passed in one piece."""


async def respond(application: Application, call: Call) -> Reply:
    """The application's answer, held in memory as a whole. Raises what the application raises before it has answered.

    The application may answer before the request body has arrived; it waits for the body only if it asks for it. It may keep
    running in the background after its answer.
    """
    exchange = Exchange(call)
    running = asyncio.ensure_future(application(_scope(call), exchange.receive, exchange.send))
    try:
        await asyncio.wait([running, exchange.answered], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        running.cancel()
        raise
    if not exchange.answered.done():
        await running
        raise Failed("the application gave no answer")
    running.add_done_callback(_retrieve_exception)
    return Reply(exchange.status, exchange.fields, bytes(exchange.body))


class Exchange:
    """ASGI's `receive` and `send` for one request, and the answer so far; `answered` is done when the answer is complete."""

    def __init__(self, call: Call) -> None:
        self.status = 500
        self.fields: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._call = call
        self._body_sent = False

    def __repr__(self) -> str:
        return f"<Exchange {self.status}, {len(self.body)} bytes>"

    async def receive(self) -> Message:
        """The request's body as one message; a second call never returns."""
        if self._body_sent:
            await asyncio.get_running_loop().create_future()
        self._body_sent = True
        return {"type": "http.request", "body": await self._call.body(MAX_BODY_BYTES), "more_body": False}

    async def send(self, message: Message) -> None:
        """Collect one message of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.fields = [(name, value) for name, value in message.get("headers", ()) if name != b"content-length"]
        else:
            self.body += message.get("body", b"")
            if not message.get("more_body", False) and not self.answered.done():
                self.answered.set_result(None)


def _retrieve_exception(running: "asyncio.Future[None]") -> None:
    """Mark an error after the answer as seen: the framework re-raises what it has already answered and logged."""
    if not running.cancelled():
        running.exception()


def _scope(call: Call) -> Message:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": call.method,
        "path": call.path,
        "raw_path": call.raw_path,
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers.items()),
        "client": call.client,
        "server": None,
    }
