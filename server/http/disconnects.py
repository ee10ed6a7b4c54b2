"""Detects clients that disconnect while their request waits under ASGI, at almost no cost for requests answered quickly.

Listening for a disconnect needs one task per request, which costs more than a short inference. So a waiting request is only
recorded, and a timer that runs every few milliseconds starts a listener for each request that was already there the last time.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from ..errors import ClientGone

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass(slots=True)
class Watch:
    """A waiting request, and the task that listens for its disconnect, once started."""

    answer: "asyncio.Future[Any]"
    receive: Receive
    seen: bool = False
    task: "asyncio.Task[None] | None" = None


class DisconnectWatcher:
    """Fails the future of a waiting request with ClientGone when its client disconnects. Belongs to the event loop.

    A listener is started after a request has waited `patience` to twice `patience` seconds.
    """

    def __init__(self, patience: float = 0.01) -> None:
        self._patience = patience
        self._watches: dict[int, Watch] = {}
        self._scheduled = False

    def watch(self, answer: "asyncio.Future[Any]", receive: Receive) -> None:
        """Watch a request that starts to wait for `answer`; its body must have been received."""
        self._watches[id(answer)] = Watch(answer, receive)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(self._patience, self._check)

    def unwatch(self, answer: "asyncio.Future[Any]") -> None:
        """Stop watching: the request no longer waits."""
        watch = self._watches.pop(id(answer))
        if watch.task:
            watch.task.cancel()
            watch.task = None  # Breaks the cycle of task and watch, which only the garbage collector would free.

    def _check(self) -> None:
        for watch in self._watches.values():
            if watch.seen and watch.task is None:
                watch.task = asyncio.ensure_future(_listen(watch))
            watch.seen = True
        self._scheduled = bool(self._watches)
        if self._scheduled:
            asyncio.get_running_loop().call_later(self._patience, self._check)


async def _listen(watch: Watch) -> None:
    while (await watch.receive())["type"] != "http.disconnect":
        pass
    if not watch.answer.done():
        watch.answer.set_exception(ClientGone("the client closed its connection"))
