"""Keeps the event loop awake for a moment after an answer, where the next request is likely to come that soon."""

import asyncio
import time
from collections.abc import Callable

PATIENCE = 100_000
"""Nanoseconds to stay awake after an answer. Some 40 us pass before a client on the same machine has asked again."""
_LONGEST = 8 * PATIENCE
"""A longer pause counts as one of this length."""
_SHARE = 3
"""Each pause counts for 1 / 2**3 of the average: a single long one ends it, half a dozen short ones begin it again."""


def _call_soon(function: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(function)


class Awake:
    """Of one lane whose short models run on the event loop; belongs to that. `clock` is in nanoseconds.

    Problem: a client that asks again as soon as it has its answer lets the core sleep in between. To wake the core of a virtual
    machine takes longer than a short model, and its caches are cold then. Solution: while pauses are shorter than PATIENCE on
    average, the event loop looks for requests, of all connections, instead of sleeping, for PATIENCE at most. It runs whatever
    else it has to run, and other threads get the GIL and the core as always. So this costs a tenant whose requests come further
    apart nothing, and others a part of the time in which their core would be idle.
    """

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], object] = _call_soon, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._call_soon = call_soon
        self._clock = clock
        self._pause = _LONGEST
        self._answered = 0
        self._looking = False

    def __repr__(self) -> str:
        return f"<Awake {'looking' if self._looking else 'resting'}, pauses of {self._pause // 1000} us>"

    def arrived(self) -> None:
        """A request has come."""
        if self._answered:
            pause = min(self._clock() - self._answered, _LONGEST)
            self._pause += (pause - self._pause) >> _SHARE
            self._answered = 0

    def answered(self) -> None:
        """All requests are answered, and nothing is in flight."""
        self._answered = self._clock()
        if self._pause < PATIENCE and not self._looking:
            self._looking = True
            self._call_soon(self._look)

    def _look(self) -> None:
        """Called once in each iteration of the event loop, which does not sleep before the next."""
        if self._answered and self._clock() - self._answered < PATIENCE:
            self._call_soon(self._look)
        else:
            self._looking = False
