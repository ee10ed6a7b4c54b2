"""One whole request through an ASGI application, to one whole answer: for small ones, where there is no server in between."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..errors import Failed
from .exchange import Call, Reply

Message = MutableMapping[str, Any]
Application = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

MOST_BODY = 1 << 20
"""Bytes of a body that is taken whole."""


async def respond(application: Application, call: Call) -> Reply:
    """What the application answers. Its answer is kept whole in memory; what it raises instead of answering is raised.

    It may answer before the body is there, which it is given once it asks for it. What it does after its answer goes on by
    itself.
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
    running.add_done_callback(_forget)
    return Reply(exchange.status, exchange.fields, bytes(exchange.body))


class Exchange:
    """The two functions that ASGI speaks through, and what was said; `answered` is done once all of the answer was."""

    def __init__(self, call: Call) -> None:
        self.status = 500
        self.fields: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._call = call
        self._told = False

    def __repr__(self) -> str:
        return f"<Exchange {self.status}, {len(self.body)} bytes>"

    async def receive(self) -> Message:
        """The request's body; nothing comes after it."""
        if self._told:
            await asyncio.get_running_loop().create_future()
        self._told = True
        return {"type": "http.request", "body": await self._call.body(MOST_BODY), "more_body": False}

    async def send(self, message: Message) -> None:
        """A part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.fields = [(name, value) for name, value in message.get("headers", ()) if name != b"content-length"]
        else:
            self.body += message.get("body", b"")
            if not message.get("more_body", False) and not self.answered.done():
                self.answered.set_result(None)


def _forget(running: "asyncio.Future[None]") -> None:
    """Frameworks tell the server of an error that they have answered and logged already."""
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
