"""A tenant whose neighbours have to know it, in its HTTP process: when it has requests open, and whether it lends."""

import asyncio
import logging
import time

from ..link.activity import Activity
from .guard import Guard

log = logging.getLogger("greenlane.lending")

NOT_COMPARED, ALONE, MET, ENDED = 0, 1, 2, 3
"""A request that found another one open; one that did not, and one that did not and met a borrower; one that
has ended."""


class Neighbour:
    """One that does not lend. Belongs to the event loop. `begin` when a request's head has arrived, then `end` once, whatever
    becomes of it.
    """

    def __init__(self, activity: Activity) -> None:
        self.activity = activity
        activity.set_lends(False)

    def begin(self) -> int:
        """A request has come; what to call `end` with."""
        self.activity.begin()
        return NOT_COMPARED

    def end(self, kind: int, model: str = "", latency: int = 0) -> None:
        """It has ended; with an answer `model` is the key of its model, and `latency` the nanoseconds from its body to that."""
        self.activity.end()

    def close(self) -> None:
        """No request will come any more."""


class Lender(Neighbour):
    """One that lends. `limit` is the seconds that a work of a borrower may take."""

    def __init__(self, tenant: str, activity: Activity, limit: float) -> None:
        super().__init__(activity)
        self.guard = Guard(int(limit * 1e9))
        self._tenant = tenant
        self._lends = True
        self._logged = 0
        self._timer: asyncio.TimerHandle | None = None
        activity.set_lends(True)

    def begin(self) -> int:
        activity = self.activity
        activity.begin()
        if activity.open > 1:
            return NOT_COMPARED
        return MET if activity.is_met() else ALONE

    def end(self, kind: int, model: str = "", latency: int = 0) -> None:
        self.activity.end()
        if latency and kind != NOT_COMPARED:
            now = time.monotonic_ns()
            self.guard.learn(model, latency, kind == MET, now)
            if self.guard.lends != self._lends:
                self._follow(now)

    def close(self) -> None:
        """Lend nothing any more."""
        self.activity.set_lends(False)
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _follow(self, now: int) -> None:
        """Do what the guard says now."""
        stops, self._lends = self.guard.stops, self.guard.lends
        self.activity.set_lends(self._lends)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if not self._lends:
            self._timer = asyncio.get_running_loop().call_later((self.guard.until - now) / 1e9, self._look)
            if stops > self._logged:
                log.warning("%s lends nothing for now: %s", self._tenant, self.guard.reason)
        self._logged = stops

    def _look(self) -> None:
        now = time.monotonic_ns()
        self._timer = None
        self.guard.look(now)
        self._follow(now)
