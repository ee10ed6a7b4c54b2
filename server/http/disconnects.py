"""Notices clients that go away while their request waits, at next to no cost for those that are answered at once.

Listening to a connection takes a task of its own, which costs more than a short inference. So requests are only noted
when they begin to wait, and one look every few milliseconds starts to listen for those that the look before saw already.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from ..errors import ClientGone

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass(slots=True)
class Watch:
    """A request that waits, and the task that listens to its client once there is one."""

    answer: "asyncio.Future[Any]"
    receive: Receive
    seen: bool = False
    task: "asyncio.Task[None] | None" = None


class Departures:
    """Ends the wait for an answer with ClientGone when the client disconnects. Belongs to the event loop.

    `patience` is how long, in seconds, a request may wait before anyone listens whether its client is still there; it may
    become twice that.
    """

    def __init__(self, patience: float = 0.01) -> None:
        self._patience = patience
        self._waiting: dict[int, Watch] = {}
        self._looking = False

    def __repr__(self) -> str:
        return f"<Departures {len(self._waiting)} waiting>"

    def note(self, answer: "asyncio.Future[Any]", receive: Receive) -> None:
        """This request begins to wait; its body has been received."""
        self._waiting[id(answer)] = Watch(answer, receive)
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(self._patience, self._look)

    def forget(self, answer: "asyncio.Future[Any]") -> None:
        """This request waits no more."""
        watch = self._waiting.pop(id(answer))
        if watch.task:
            watch.task.cancel()
            watch.task = None  # It holds the watch as well, and the two would be left to the garbage collector.

    def _look(self) -> None:
        for watch in self._waiting.values():
            if watch.seen and watch.task is None:
                watch.task = asyncio.ensure_future(_listen(watch))
            watch.seen = True
        self._looking = bool(self._waiting)
        if self._looking:
            asyncio.get_running_loop().call_later(self._patience, self._look)


async def _listen(watch: Watch) -> None:
    while (await watch.receive())["type"] != "http.disconnect":
        pass
    if not watch.answer.done():
        watch.answer.set_exception(ClientGone("the client closed its connection"))
