"""Deadlines of waiting requests, with a callback each.

Timers fire only between two iterations of the event loop, and one iteration may serve many connections. So expired deadlines
are also checked (`fire_due`) before each request and each completion is handled: a 504 is late by at most one request's
handling.
"""

import asyncio
import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable

EARLY = 0.001
"""Seconds by which the timer may fire before a deadline: event loops count in whole milliseconds."""


class Deadlines:
    """Belongs to the event loop. Deadlines are in seconds on the clock of `time.monotonic`; each has a unique number."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._next = self._set_for = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._firing = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, deadline: float, number: int, callback: Callable[[], None]) -> None:
        """Call this once, at this time."""
        insort(self._waiting, (deadline, number, callback))
        self._set_timer()

    def remove(self, deadline: float, number: int) -> None:
        """Do not call this one any more; does nothing if it was called already."""
        index = bisect_left(self._waiting, (deadline, number))
        if self._waiting[index : index + 1] and self._waiting[index][1] == number:
            del self._waiting[index]
            self._next = self._waiting[0][0] if self._waiting else math.inf  # The timer may fire once for nothing.

    def fire_due(self) -> None:
        """Call all callbacks whose deadline has passed; if there are none this costs one comparison."""
        if self._next < math.inf and time.monotonic() >= self._next:
            self._fire(time.monotonic())

    def close(self) -> None:
        """Remove all deadlines."""
        self._waiting.clear()
        self._next = math.inf
        self._cancel()

    def _on_timer(self) -> None:
        self._timer, self._set_for = None, math.inf
        self._fire(time.monotonic() + EARLY)

    def _fire(self, until: float) -> None:
        """A callback may call `fire_due` itself: then the loop that called it goes on with the rest."""
        if self._firing:
            return
        self._firing = True
        try:
            while self._waiting and self._waiting[0][0] <= until:
                _, _, callback = self._waiting.pop(0)
                callback()
        finally:
            self._firing = False
            self._set_timer()

    def _set_timer(self) -> None:
        self._next = self._waiting[0][0] if self._waiting else math.inf
        if self._next < self._set_for:
            self._cancel()
            self._set_for = self._next
            self._timer = asyncio.get_running_loop().call_later(self._next - time.monotonic(), self._on_timer)

    def _cancel(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer, self._set_for = None, math.inf
