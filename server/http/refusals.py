"""The pace of 401 answers: a flood of requests without the right key waits, so that refusing them takes little of the cores."""

import time
from collections.abc import Callable

RATE = 100
"""Answers a second, and as many at once after a second without any."""
MAX_WAIT = 2.0
"""Seconds that one answer waits, at most: where more than 200 wait, they are sent faster than `RATE`."""


class Refusals:
    """Belongs to the event loop. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0
        """When the next answer could be sent, if each took its part of a second."""

    def __repr__(self) -> str:
        return f"<Refusals, the last waits {max(0.0, self._next - self._clock()):.2f} s>"

    def wait(self) -> float:
        """Count one more; for how many seconds it has to wait, 0 while there are few."""
        now = self._clock()
        self._next = min(max(self._next, now - 1.0) + 1 / RATE, now + MAX_WAIT)
        return max(0.0, self._next - now)
