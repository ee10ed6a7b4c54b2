"""One tenant's bounded queue and its credits: what runs next. Pure decisions: no clock, no thread, no I/O.

Rule 1: at most `credits` tickets are in flight, or as many as have lately ended within `horizon`; those that the worker has
put aside are not, they wait. Rule 2: at most `limit` wait; one more is refused. Rule 3: the smallest priority number goes
first, and among equals the one that came first. Rule 4: requests that may be joined go as `batching` decides; those
that go together are one ticket in flight.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import QueueFull
from ..link.messages import ModelKey, Ticket
from .batching import NOTHING, Choice, Part, Waiting, choose

LAST = 1 << 64
"""Where a request without a priority stands: after all that have one, which is 64 bits (the protocol's 0)."""


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Tickets waiting and in flight, and the most of each that there may be."""

    waiting: int
    in_flight: int
    limit: int
    credits: int


class Scheduler:
    """Decides for one tenant; not thread-safe.

    `setting` is what `limit` is called where it is set. `horizon` is in nanoseconds. Works that are shorter than the way to
    the worker and back would leave it idle between two of them; so more of those are launched ahead, but never more than take
    this long, for they cannot be overtaken. `aside` is how many of those that were launched the worker has put aside, as their
    shapes are being prepared. `hosted` is whether works are done on the cores that requests are answered on, so that nothing is
    gained by one ahead. `joining` is how many wait that may be joined: while there are any, `choose` and
    `launch` take the place of `take`.
    """

    def __init__(self, limit: int, credits: int, horizon: int = 0, setting: str = "limit") -> None:
        self.limit = limit
        self.credits = credits
        self.horizon = horizon
        self.setting = setting
        self.joining = 0
        self.aside = 0
        self.hosted = False
        self._waiting: list[Waiting] = []
        self._flying: set[int] = set()
        self._arrivals = 0
        self._longest = horizon + 1
        self._ahead = credits

    def __repr__(self) -> str:
        return f"<Scheduler {self._held_up}/{self.limit} waiting, {self._running}/{self.credits} in flight>"

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(self._held_up, self._running, self.limit, self.credits)

    @property
    def in_flight(self) -> frozenset[int]:
        """The slots of the tickets that were launched and have not ended."""
        return frozenset(self._flying)

    @property
    def busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._flying)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, and nothing waits."""
        return not self._flying and not self._waiting

    def check(self) -> None:
        """Raise QueueFull if `add` would."""
        if self._held_up >= self.limit and not self._welcome:
            raise QueueFull(f"Exceeds maximum queue size: {self.limit} requests may wait, and as many do ({self.setting})")

    def add(self, ticket: Ticket, priority: int = 0, part: Part | None = None) -> None:
        """Queue a ticket; priority 1 is the highest, 0 the default; with a `part` it may be joined. Raises QueueFull."""
        self.check()
        self._arrivals += 1
        insort(self._waiting, (priority or LAST, self._arrivals, ticket, part))
        if part:
            self.joining += 1

    def take(self) -> list[Ticket]:
        """The tickets to launch now, if none may be joined; they count as in flight from here on."""
        if not self._waiting or (free := self._ahead - self._running) <= 0:
            return []
        taken = [entry[2] for entry in self._waiting[:free]]
        del self._waiting[:free]
        self._flying.update([ticket.slot for ticket in taken])
        return taken

    def choose(self, now: float) -> Choice:
        """What to `launch` next, at a time on the clock of the parts; nothing changes."""
        running = self._running
        if not self._waiting or running >= self._ahead:
            return NOTHING
        alone = self.hosted or self._ahead > self.credits
        return choose(self._waiting, running, 1 if alone else self.credits, now)

    def launch(self, members: Sequence[Waiting], slot: int) -> None:
        """These, which were chosen, go together in this slot: in flight from here on."""
        for each in members:
            self._waiting.remove(each)
            self.joining -= each[3] is not None
        self._flying.add(slot)

    def put_back(self, members: Sequence[Waiting]) -> None:
        """These went together and have to go again: each takes its old place, to go alone, whatever the limit."""
        for priority, arrival, ticket, _ in members:
            insort(self._waiting, (priority, arrival, ticket, None))

    def finish(self, slot: int, took: int | None = None) -> None:
        """The work of this slot ended, however; it `took` these nanoseconds. Raises KeyError if none was in flight."""
        self._flying.remove(slot)
        if took is not None:  # The longest of late: up at once, down slowly.
            self._longest = max(1, took, self._longest - (self._longest >> 3))
            self._ahead = max(self.credits, self.horizon // self._longest)

    def queued(self, model: ModelKey, priority: int | None = None) -> int:
        """How many tickets for a model wait here, or of those the ones of one priority."""
        place = None if priority is None else priority or LAST
        return len([1 for rank, _, ticket, _ in self._waiting if ticket.model == model and place in (None, rank)])

    def waits(self, slot: int) -> bool:
        """Whether the ticket of this slot waits here."""
        return any(ticket.slot == slot for _, _, ticket, _ in self._waiting)

    def withdraw(self, slot: int) -> bool:
        """Take the ticket of this slot out of the queue; False if it does not wait there."""
        for place, (_, _, ticket, part) in enumerate(self._waiting):
            if ticket.slot == slot:
                del self._waiting[place]
                self.joining -= part is not None
                return True
        return False

    @property
    def _welcome(self) -> bool:
        """Whether one more could be launched, after all that wait, though the queue is full."""
        return self._held_up < self.limit + max(0, self._ahead - self._running)

    @property
    def _running(self) -> int:
        """How many are in flight; it may be known late that one is put aside, or is not any more."""
        return max(0, len(self._flying) - self.aside)

    @property
    def _held_up(self) -> int:
        """How many wait, here or put aside."""
        return len(self._waiting) + min(self.aside, len(self._flying))
