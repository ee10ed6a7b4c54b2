"""When to start again what ended though nobody told it to: pure arithmetic."""

_STABLE = 5.0
"""Seconds after which a process that dies is started again at once; one that dies earlier waits, twice as long each time."""
_PAUSE = 0.1
_LONGEST_PAUSE = 10.0


class Backoff:
    """How long to wait before something that died is started again."""

    def __init__(self) -> None:
        self._started = 0.0
        self._pause = 0.0

    def started(self, now: float) -> None:
        """It was started, at this time in seconds."""
        self._started = now

    def pause(self, now: float) -> float:
        """It died at this time: the seconds to wait."""
        if now - self._started > _STABLE:
            self._pause = 0.0
            return 0.0
        self._pause = min(_LONGEST_PAUSE, max(_PAUSE, 2 * self._pause))
        return self._pause
