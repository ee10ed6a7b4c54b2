"""How long a tenant's work has been running: seen from outside, by looking now and then, so that no inference pays for it."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

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


QUICK = 0.01
"""Seconds after which a work that is still running is one that others should not wait for."""


class Working(Protocol):
    """Whose works these are."""

    @property
    def oldest(self) -> int | None:
        """The serial of the work that has been in flight the longest, if there is any."""


async def slow_first(workers: Mapping[str, Working]) -> tuple[list[str], list[str]]:
    """Those whose works take longer than QUICK now, and the others, so that these need not stand still while those end."""
    before = {name: worker.oldest for name, worker in workers.items()}
    if all(serial is None for serial in before.values()):
        return [], list(workers)
    await asyncio.sleep(QUICK)
    slow = [name for name, worker in workers.items() if before[name] is not None and worker.oldest == before[name]]
    return slow, [name for name in workers if name not in slow]
