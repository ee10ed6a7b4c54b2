"""A tenant whose neighbours have to know it, in its HTTP process: when it has requests open, and whether it lends.

That a `Guard` judges by the tenant's own latencies, when a request met a borrower and when it did not. Only requests that found
no other one open are compared, as others wait for each other anyway; each model is compared with itself. Two things are
compared:

- The median: every request of the first kind met a borrower, so most of what lending costs is in the middle of them.
- The tail, for borrowers that cost some requests much and others nothing: how many that met one are later than the slowest
  twentieth of the others, and than the slowest hundredth (their p99), by more than a borrower may cost. `critical` says how
  many are too many to be chance. The p99 of those that met a borrower is not compared itself: of some dozens it would be their
  longest, which any other noise may be.
"""

import asyncio
import logging
import time
from bisect import bisect_right
from collections import deque
from functools import lru_cache
from typing import NamedTuple

from ..link.activity import Activity

log = logging.getLogger("greenlane.lending")

ENOUGH = 16
"""Requests of a model, of each kind, that are compared."""
_KEPT = 1024
TAILS = 20, 100
"""One in so many of the requests that met no borrower is slower than what is compared."""
CHANCE = 0.001
"""How likely so many late requests, of either tail, may be where lending costs nothing, for it to be stopped."""
TOLERANCE = 0.15
"""How much longer the median may be that met a borrower, unless the longest work of a borrower is more."""
FIRST_PAUSE, LONGEST_PAUSE = 1_000_000_000, 300_000_000_000
"""Nanoseconds for which nothing is lent after the first miss, and at most: each further one doubles it."""
MEASURING = 2_000_000_000
"""Nanoseconds for which nothing is lent at most, to see requests that meet no borrower."""
STALE = 60_000_000_000
"""Nanoseconds after which requests that met no borrower say nothing any more."""
_MOST_MODELS = 256


class _Tail(NamedTuple):
    """The `rank`-th longest of the requests that met no borrower, in nanoseconds."""

    rank: int
    latency: int


class _Baseline(NamedTuple):
    """Of `size` requests that met no borrower: their median in nanoseconds, and a tail for each of TAILS."""

    size: int
    median: int
    tails: tuple[_Tail, ...]


class _Latencies:
    """Those of one model, in nanoseconds: `compared` of those that met a borrower, of which `late` were late by each tail; and
    `alone`, the others, of which `fresh` came since the baseline was made.
    """

    def __init__(self) -> None:
        self.met: list[int] = []
        self.alone: deque[int] = deque(maxlen=_KEPT)
        self.alone_at = 0
        self.compared = 0
        self.late = [0] * len(TAILS)
        self.fresh = 0
        self._baseline = _Baseline(0, 0, ())

    def baseline(self) -> _Baseline:
        """Made again once half of them are new, so that each is sorted twice at most."""
        if 2 * self.fresh >= self._baseline.size:
            ordered, size = sorted(self.alone), len(self.alone)
            ranks = [max(1, size // each) for each in TAILS]
            tails = tuple([_Tail(rank, ordered[-rank]) for rank in ranks])
            self._baseline, self.fresh = _Baseline(size, ordered[size // 2], tails), 0
        return self._baseline

    def forget_met(self) -> None:
        self.met.clear()
        self.forget_compared()

    def forget_compared(self) -> None:
        self.compared, self.late = 0, [0] * len(TAILS)


class Guard:
    """Whether a tenant lends. Pure. `limit` is what a work of a borrower may take; all times are nanoseconds on one clock.

    `reason` says, after it has stopped, why.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._models: dict[str, _Latencies] = {}
        self._pause = FIRST_PAUSE
        self._lent_since = 0
        self._measured: _Latencies | None = None
        self.until = 0
        """When it lends again; 0 while it lends."""
        self.stops = 0
        self.reason = ""

    @property
    def lends(self) -> bool:
        """Whether the tenant lends now."""
        return not self.until

    def look(self, now: int) -> None:
        """Lend again, if it is time."""
        if self.until and now >= self.until:
            self._lend(now)

    def learn(self, model: str, latency: int, met: bool, now: int) -> None:
        """A request that found no other one open was answered; `met`: when it came, a borrower used the granules."""
        self.look(now)
        found = self._models.get(model)
        if found is None:
            if len(self._models) >= _MOST_MODELS:
                self._models.clear()
            found = self._models[model] = _Latencies()
        if not met:
            found.alone.append(latency)
            found.alone_at = now
            found.fresh += 1
            if found is self._measured and len(found.alone) >= ENOUGH:
                self._lend(now)
        elif self.lends:
            found.met.append(latency)
            if len(found.met) >= ENOUGH:
                self._judge(model, found, now)

    def _judge(self, model: str, found: _Latencies, now: int) -> None:
        if now - found.alone_at > STALE:
            found.alone.clear()
            found.fresh = _KEPT
        if len(found.alone) < ENOUGH:
            self._measured, self.until = found, now + MEASURING
            return
        if not (why := self._missed(found)):
            if now - self._lent_since > self._pause:
                self._pause = FIRST_PAUSE
            return
        self.stops += 1
        self.until = now + self._pause
        name = model.rpartition("#")[0] or model
        self.reason = f"requests of {name} that met a borrower {why}; nothing is lent for {self._pause / 1e9:g} s"
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _missed(self, found: _Latencies) -> str:
        """By what those that met a borrower miss the others; empty if they do not."""
        if found.compared >= _KEPT:
            found.forget_compared()
        base, met = found.baseline(), sorted(found.met)
        lasts = [tail.latency + max(TOLERANCE * tail.latency, self._limit) for tail in base.tails]
        found.compared += len(met)
        found.late = [late + len(met) - bisect_right(met, last) for late, last in zip(found.late, lasts, strict=True)]
        found.met.clear()
        middle = met[len(met) // 2]
        if middle - base.median > max(TOLERANCE * base.median, self._limit):
            return f"took {middle / 1e6:.2f} ms, and others {base.median / 1e6:.2f} ms (medians)"
        for tail, last, late in zip(base.tails, lasts, found.late, strict=True):
            if late and late >= critical(base.size, tail.rank, found.compared, CHANCE / len(TAILS)):
                return (
                    f"took more than {last / 1e6:.2f} ms in {late} of {found.compared} cases, and {tail.rank} of "
                    f"{base.size} others {tail.latency / 1e6:.2f} ms or more"
                )
        return ""

    def _lend(self, now: int) -> None:
        self.until, self._lent_since, self._measured = 0, now, None
        for each in self._models.values():
            each.forget_met()


@lru_cache(maxsize=1024)
def critical(earlier: int, rank: int, new: int, chance: float) -> int:
    """The fewest of `new` values above the `rank`-th largest of `earlier` ones that are less likely than `chance`, if all are
    alike; more than `new` if no number of them is.

    If m earlier and n new values come from one continuous distribution, every order of them is equally likely, whatever that
    distribution is. So the number of new ones above the r-th largest earlier one has a known distribution, also for few values:
    E. J. Gumbel and H. von Schelling, "The Distribution of the Number of Exceedances", Annals of Mathematical Statistics 21
    (1950).
    """
    likely = 1.0
    for index in range(rank):
        likely *= (earlier - index) / (new + earlier - index)
    at_most = 0.0
    for count in range(new + 1):
        at_most += likely
        if 1 - at_most < chance:
            return count + 1
        likely *= (count + rank) * (new - count) / ((count + 1) * (new - count - 1 + earlier - rank + 1))
    return new + 1


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
