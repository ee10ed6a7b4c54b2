"""How long to wait before a process or thread that ended unexpectedly is started again. Pure arithmetic."""

_STABLE = 5.0
"""After a run of more than so many seconds the restart is immediate. After a shorter one the delay doubles each time."""
_FIRST_DELAY = 0.1
_MAX_DELAY = 10.0


class Backoff:
    """The delay before each restart; times and delays are in seconds."""

    def __init__(self) -> None:
        self._started = 0.0
        self._delay = 0.0

    def started(self, now: float) -> None:
        """It was started at this time."""
        self._started = now

    def delay(self, now: float) -> float:
        """How long to wait, given that it ended at this time."""
        if now - self._started > _STABLE:
            self._delay = 0.0
            return 0.0
        self._delay = min(_MAX_DELAY, max(_FIRST_DELAY, 2 * self._delay))
        return self._delay
