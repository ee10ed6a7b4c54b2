"""Limits the loads and unloads of one tenant: one at a time, and a few that wait."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from ..errors import QueueFull

MAX_WAITING = 4
"""The most that may wait besides the current one."""
PAUSE = 0.02
"""Seconds between two changes. Each takes a few milliseconds of the supervisor's interpreter, which all tenants share, even
if it is refused there; so a tenant that sends them in a loop leaves most of it to the others.
"""


class ModelChanges:
    """Belongs to the event loop of the tenant's HTTP process."""

    def __init__(self) -> None:
        self.asked = 0
        """Loads and unloads that wait, and the current one."""
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ModelChanges {self.asked} asked for>"

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count as waiting or current within the block. Raises QueueFull if there are too many."""
        if self.asked > MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} loads and unloads wait already, and no more may; ask again when one was answered")
        self.asked += 1
        try:
            yield
        finally:
            self.asked -= 1

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Wait for earlier changes. No other begins within the block, nor for PAUSE after it."""
        await self._lock.acquire()
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(PAUSE, self._lock.release)


def is_change(path: str) -> bool:
    """Whether this path is of a load or unload request."""
    return path.startswith("/v2/repository/models/") and path.endswith(("/load", "/unload"))
