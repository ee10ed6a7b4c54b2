"""A tenant's worker that borrows: its wide partition, the executors there, and which work goes where. See `stretching`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from engines import Executor
from partitions import Partition

from ..accounts.meter import Place
from ..launch_loop.structures import Wide as Shared
from ..launch_loop.structures import view_lenders
from ..link.activity import ENDED, LENDS, OPEN, LenderPage, words_of
from ..link.messages import Done, ModelKey, Shape, Ticket
from .placement import SidePlacement, is_ready
from .session import InFlight, Session
from .stretching import BUSY, FENCED, IN_FLIGHT, NOT_MEASURED, STOPPED, WHY_HOME, WIDE, Measured, Times, decide

_MOST_TIMES = 512
"""Models and shapes whose times are remembered; beyond that all are forgotten."""


class WideStatistics:
    """Of one borrower since its start, whatever placements it has had; the launch loop counts in the same place."""

    def __init__(self) -> None:
        self._shared = Shared()

    def count_in(self, shared: Shared) -> None:
        """Go on counting there, and no more where it was counted before."""
        shared.launches, shared.returns, shared.stayed = self._shared.launches, self._shared.returns, self._shared.stayed
        self._shared = shared

    @property
    def launches(self) -> int:
        """Works that went wide."""
        return int(self._shared.launches)

    @property
    def returns(self) -> int:
        """Those of them during which a lender came back."""
        return int(self._shared.returns)

    def why_home(self) -> dict[str, int]:
        """Works that stayed at home, by why."""
        return dict(zip(WHY_HOME, self._shared.stayed[1:], strict=True))


class WidePlacement(SidePlacement):
    """The wide placement of one worker, whose threads call `enqueue` and `finish`, too.

    A model that has no executor here stays at home. `limit` is the nanoseconds that the lenders allow a work, `pages` are
    theirs, and `lent` has the units of each.
    """

    def __init__(
        self,
        home: Partition,
        partition: Partition,
        pages: Sequence[LenderPage],
        limit: int,
        statistics: WideStatistics,
        lent: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__(partition, Place(home.size, lent))
        self.pages = tuple(pages)
        self.words = words_of(pages)
        self.limit = limit
        self.statistics = statistics
        self.held = False
        """Whether a ticket waits until the works in flight at home have ended."""
        self.sizes = home.size, partition.size
        self.shared = view_lenders(limit, *self.sizes, [(words, page.own) for page in pages for words in page.processes])
        """The same for the launch loop, and what is counted."""
        statistics.count_in(self.shared)
        self.times: dict[tuple[ModelKey, tuple[Shape, ...]], Times] = {}
        """What works took at home and wide, as far as the interpreter has seen them."""
        self._ended_before = 0
        self._last: tuple[ModelKey, tuple[Shape, ...]] | None = None

    def enqueue(
        self, session: Session, home: Executor, ticket: Ticket, in_flight: Mapping[int, InFlight], fenced: bool = False
    ) -> InFlight:
        """Put the work of a ticket on the stream of the one partition or the other; at home if it is `fenced`. Raises what the
        executor raises.
        """
        executor: Any = self.executors.get(ticket.model)
        if executor is None or self.suspended or ticket.after:
            return session.enqueue(home, ticket)
        if fenced:
            self._last = None
        if (why := FENCED if fenced else self._decide(ticket, bool(in_flight))) != WIDE:
            self.shared.stayed[why] += 1
            return session.enqueue(home, ticket)
        begun = self.begin()
        if begun and not is_ready(executor, ticket.shapes):
            self.give_up()
            begun = False
        if not begun:
            self.shared.stayed[NOT_MEASURED] += 1
            return session.enqueue(home, ticket)
        self._mark(1)
        self.shared.launches += 1
        self._ended_before = self._ends()
        return session.enqueue_beside(self, executor, ticket)

    def give_up(self) -> None:
        self._mark(0)
        super().give_up()

    def holds(self, in_flight: Mapping[int, InFlight]) -> bool:
        """Whether the next ticket waits: while a work is wide, which is alone in flight; and while works are in flight at home
        and another one like the last would go wide, as tickets come ahead and otherwise nothing would under load. Then `held`
        is set, and the thread that waits for them starts the ticket.
        """
        self.held = False
        if self.running:
            return True
        if not in_flight or self.suspended or self._last is None or self._decide_alone(self._last) != WIDE:
            return False
        self.held = True
        if in_flight:  # As that thread looks at `held` after it has taken the last one out, one of the two sees the other.
            return True
        self.held = False
        return False

    def finish(self, flight: InFlight, done: Done) -> None:
        """A work has ended, or failed, here or elsewhere."""
        key = flight.ticket.model, flight.ticket.shapes
        if flight.placement is not self:
            teaches = flight.placement is None and done.failure is None and not flight.ticket.after
            if teaches and flight.ticket.model in self.executors:
                self.times_of(key).learn_home(done.ended - done.began)
            return
        if rested_since(self.words) < 0 or self._ends() != self._ended_before:
            self.shared.returns += 1
        elif done.failure is None:
            self.times_of(key).learn_wide(done.ended - flight.launched, self.limit, done.ended)
        self._mark(0)
        self.end()

    def too_long(self, others: Sequence[Measured] = ()) -> list[Measured]:
        """Of each model whose works all take longer than the lenders allow, the shortest. `others` are what a launch loop has
        measured. Any thread.
        """
        home, wide = self.sizes
        mine = [Measured(key[0], times.home, times.wide) for key, times in list(self.times.items())]
        shortest: dict[ModelKey, Measured] = {}
        for each in [*mine, *others]:
            if each.home and each.model in self.executors:
                best = shortest.get(each.model)
                if best is None or each.least(home, wide) < best.least(home, wide):
                    shortest[each.model] = each
        return [each for each in shortest.values() if each.least(home, wide) > self.limit]

    def _decide(self, ticket: Ticket, in_flight: bool) -> int:
        key = self._last = ticket.model, ticket.shapes
        why = self._decide_alone(key)
        return IN_FLIGHT if why == WIDE and in_flight else why

    def _decide_alone(self, key: tuple[ModelKey, tuple[Shape, ...]]) -> int:
        """Where such a work goes if nothing is in flight."""
        home, wide = self.sizes
        return decide(self.times_of(key), time.monotonic_ns(), self.limit, home, wide, False, rested_since(self.words))

    def times_of(self, key: tuple[ModelKey, tuple[Shape, ...]]) -> Times:
        """Of these, those of a model and its shapes."""
        found = self.times.get(key)
        if found is None:
            if len(self.times) >= _MOST_TIMES:
                self.times.clear()
            found = self.times[key] = Times()
        return found

    def _ends(self) -> int:
        """Changes when a lender has had a request and rests again."""
        total = 0
        for words in self.words:
            total += words[ENDED]
        return total

    def _mark(self, used: int) -> None:
        """Say to every lender whether a work uses its granules."""
        for page in self.pages:
            page.own[0] = used


def rested_since(lenders: Sequence[memoryview]) -> int:
    """When the last of these lenders' processes began to rest; BUSY or STOPPED if one does not rest, or does not lend."""
    since = 0
    for words in lenders:
        if not words[LENDS]:
            return STOPPED
        if words[OPEN]:
            return BUSY
        if words[ENDED] > since:
            since = words[ENDED]
    return since
