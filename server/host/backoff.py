"""How long to wait before what failed is begun again: a process or thread that ended unexpectedly, a copy. Pure arithmetic."""

_STABLE = 5.0
_FIRST_DELAY = 0.1
_MAX_DELAY = 10.0


class Backoff:
    """The delay before each restart; times and delays are in seconds.

    After a run of more than `stable` seconds the restart is immediate. After a shorter one the delay is `first`, and doubles
    each time up to `most`.
    """

    def __init__(self, first: float = _FIRST_DELAY, most: float = _MAX_DELAY, stable: float = _STABLE) -> None:
        self._first = first
        self._most = most
        self._stable = stable
        self._started = 0.0
        self._delay = 0.0

    def started(self, now: float) -> None:
        """It was started at this time."""
        self._started = now

    def delay(self, now: float) -> float:
        """How long to wait, given that it ended at this time."""
        if now - self._started > self._stable:
            self._delay = 0.0
            return 0.0
        self._delay = min(self._most, max(self._first, 2 * self._delay))
        return self._delay
