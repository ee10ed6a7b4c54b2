"""Changes the link over which a lane sends tickets, once nothing is in flight on the old one, and the tasks that wait."""

import asyncio
import math
from collections.abc import Callable
from functools import partial

from ..link.ring import Link
from .scheduler import Scheduler


class Waiters:
    """Conditions that are checked when `wake` is called. Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], Callable[[], object]]] = []

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once this is so: now, or when it is so at a call of `wake`."""
        if not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.call_when(condition, partial(_end, waiter))
            await waiter

    def call_when(self, condition: Callable[[], bool], function: Callable[[], object]) -> None:
        """Call this once, in the first call of `wake` in which it is so."""
        self._waiting.append((condition, function))

    def wake(self) -> None:
        """Something has changed."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for condition, function in waiting:
            if condition():
                function()
            else:
                self._waiting.append((condition, function))


def _end(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():  # What waits may have been cancelled.
        waiter.set_result(None)


class Relinking:
    """Of one lane; belongs to the event loop. While it is changed, and while it is cut off, the scheduler launches nothing.

    `waiters` are woken when a work has ended. `use` has the lane use another link, and `launch` what has waited for that.
    """

    def __init__(self, scheduler: Scheduler, waiters: Waiters, use: Callable[[Link], None], launch: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._waiters = waiters
        self._use = use
        self._launch = launch
        self._changing = asyncio.Lock()
        self._cut_off = False

    def cut_off(self) -> None:
        """The other side of the link has ended: launch nothing before the next `change`."""
        self._cut_off = self._scheduler.held = True

    async def change(self, link: Link, limit: float) -> bool:
        """Use this link once nothing is in flight; False, and nothing has changed, if something is for `limit` seconds."""
        async with self._changing:
            self._scheduler.held = True
            try:
                ended = await self._all_ended(limit)
                if ended:
                    self._use(link)
                    self._cut_off = False
            finally:
                self._scheduler.held = self._cut_off
                self._launch()
        return ended

    async def _all_ended(self, limit: float) -> bool:
        """Wait until nothing is in flight, for at most so many seconds; whether that is so."""
        try:
            async with asyncio.timeout(None if limit == math.inf else limit):
                await self._waiters.wait_until(lambda: not self._scheduler.busy)
        except TimeoutError:
            return not self._scheduler.busy
        return True
