"""uvicorn as Greenlane runs it: without signals, and with 401 answers that wait for their turn, as `HttpConnection`'s do."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import uvicorn

from ...http.asgi import Application, Message
from ...http.connection_limits import Refusals

MAX_WAITING = 256
"""Answers that wait at a time; the rest are sent at once, as such connections cannot be closed."""


class Server(uvicorn.Server):
    """uvicorn that leaves signals alone: `should_exit` is set by other means."""

    def capture_signals(self) -> Any:
        return nullcontext()


class Paced:
    """An ASGI application whose 401 answers wait, for the connections that uvicorn answers: it reads little meanwhile."""

    def __init__(self, application: Application, refusals: Refusals) -> None:
        self._application = application
        self._refusals = refusals
        self._waiting = 0

    def __repr__(self) -> str:
        return f"<Paced, {self._waiting} answers wait>"

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        async def paced(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401 and self._waiting < MAX_WAITING:
                self._waiting += 1
                try:
                    await asyncio.sleep(self._refusals.wait())
                finally:
                    self._waiting -= 1
            await send(message)

        await self._application(scope, receive, paced)
