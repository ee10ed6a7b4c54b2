"""Requests of a connection that a coroutine answers: administration, metadata, and inferences with anything to negotiate."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from . import asgi
from .body import Body
from .exchange import Call, Reply
from .head import Head
from .infer import Infer
from .inference import refusal


class Client(asgi.Client, Protocol):
    """The connection that a request came by."""

    def answer(self, head: Head, reply: Reply) -> None:
        """Finish the request with this reply."""

    def end_parts(self, head: Head) -> None:
        """Finish the request, whose answer was written in parts."""

    def abort(self) -> None:
        """Close at once."""


class Calls:
    """Answers such requests with `infer` or `application`, each in a task of its own, which `tasks` holds until it ends."""

    def __init__(self, infer: Infer, application: asgi.Application, tasks: "set[asyncio.Task[None]]") -> None:
        self._infer = infer
        self._application = application
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<Calls, {len(self._tasks)} running>"

    def start(
        self, head: Head, transport: Any, client: Client, through_application: bool
    ) -> "tuple[asyncio.Task[None], Callable[[bytes, bool], int]]":
        """Begin to answer; the task, and what to call with each piece of the body: see `asgi.Exchange.deliver`."""
        exchange = asgi.Exchange(client)
        peer = transport.get_extra_info("peername")
        read = Body(head.headers, exchange.receive).read
        call = Call(head.method, head.path, head.query, head.headers, read, None, peer and peer[:2], head.fields)
        task = asyncio.get_running_loop().create_task(self._respond(head, call, exchange, client, through_application))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task, exchange.deliver

    async def _respond(
        self, head: Head, call: Call, exchange: asgi.Exchange, client: Client, through_application: bool
    ) -> None:
        reply: Reply | None
        try:
            if head.is_call and not through_application:
                reply = await self._infer.answer(call)
            else:
                reply = await asgi.respond(self._application, call, exchange, "1.0" if head.is_http_1_0 else "1.1")
        except Exception as error:
            if exchange.in_parts:
                client.abort()
                return
            reply = refusal(error, None)
        if exchange.in_parts:
            client.end_parts(head)
        elif reply:
            client.answer(head, reply)
