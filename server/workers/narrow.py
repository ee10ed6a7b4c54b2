"""A fenced tenant's narrow placement: the executors there, and which works go there. See `fence`."""

import time
from collections.abc import Mapping, Sequence
from ctypes import c_uint64
from typing import Any

from partitions import Partition

from ..accounts.meter import Place
from ..launch_loop.structures import Demand, view_fence
from ..link.activity import ActivityPage, words_of
from ..link.messages import Done, ModelKey, Ticket
from .fence import at_work, could_exceed, exceeds
from .placement import SidePlacement, is_ready
from .session import InFlight, Session
from .stretching import towards


class NarrowStatistics:
    """Of one fenced tenant since its start, whatever placements it has had; the launch loop counts in the same place.

    What works need is kept, too: a tenant whose works drew too much goes on to be held when its placement is another one.
    """

    def __init__(self) -> None:
        self.counted = (c_uint64 * 1)()
        self.demands: dict[ModelKey, Demand] = {}

    @property
    def launches(self) -> int:
        """Works that ran narrow."""
        return self.counted[0]


class NarrowPlacement(SidePlacement):
    """The narrow placement of one worker, whose threads call `takes`, `enqueue` and `finish`, too.

    A model that has no executor here stays at home. `pages` are those of all other tenants of the device, and `rate` is the
    bytes that the tenant may move in a second while one of them is at work. Its works are counted as of the units they ran on:
    the rest of the home rests meanwhile.
    """

    def __init__(self, partition: Partition, pages: Sequence[ActivityPage], rate: int, statistics: NarrowStatistics) -> None:
        super().__init__(partition, Place(partition.size))
        self.statistics = statistics
        self._demands = statistics.demands
        for demand in self._demands.values():
            demand.narrow = 0
        self._last_end = 0
        self.hold(pages, rate)

    def hold(self, pages: Sequence[ActivityPage], rate: int) -> None:
        """From now on hold works to this rate beside these neighbours; `Worker.resume` says so to the launch loop."""
        self.rate, self._words = rate, words_of(pages)
        self.shared = view_fence(rate, self.statistics.counted, self._words)
        """The same for the launch loop."""

    def set_moved(self, moved: Mapping[ModelKey, int]) -> None:
        """Set how many bytes a work of each of these models moves, 0 for unknown, below 0 to hold it whatever that is; others
        stay as they are.
        """
        for model, nbytes in moved.items():
            self.demand(model).moved = nbytes
        for model in [model for model in list(self._demands) if model not in self.executors and model not in moved]:
            self._demands.pop(model, None)

    def applies(self) -> bool:
        """Whether works of models that draw too much run here now: a neighbour is at work. Any thread."""
        return not self.suspended and at_work(self._words, time.monotonic_ns())

    def measured(self) -> dict[ModelKey, Demand]:
        """What is known of the models' works; it goes on changing. Any thread."""
        return dict(self._demands)

    def takes(self, ticket: Ticket) -> bool:
        """Whether the work of a ticket goes here now."""
        model = ticket.model
        executor = self.executors.get(model)
        if executor is None or self.suspended:
            return False
        demand = self._demands.get(model)
        if demand is None or not exceeds(demand.moved, demand.home, self.rate):
            return False
        return at_work(self._words, time.monotonic_ns()) and is_ready(executor, ticket.shapes)

    def keeps_home(self, model: ModelKey, units: int, wide: int) -> bool:
        """Whether a work of this model may not go to the wide partition now, which has so many units, and the home so many."""
        demand = self._demands.get(model)
        if demand is None or self.suspended or model not in self.executors:
            return False
        return could_exceed(demand.moved, demand.home, self.rate, units, wide) and at_work(self._words, time.monotonic_ns())

    def enqueue(self, session: Session, ticket: Ticket) -> InFlight | None:
        """Put the work of a ticket that goes here on this placement's stream; None if it is suspended meanwhile. Raises what
        the executor raises.
        """
        executor: Any = self.executors.get(ticket.model)
        if executor is None or not self.begin():
            return None
        flight = session.enqueue_beside(self, executor, ticket)
        self.statistics.counted[0] += 1
        return flight

    def finish(self, flight: InFlight, done: Done) -> None:
        """A work has ended, or failed, here or elsewhere."""
        took = done.ended - max(flight.launched, self._last_end)
        self._last_end = done.ended
        if done.failure is None and flight.ticket.model in self.executors:
            demand = self.demand(flight.ticket.model)
            if flight.placement is None:
                demand.home = towards(demand.home, took)
            elif flight.placement is self:
                demand.narrow = towards(demand.narrow, took)
        if flight.placement is self:
            self.end()

    def demand(self, model: ModelKey) -> Demand:
        """What is known of a model's works, for the launch loop, too. Any thread."""
        return self._demands.get(model) or self._demands.setdefault(model, Demand())
