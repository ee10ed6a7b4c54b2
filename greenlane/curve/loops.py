"""Drive executors from one thread of their partition: back to back, one alone, or when requests are due.

As a worker of the server does, the thread has up to `depth` works on the stream: one where it runs them itself, as on cores,
else two. Requests that are due wait in order. They are not joined to batches.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from engines import Work

Enqueue = Callable[[], Work]
"""Puts the next request on the partition's stream."""

Ended = Literal["overloaded", "misses"] | None
"""Why requests were not sent any more."""

_SPUN = 200e-6
"""Seconds before a request is due from which the thread does not sleep: timers are late by up to so much."""


def back_to_back(enqueue: Enqueue, depth: int, seconds: float, least: int) -> float:
    """Requests a second with `depth` of them always on the stream, for so long and at least so many. Blocks."""
    flights = deque(enqueue() for _ in range(depth))
    flights.popleft().wait()
    began, done = time.perf_counter(), 0
    while done < least or time.perf_counter() - began < seconds:
        flights.append(enqueue())
        flights.popleft().wait()
        done += 1
    took = time.perf_counter() - began
    for work in flights:
        work.wait()
    return done / took


def alone(enqueue: Enqueue, seconds: float, least: int) -> list[float]:
    """The seconds that each of many requests takes, one after another. Blocks."""
    found: list[float] = []
    ends = time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < ends:
        began = time.perf_counter()
        enqueue().wait()
        found.append(time.perf_counter() - began)
    return found


def when_due(
    enqueue: Enqueue, depth: int, arrivals: Sequence[float], limit: float, tolerated: int, patience: float
) -> tuple[Ended, list[float]]:
    """The latency of requests that are due at these seconds from now, in order, from when each was due. Blocks.

    Ends early where it is clear that they are too many: "overloaded" when one took longer than `patience`, "misses" when more
    than `tolerated` took longer than `limit`. None: all were sent.
    """
    ended: Ended = None
    found: list[float] = []
    flights: deque[tuple[Work, float]] = deque()
    slower, start = 0, time.perf_counter()
    for due in (start + arrival for arrival in arrivals):
        while flights and (len(flights) >= depth or time.perf_counter() < due):
            latency = _end(flights)
            found.append(latency)
            slower += latency > limit
        if found and found[-1] > patience:
            ended = "overloaded"
        elif slower > tolerated:
            ended = "misses"
        if ended:
            break
        _sleep_until(due)
        flights.append((enqueue(), due))
    while flights:
        found.append(_end(flights))
    return ended, found


def _end(flights: deque[tuple[Work, float]]) -> float:
    """Wait for the oldest work; its latency."""
    work, due = flights.popleft()
    work.wait()
    return time.perf_counter() - due


def _sleep_until(due: float) -> None:
    left = due - time.perf_counter()
    if left > _SPUN:
        time.sleep(left - _SPUN)
    while time.perf_counter() < due:
        pass
