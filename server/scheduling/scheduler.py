"""One tenant's bounded queue and the limit of works in flight: what runs next. Pure decisions: no clock, no thread, no I/O.

1. At most `in_flight_limit` tickets are in flight; more while works are so short that all of them end within `horizon`. Tickets
   that the worker has deferred count as queued, not as in flight. So do answers between two parts (`paused`), whose next part
   is queued behind all others when it is asked for.
2. At most `limit` requests are queued; one more is refused.
3. The smallest priority number goes first; among equals the oldest.
4. Requests that can be batched go as `batching` decides; a batch is one ticket in flight.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import QueueFull
from ..link.messages import ModelKey, Ticket
from ..link.occupancy import Occupancy
from .batching import NOTHING, Batchable, Choice, Queued, choose

LAST = 1 << 64
"""Sorts requests without a priority (0 in the protocol) after all others, whose priorities have 64 bits."""


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Tickets queued and in flight, and the limit of each."""

    waiting: int
    in_flight: int
    limit: int
    in_flight_limit: int


class Scheduler:
    """Decides for one tenant; not thread-safe.

    `setting` is the configuration key of `limit`, for error texts. `horizon` is in nanoseconds: works that are shorter than the
    round trip to the worker would leave it idle between two of them, so more of them are launched ahead, but no more than take
    this long together, because a launched ticket cannot be overtaken. `deferred` is how many launched tickets the worker has
    deferred while their shapes are prepared. `on_host_cores` is whether works run on the cores that answer requests, so that
    launching ahead gains nothing. While `held` is set nothing is launched; requests are queued, as many as could be queued and
    launched otherwise. `batchable` is how many queued requests can be batched: while there are any, use `choose` and
    `launch` instead of `take`. `ran` is the nanoseconds that works took which have ended.
    """

    def __init__(self, limit: int, in_flight_limit: int, horizon: int = 0, setting: str = "limit") -> None:
        self.limit = limit
        self.in_flight_limit = in_flight_limit
        self.horizon = horizon
        self.setting = setting
        self.batchable = 0
        self.deferred = 0
        self.paused = self.ran = 0
        self.on_host_cores = self.held = False
        self._waiting: list[Queued] = []
        self._in_flight: set[int] = set()
        self._arrivals = 0
        self._longest = horizon + 1
        self._current_limit = in_flight_limit

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(self._queued, self._running, self.limit, self.in_flight_limit)

    @property
    def in_flight(self) -> frozenset[int]:
        """The slots of all launched tickets that have not ended, deferred ones included."""
        return frozenset(self._in_flight)

    @property
    def waiting(self) -> list[Ticket]:
        """The queue."""
        return [entry[2] for entry in self._waiting]

    @property
    def busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._in_flight)

    @property
    def launches(self) -> bool:
        """Whether anything is queued for which there is room in flight."""
        return bool(self._waiting) and not self.held and self._running < self._current_limit

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and nothing is queued."""
        return not self._in_flight and not self._waiting

    @property
    def full(self) -> bool:
        """Whether there is no room for one more request."""
        return self._queued >= self.limit and not self._may_launch

    def check(self) -> None:
        """Raise QueueFull if there is no room for one more request."""
        if self.full:
            raise QueueFull(f"Exceeds maximum queue size: {self.limit} requests may wait, and as many do ({self.setting})")

    def add(self, ticket: Ticket, priority: int = 0, batchable: Batchable | None = None) -> None:
        """Queue a ticket, which `check` allowed; priority 1 is the highest, 0 the default and lowest."""
        self._arrivals += 1
        insort(self._waiting, (priority or LAST, self._arrivals, ticket, batchable))
        if batchable:
            self.batchable += 1

    def take(self) -> list[Ticket]:
        """The tickets to launch now, if none can be batched; they count as in flight from now on."""
        if self.held or not self._waiting or (free := self._current_limit - self._running) <= 0:
            return []
        taken = []
        for _, _, ticket, _ in self._waiting[:free]:
            taken.append(ticket)
            self._in_flight.add(ticket.slot)
        del self._waiting[:free]
        return taken

    def choose(self, now: float) -> Choice:
        """What to `launch` next, at this time on the clock of `Batchable.due`. Changes nothing."""
        running = self._running
        if self.held or not self._waiting or running >= self._current_limit:
            return NOTHING
        alone = self.on_host_cores or self._current_limit > self.in_flight_limit
        return choose(self._waiting, running, 1 if alone else self.in_flight_limit, now)

    def launch(self, members: Sequence[Queued], slot: int) -> None:
        """Launch these, which `choose` returned, as one ticket in this slot: in flight from now on."""
        last = len(members) - 1
        if self._waiting[last] is members[last]:  # They are the first ones, as mostly.
            del self._waiting[: last + 1]
        else:
            for each in members:
                self._waiting.remove(each)
        for each in members:
            self.batchable -= each[3] is not None
        self._in_flight.add(slot)

    def put_back(self, members: Sequence[Queued]) -> None:
        """Queue the members of a batch again, each in its old place and to run alone, whatever the limit."""
        for priority, arrival, ticket, _ in members:
            insort(self._waiting, (priority, arrival, ticket, None))

    def finish(self, slot: int, took: int, failed: bool = False) -> None:
        """The work of this slot has ended after `took` nanoseconds. Raises KeyError if it was not in flight."""
        self._in_flight.remove(slot)
        self.ran += took
        if not failed:  # The longest recent duration: rises at once, decays slowly.
            self._longest = max(1, took, self._longest - (self._longest >> 3))
            self._current_limit = max(self.in_flight_limit, self.horizon // self._longest)

    def end_all(self) -> frozenset[int]:
        """All works in flight have ended without a result, as the device side has; returns their slots."""
        slots = self.in_flight
        self._in_flight.clear()
        return slots

    def queued(self, model: ModelKey, priority: int | None = None) -> int:
        """How many tickets are queued for a model, optionally only those of one priority.

        Those that `take` would return do not count: they are launched at the end of this iteration of the event loop.
        """
        wanted = None if priority is None else priority or LAST
        free = 0 if self.held else self._current_limit - self._running
        return len(
            [
                1
                for place, (rank, _, ticket, batchable) in enumerate(self._waiting)
                if ticket.model == model and wanted in (None, rank) and (batchable is not None or place >= free)
            ]
        )

    def waits(self, slot: int) -> bool:
        """Whether the ticket of this slot is queued."""
        return any(ticket.slot == slot for _, _, ticket, _ in self._waiting)

    def withdraw(self, slot: int) -> bool:
        """Remove the ticket of this slot from the queue; False if it is not queued."""
        for index, (_, _, ticket, batchable) in enumerate(self._waiting):
            if ticket.slot == slot:
                del self._waiting[index]
                self.batchable -= batchable is not None
                return True
        return False

    @property
    def _may_launch(self) -> bool:
        """Whether one more could be launched at once, behind all queued ones, although the queue is full."""
        return self._queued < self.limit + max(0, self._current_limit - self._running)

    @property
    def _running(self) -> int:
        """How many are in flight and not deferred; `deferred` may lag behind the worker, so this is never below 0."""
        return max(0, len(self._in_flight) - self.deferred)

    @property
    def _queued(self) -> int:
        """How many wait: here, deferred by the worker, or for their clients to take a part."""
        return len(self._waiting) + min(self.deferred, len(self._in_flight)) + self.paused


class HelperScheduler(Scheduler):
    """As `Scheduler`, for so many slots. The lead decides what fits into the queue; `limit` and `setting` are its."""

    def __init__(self, slots: int, limit: int, setting: str, occupancy: Occupancy) -> None:
        super().__init__(limit, slots, setting=setting)
        self._occupancy = occupancy

    @property
    def full(self) -> bool:
        return self._occupancy.queue_is_full
