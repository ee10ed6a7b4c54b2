"""Whether a work goes to its tenant's home partition or to the wide one, which has granules that other tenants lend. Pure.

A work goes wide if every owner of those granules rests and lends, nothing of the worker is in flight, and the time that such a
work takes wide is known and at most what the owners allow. What is not known is home first. Then it is tried: at once if even
the time at home is within that limit, and otherwise only if it could be with all the units that the wide partition has more,
and once all owners have rested for SETTLED; then the longest that an owner may wait is the time at home. A work that turns out
to be too long, or no faster wide, is not tried again for RETRY, and for twice as long each further time.

The launch loop decides by the same rules (launch_loop/stretching.h); a test compares both. All times are nanoseconds.
"""

from typing import Final

SETTLED: Final = 100_000_000
RETRY: Final = 1_000_000_000
LONGEST_RETRY: Final = 256_000_000_000


class Times:
    """What works of one model and shapes take: `home` and `wide`, 0 if that is not known. `retry_at` is when a time that is too
    long is forgotten, 0 for one that is not; `wait` is how long that takes the next time.
    """

    __slots__ = ("home", "retry_at", "wait", "wide")

    def __init__(self) -> None:
        self.home = self.wide = self.retry_at = 0
        self.wait: int = RETRY

    def __repr__(self) -> str:
        return f"<Times {self.home} ns at home, {self.wide} ns wide>"

    def known(self, now: int) -> int:
        """The time wide; 0 if it is not known, or forgotten by now."""
        return 0 if self.retry_at and now >= self.retry_at else self.wide

    def learn_home(self, took: int) -> None:
        """A work took this long at home."""
        self.home = _towards(self.home, took) or 1

    def learn_wide(self, took: int, limit: int, now: int) -> None:
        """A work took this long on the wide partition, where no owner interfered."""
        self.wide = _towards(self.known(now), took) or 1
        if self.wide <= limit and self.wide < self.home:
            self.retry_at, self.wait = 0, RETRY
        else:
            self.retry_at, self.wait = now + self.wait, min(2 * self.wait, LONGEST_RETRY)


def goes_wide(times: Times, now: int, limit: int, home: int, wide: int, in_flight: bool, rested_since: int) -> bool:
    """Whether a work with these times goes wide now.

    `limit` is the longest that the owners allow; `home` and `wide` are the units of both partitions; `rested_since` is when the
    last of the owners began to rest, -1 if one of them does not rest or does not lend.
    """
    if in_flight or rested_since < 0:
        return False
    if known := times.known(now):
        return known <= limit and known < times.home
    if not 0 < times.home * home <= limit * wide:
        return False
    return times.home <= limit or now - rested_since >= SETTLED


def _towards(known: int, took: int) -> int:
    """The new estimate: an eighth of the way to what was seen, so that one long work is no reason to change anything."""
    if not known:
        return took
    return known + (took - known) // 8 if took > known else known - (known - took) // 8
