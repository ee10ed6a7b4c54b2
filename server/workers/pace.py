"""When works may begin, so that what they move stays within the tenant's shares while neighbours work (`fence`): over PCIe each
way, and of the device's memory on a narrow placement whose granules could draw more.

Each path has a time from which the next work may begin. A work puts it off by what its bytes take at the tenant's rate. A work
begins once all have come; what it moves itself does not matter for that, so tickets stay in order, and a small one waits
for no longer than the bytes of those before it take. In any time the works that begin move at most the rate times that time and
CATCH_UP, and one work more. While all neighbours rest nothing waits, and nothing is put off.

The launch loop goes by the same rules and the same numbers (launch_loop/pacing.h); a test compares both. All times are
nanoseconds.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

from ..launch_loop.structures import IN, MEMORY, OUT, view_pace
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
    """When a path is free after a work that moves so many bytes there, and begins now; `rate` is in bytes a second."""
    return max(free_at, now - CATCH_UP) - -nbytes * SECOND // rate  # Rounded up, so that no sum of works has more.


class Pace:
    """What one tenant may move over PCIe and of memory. Its workers use it one after the other, so that a move forgets nothing.

    `pages` are its neighbours' on that device, which the launch loop reads too. `pcie` is what it has each way and `memory`
    what works on its narrow placement have, both in bytes a second, 0 for all there is. A worker charges inputs and memory when
    it starts a work, and outputs when that has ended, as it knows their size then, as of its start; the launch loop charges all
    when it starts one. One thread at a time for each path, and those that load: two that charge at the same moment may count
    one of both charges only.
    """

    def __init__(self, pages: Sequence[ActivityPage], pcie: int, memory: int = 0) -> None:
        self.words: tuple[memoryview, ...] = ()
        self.shared = view_pace(())
        """The numbers, for the launch loop too."""
        self._hurried = False
        self._latest = [0] * len(self.shared.free_at)
        """When the last piece that was paid for is over at the latest, as works get as much meanwhile."""
        self.hold(pages, pcie, memory)

    def hold(self, pages: Sequence[ActivityPage], pcie: int, memory: int = 0) -> None:
        """From now on keep to these rates beside these neighbours, with what was charged; set `Worker.pace` again after it, for
        the launch loop.
        """
        self.words, before = words_of(pages), self.shared
        made = view_pace(self.words)
        made.rates, made.free_at, made.waits = before.rates, before.free_at, before.waits
        self.shared = made
        self.set_rate(IN, pcie)
        self.set_rate(OUT, pcie)
        self.set_rate(MEMORY, memory)

    def rate(self, path: int) -> int:
        """Bytes a second that the tenant may move there; 0 for all there is."""
        return int(self.shared.rates[path])

    def set_rate(self, path: int, rate: int) -> None:
        """May be called at any time: what waits goes on as soon as a larger rate allows."""
        shared, now = self.shared, time.monotonic_ns()
        before, free = int(shared.rates[path]), int(shared.free_at[path])
        shared.rates[path] = rate
        if not rate:
            shared.free_at[path] = 0
        elif rate > before and free > now:
            shared.free_at[path] = now + (free - now) * before // rate

    @property
    def waits(self) -> int:
        """How many works had to wait for PCIe so far."""
        return int(self.shared.waits)

    def applies(self) -> bool:
        """Whether neighbours are at work now. Any thread."""
        return at_work(self.words, time.monotonic_ns())

    def wait(self, now: int) -> int:
        """How long from now on a work has to wait until the next look; 0 if it may begin."""
        left = max(self.shared.free_at) - now
        return min(left, LOOK) if left > 0 and at_work(self.words, now) else 0

    def count_wait(self, now: int) -> None:
        """A work has to wait, perhaps for PCIe."""
        if max(self.shared.free_at[IN], self.shared.free_at[OUT]) > now:
            self.shared.waits += 1

    def charge(self, path: int, nbytes: int, now: int) -> None:
        """A work that began now, or earlier, moves so many bytes there."""
        shared = self.shared
        if nbytes and (rate := int(shared.rates[path])) and at_work(self.words, now):  # The rate may change meanwhile.
            shared.free_at[path] = put_off(int(shared.free_at[path]), now, nbytes, rate)

    def hurry(self) -> None:
        """Loads pay no more: the device is about to be closed, or the tenant has no such share any more, or leaves."""
        self._hurried = True

    def pay(
        self,
        nbytes: int,
        path: int = IN,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Charge what a load, or a pass of a strain, is about to move, a piece after the other, so that works go in between: as
        much as the load, where they want more than there is. Blocks until all is charged, the neighbours rest, or `hurry` was
        called.
        """
        while nbytes > 0 and not self._hurried and (rate := self.rate(path)) and at_work(self.words, now := clock()):
            if (left := int(self.shared.free_at[path]) - now) > -YIELD // 2 and now < self._latest[path]:
                pause(min(left + YIELD, self._latest[path] - now) / SECOND)
                continue
            piece = min(nbytes, max(1, rate * PIECE // SECOND))
            self.charge(path, piece, now)
            nbytes, self._latest[path] = nbytes - piece, now + 2 * piece * SECOND // rate
