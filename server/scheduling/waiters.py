"""Tasks that wait until something about a lane is so."""

import asyncio
from collections.abc import Callable


class Waiters:
    """Conditions that are checked when `wake` is called. Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def __repr__(self) -> str:
        return f"<Waiters {len(self._waiting)} waiting>"

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once this is so: now, or when it is so at a call of `wake`."""
        if not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((condition, waiter))
            await waiter

    def wake(self) -> None:
        """Something has changed."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for condition, waiter in waiting:
            if not condition():
                self._waiting.append((condition, waiter))
            elif not waiter.done():
                waiter.set_result(None)
