"""Runs long work in short steps, one per event-loop iteration, so that timers and small requests run in between."""

import asyncio
from collections import deque
from collections.abc import Generator
from typing import TypeVar

Returned = TypeVar("Returned")
Steps = Generator[None, None, Returned]
"""Work that yields wherever it may be interrupted, ideally every fraction of a millisecond, and returns its result."""


class TimeSlices:
    """Runs jobs one after another, in order; `len` is the number of unfinished jobs. Belongs to the event loop."""

    def __init__(self) -> None:
        self._jobs: deque[Steps[None]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Steps[None]) -> None:
        """Run `job` from the next iteration on, after earlier ones. What it raises goes to the loop's exception handler."""
        self._jobs.append(job)
        if len(self._jobs) == 1:
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        finished = True
        try:
            finished = next(self._jobs[0], True) is True
        finally:
            if finished:
                self._jobs.popleft()
            if self._jobs:
                asyncio.get_running_loop().call_soon(self._step)
