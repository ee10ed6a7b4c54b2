"""What the account said in the past, so that what was used since a certain time can be answered."""

from bisect import bisect_right
from collections import deque

from .usage import NS, Totals


class History:
    """Totals of the past: each that is added for `fine` nanoseconds, and then one in `step` for `coarse` nanoseconds. Pure."""

    def __init__(self, fine: int = 120 * NS, step: int = 60 * NS, coarse: int = 48 * 3600 * NS) -> None:
        self._fine_span, self._step, self._coarse_span = fine, step, coarse
        self._fine: deque[Totals] = deque()
        self._coarse: deque[Totals] = deque()

    def __repr__(self) -> str:
        return f"<History of {len(self._coarse)} and {len(self._fine)} totals>"

    def add(self, totals: Totals) -> None:
        """Remember the totals of now."""
        self._fine.append(totals)
        if not self._coarse or totals.at - self._coarse[-1].at >= self._step:
            self._coarse.append(totals)
        while totals.at - self._fine[0].at > self._fine_span:
            self._fine.popleft()
        while totals.at - self._coarse[0].at > self._coarse_span:
            self._coarse.popleft()

    def before(self, wall: int) -> Totals | None:
        """The last totals at or before a time in nanoseconds since 1970, or the oldest; None if there are none at all."""
        every = sorted({each.at: each for each in (*self._coarse, *self._fine)}.values(), key=lambda each: each.at)
        if not every:
            return None
        return every[max(0, bisect_right([each.wall for each in every], wall) - 1)]
