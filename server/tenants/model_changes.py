"""Loads and unloads that one tenant asks for: one at a time, a few that wait, and no others."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from ..errors import QueueFull

MOST_WAITING = 4
"""Of one tenant, besides the one whose turn it is."""
PAUSE = 0.02
"""Seconds after each. It takes a few milliseconds of the interpreter of the device's process, which all tenants share, even if
it is refused there: so one that asks again and again leaves them most of it.
"""


class ModelChanges:
    """Belongs to the event loop of the process that speaks HTTP with the tenant."""

    def __init__(self, pause: float = PAUSE) -> None:
        self._pause = pause
        self._asked = 0
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ModelChanges {self._asked} asked for>"

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Be one of those that wait or have their turn. Raises QueueFull if there are as many as may be."""
        if self._asked > MOST_WAITING:
            raise QueueFull(f"{MOST_WAITING} loads and unloads wait already, and no more may; ask again when one was answered")
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn, and have it; a pause follows before the next."""
        await self._lock.acquire()
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(self._pause, self._lock.release)


def is_change(path: str) -> bool:
    """Whether this path is for a model to be loaded or unloaded."""
    return path.startswith("/v2/repository/models/") and path.endswith(("/load", "/unload"))
