"""Deadlines of requests that wait, and who is told once they have passed: by a timer, or before that by whoever looks.

An event loop runs its timers once in each of its turns, and a turn lasts as long as all takes that came for it. So whoever
is about to answer something looks first, and no deadline waits for more than one request to be answered.
"""

import asyncio
import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable

EARLY = 0.001
"""Seconds before its deadline that somebody may be told by the timer: event loops count in whole milliseconds."""


class Deadlines:
    """Belongs to the event loop. Deadlines are in seconds on the clock of `time.monotonic`, each with a number of its own."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._next = self._set_for = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._telling = False

    def __repr__(self) -> str:
        return f"<Deadlines {len(self)} waiting>"

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, deadline: float, number: int, tell: Callable[[], None]) -> None:
        """Call this, once, when that time has come."""
        insort(self._waiting, (deadline, number, tell))
        self._look_ahead()

    def remove(self, deadline: float, number: int) -> None:
        """Call nobody for this one, unless it was done already."""
        place = bisect_left(self._waiting, (deadline, number))
        if self._waiting[place : place + 1] and self._waiting[place][1] == number:
            del self._waiting[place]
            self._next = self._waiting[0][0] if self._waiting else math.inf  # A timer that is set may go off in vain.

    def look(self) -> None:
        """Tell those whose time has come; costs nothing to speak of where there is none."""
        if self._next < math.inf and time.monotonic() >= self._next:
            self._tell(time.monotonic())

    def close(self) -> None:
        """Call nobody any more, of those there are."""
        self._waiting.clear()
        self._next = math.inf
        self._cancel()

    def _go_off(self) -> None:
        self._timer, self._set_for = None, math.inf
        self._tell(time.monotonic() + EARLY)

    def _tell(self, until: float) -> None:
        """Whoever is told may look as well, which is for the one who tells to go on with."""
        if self._telling:
            return
        self._telling = True
        try:
            while self._waiting and self._waiting[0][0] <= until:
                _, _, tell = self._waiting.pop(0)
                tell()
        finally:
            self._telling = False
            self._look_ahead()

    def _look_ahead(self) -> None:
        self._next = self._waiting[0][0] if self._waiting else math.inf
        if self._next < self._set_for:
            self._cancel()
            self._set_for = self._next
            self._timer = asyncio.get_running_loop().call_later(self._next - time.monotonic(), self._go_off)

    def _cancel(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer, self._set_for = None, math.inf
