"""The timer for a batch that waits for more requests."""

import asyncio
import math
import time
from collections.abc import Callable


class BatchTimer:
    """Calls `launch` at one time, on the clock of `time.monotonic`. Belongs to the event loop."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch = launch
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        """Whether a time is set, and has not been reached."""
        return self._timer is not None

    def __repr__(self) -> str:
        return f"<BatchTimer {'set' if self.active else 'not set'}>"

    def set(self, due: float | None) -> None:
        """Call at this time, instead of any that was set before; None: not at all."""
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if due is not None:  # Event loops count in whole milliseconds.
            delay = math.ceil((due - time.monotonic()) * 1000) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._launch()
