"""Requests of a connection that a coroutine answers: administration, metadata, and inferences with anything to negotiate."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from . import asgi
from .exchange import Call, Reply
from .head import Head
from .infer import Infer

OnReply = Callable[[Head, Reply], None]


class Calls:
    """Answers such requests with `infer` or `application`, each in a task of its own, which `tasks` holds until it ends."""

    def __init__(self, infer: Infer, application: asgi.Application, tasks: "set[asyncio.Task[None]]") -> None:
        self._infer = infer
        self._application = application
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<Calls, {len(self._tasks)} running>"

    def start(
        self, head: Head, transport: Any, received: Callable[[], int], on_reply: OnReply
    ) -> "tuple[asyncio.Task[None], Callable[[bytes], None]]":
        """Begin to answer; the task, and what to call with the complete body. `received` returns how much of it has arrived."""
        loop, client = asyncio.get_running_loop(), transport.get_extra_info("peername")
        body: asyncio.Future[bytes] = loop.create_future()

        async def read(limit: int, grow: Callable[[int], None] | None = None) -> bytes:
            return await body

        call = Call(head.method, head.path, head.query, head.headers, read, None, client and client[:2], received)
        task = loop.create_task(self._respond(head, call, on_reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task, partial(_resolve, body)

    async def _respond(self, head: Head, call: Call, on_reply: OnReply) -> None:
        if head.is_infer and not head.has_origin:  # With an Origin, the application decides about CORS.
            reply = await self._infer.answer(call)
        else:
            reply = await asgi.respond(self._application, call)
        if reply:
            on_reply(head, reply)


def _resolve(future: "asyncio.Future[bytes]", body: bytes) -> None:
    if not future.done():
        future.set_result(body)
