"""Whether a work goes to its tenant's home partition or to the wide one, which has granules that other tenants lend. Pure.

A work goes wide if every lender of those granules rests and lends, nothing of the worker is in flight, and the time that such a
work takes wide is known and at most what the lenders allow. What is not known is home first. Then it is tried: at once if even
the time at home is within that limit, and otherwise only if it could be with all the units that the wide partition has more,
and once all lenders have rested for SETTLED; then the longest that a lender may wait is the time at home. A work that turns out
to be too long, or no faster wide, is not tried again for RETRY, and for twice as long each further time.

The launch loop decides by the same rules (launch_loop/stretching.h); a test compares both. All times are nanoseconds. Why works
stayed at home is counted, so that an operator sees what to change.
"""

from typing import Final, NamedTuple

from ..link.messages import ModelKey

SETTLED: Final = 100_000_000
RETRY: Final = 1_000_000_000
LONGEST_RETRY: Final = 256_000_000_000

WIDE: Final = 0
IN_FLIGHT: Final = 1
LENDER_BUSY: Final = 2
LENDER_STOPPED: Final = 3
NOT_MEASURED: Final = 4
TOO_LONG: Final = 5
NO_FASTER: Final = 6
FENCED: Final = 7
"""What `decide` returns: that a work goes wide, or why it stays at home. LENDER_STOPPED: a lender has stopped for now.
NOT_MEASURED: what the work takes at home or wide is not known, or no longer, and the lenders have not rested for long enough to
try. FENCED is what `fence` says, which is asked before."""
WHY_HOME: Final = ("in_flight", "owner_busy", "owner_stopped", "not_measured", "too_long", "no_faster", "fenced")
"""The names of those after WIDE, in order, in the admin API and in metrics."""
BUSY: Final = -1
STOPPED: Final = -2
"""In place of when the lenders began to rest: one has a request open; one lends nothing for now."""


class Times:
    """What works of one model and shapes take: `home` and `wide`, 0 if that is not known. `retry_at` is when a time that is too
    long is forgotten, 0 for one that is not; `wait` is how long that takes the next time.
    """

    __slots__ = ("home", "retry_at", "wait", "wide")

    def __init__(self) -> None:
        self.home = self.wide = self.retry_at = 0
        self.wait: int = RETRY

    def known(self, now: int) -> int:
        """The time wide; 0 if it is not known, or forgotten by now."""
        return 0 if self.retry_at and now >= self.retry_at else self.wide

    def learn_home(self, took: int) -> None:
        """A work took this long at home."""
        self.home = towards(self.home, took)

    def learn_wide(self, took: int, limit: int, now: int) -> None:
        """A work took this long on the wide partition, where no lender interfered."""
        self.wide = towards(self.known(now), took)
        if self.wide <= limit and self.wide < self.home:
            self.retry_at, self.wait = 0, RETRY
        else:
            self.retry_at, self.wait = now + self.wait, min(2 * self.wait, LONGEST_RETRY)


class Measured(NamedTuple):
    """What works of one model and shapes took at home and wide, as of late; 0 if that is not known."""

    model: ModelKey
    home: int
    wide: int

    def least(self, home: int, wide: int) -> int:
        """The shortest that one may take wide: what it took there, or what it would if all units there helped."""
        return self.wide or self.home * home // wide


def decide(times: Times, now: int, limit: int, home: int, wide: int, in_flight: bool, rested_since: int) -> int:
    """Whether a work with these times goes wide now: WIDE, or why not.

    `limit` is the longest that the lenders allow; `home` and `wide` are the units of both partitions; `rested_since` is when
    the last of the lenders began to rest, or BUSY or STOPPED.
    """
    if in_flight:
        return IN_FLIGHT
    if rested_since < 0:
        return LENDER_BUSY if rested_since == BUSY else LENDER_STOPPED
    if known := times.known(now):
        if known > limit:
            return TOO_LONG
        return WIDE if known < times.home else NO_FASTER
    if not times.home:
        return NOT_MEASURED
    if times.home * home > limit * wide:
        return TOO_LONG
    return WIDE if times.home <= limit or now - rested_since >= SETTLED else NOT_MEASURED


def towards(known: int, took: int) -> int:
    """The new estimate: an eighth of the way to what was seen, so that one long work is no reason to change anything.

    0 is unknown, and never returned.
    """
    if not known:
        return took or 1
    return (known + (took - known) // 8 if took > known else known - (known - took) // 8) or 1
