"""Work that holds up the event loop, a step in each of its turns, so that timers and small requests run in between."""

import asyncio
from collections import deque
from collections.abc import Generator
from typing import TypeVar

Returned = TypeVar("Returned")
Steps = Generator[None, None, Returned]
"""Work that yields wherever it may be interrupted, each time after a fraction of a millisecond if it can."""


class Turns:
    """Takes works to their ends in the order they came; `len` is how many have not ended. Belongs to the event loop."""

    def __init__(self) -> None:
        self._works: deque[Steps[None]] = deque()

    def __repr__(self) -> str:
        return f"<Turns {len(self)} waiting>"

    def __len__(self) -> int:
        return len(self._works)

    def add(self, work: Steps[None]) -> None:
        """Begin in the loop's next turn, or after what came before; what the work raises is the loop's to report."""
        self._works.append(work)
        if len(self._works) == 1:
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        over = True
        try:
            over = next(self._works[0], True) is True
        finally:
            if over:
                self._works.popleft()
            if self._works:
                asyncio.get_running_loop().call_soon(self._step)
