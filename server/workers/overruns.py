"""How long a tenant's work has been running: seen from outside, by looking now and then, so that no inference pays for it."""

INTERVAL = 0.25
"""Seconds between two looks; a work may run so much longer than its limit."""
GIVING_UP = 5.0
"""Seconds for which a work may go on after it was told to end, before its tenant is given up: nothing ends a GPU's kernel."""


class Oldest:
    """The work of one tenant that has been in flight the longest: since when it is that. Works of a tenant end in order."""

    def __init__(self) -> None:
        self._serial: int | None = None
        self._since = 0.0

    def lasts(self, now: float, serial: int | None) -> float:
        """The oldest is this one now, or there is none. Returns for how many seconds at least it has been running."""
        if serial is None or serial != self._serial:
            self._serial, self._since = serial, now
        return now - self._since
