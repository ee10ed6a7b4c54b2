"""When works may begin, so that what they move over PCIe stays within the tenant's share while neighbours work (`fence`).

Each direction has a time from which the next work may begin. A work puts it off by what its bytes take at the tenant's rate. A
work begins once both have come; what it moves itself does not matter for that, so tickets stay in order, and a small one waits
for no longer than the bytes of those before it take. In any time the works that begin move at most the rate times that time and
CATCH_UP, and one work more. While all neighbours rest nothing waits, and nothing is put off.

The launch loop goes by the same rules and the same numbers (launch_loop/pacing.h); a test compares both. All times are
nanoseconds.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

from ..launch_loop.structures import view_pace
from ..link.activity import ActivityPage, words_of
from .fence import SECOND, at_work

CATCH_UP: Final = 2_000_000
"""For so long a direction that was not used is made up for: threads wake late, by a millisecond and more, and would lose it."""
LOOK: Final = 5_000_000
"""The longest wait until the next look: neighbours may rest, and the ticket may be cancelled, or its deadline have passed."""

PIECE: Final = 2_000_000
"""What a load pays for in one piece: so long a work waits for it."""
YIELD: Final = 200_000
"""So much later than it may a load looks whether it goes on, as a work that waits for the same moment goes first."""


def put_off(free_at: int, now: int, nbytes: int, rate: int) -> int:
    """When a direction is free after a work that moves so many bytes there, and begins now; `rate` is in bytes a second."""
    return max(free_at, now - CATCH_UP) - -nbytes * SECOND // rate  # Rounded up, so that no sum of works has more.


class Pace:
    """What one tenant may move over PCIe. Its workers use it one after the other, so that a move forgets nothing.

    `pages` are its neighbours' on that device, which the launch loop reads too, and `rate` is what it has each way. A worker
    charges inputs when it starts a work, and outputs when that has ended, as it knows their size then, as of its start; the
    launch loop charges both when it starts one. One thread at a time for each direction, and those that load: two that charge
    at the same moment may count one of both charges only.
    """

    def __init__(self, pages: Sequence[ActivityPage], rate: int) -> None:
        self.words: tuple[memoryview, ...] = ()
        self.shared = view_pace(1, ())
        """The numbers, for the launch loop too."""
        self._hurried = False
        self._latest = 0
        """When the last piece of a load is over at the latest, as works get as much meanwhile."""
        self.hold(pages, rate)

    def hold(self, pages: Sequence[ActivityPage], rate: int) -> None:
        """From now on keep to this rate beside these neighbours, with what was charged; set `Worker.pace` again after it, for
        the launch loop.
        """
        self.words, before = words_of(pages), self.shared
        made = view_pace(before.rate, self.words)
        made.free_in, made.free_out, made.waits = before.free_in, before.free_out, before.waits
        self.shared = made
        self.rate = rate

    @property
    def rate(self) -> int:
        """Bytes a second, each way. May be set at any time: what waits goes on as soon as a larger one allows."""
        return int(self.shared.rate)

    @rate.setter
    def rate(self, rate: int) -> None:
        shared, now = self.shared, time.monotonic_ns()
        before, shared.rate = int(shared.rate), max(1, rate)
        if shared.rate > before:
            shared.free_in, shared.free_out = (
                now + (free - now) * before // shared.rate if free > now else free
                for free in (int(shared.free_in), int(shared.free_out))
            )

    @property
    def waits(self) -> int:
        """How many works had to wait so far."""
        return int(self.shared.waits)

    def applies(self) -> bool:
        """Whether neighbours are at work now. Any thread."""
        return at_work(self.words, time.monotonic_ns())

    def wait(self, now: int) -> int:
        """How long from now on a work has to wait until the next look; 0 if it may begin."""
        left: int = max(int(self.shared.free_in), int(self.shared.free_out)) - now
        return min(left, LOOK) if left > 0 and at_work(self.words, now) else 0

    def count_wait(self) -> None:
        """A work has to wait."""
        self.shared.waits += 1

    def charge_in(self, nbytes: int, now: int) -> None:
        """A work that begins now moves so many bytes to the device."""
        if nbytes and at_work(self.words, now):
            self.shared.free_in = put_off(self.shared.free_in, now, nbytes, self.rate)

    def charge_out(self, nbytes: int, now: int) -> None:
        """The same from the device. The work may have begun earlier."""
        if nbytes and at_work(self.words, now):
            self.shared.free_out = put_off(self.shared.free_out, now, nbytes, self.rate)

    def hurry(self) -> None:
        """Loads pay no more: the device is about to be closed, or the tenant has no such share any more, or leaves."""
        self._hurried = True

    def pay(
        self, nbytes: int, pause: Callable[[float], None] = time.sleep, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Charge what a load is about to move to the device, a piece after the other, so that works go in between: as much as
        the load, where they want more than there is. Blocks until all is charged, the neighbours rest, or `hurry` was called.
        """
        while nbytes > 0 and not self._hurried and at_work(self.words, now := clock()):
            if (left := int(self.shared.free_in) - now) > -YIELD // 2 and now < self._latest:
                pause(min(left + YIELD, self._latest - now) / SECOND)
                continue
            piece = min(nbytes, max(1, self.rate * PIECE // SECOND))
            self.charge_in(piece, now)
            nbytes, self._latest = nbytes - piece, now + 2 * piece * SECOND // self.rate
