"""One link over several devices: each ticket goes to the device with the fewest works in flight that serves its model.

To its lane it is a link as any other: one queue, one order and one set of limits. Each device has a link of its own to the same
tensor memory. Models have other keys in each device process, so tickets are written again, with those of their device.
"""

import os
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from .arena import Arena
from .messages import Done, Failure, ModelKey, Ticket
from .ring import Completions, Link, Tickets

_NOWHERE = "no device of the tenant serves this model now"
_LOST_BETWEEN = "the device that began this answer was started again; send the request again"


class Member:
    """One of the devices, as the HTTP side sees it; `link` leads to the process that has it.

    `in_flight` are the slots of its tickets that have not ended, and `keys` its own keys of models by those in the catalog.
    `refusing` is why it gets no tickets, "" if it gets some.
    """

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self.link = link
        self.in_flight: set[int] = set()
        self.keys: dict[ModelKey, ModelKey] = {}
        self.refusing = ""
        self.put: list[Ticket] = []

    def __repr__(self) -> str:
        return f"<Member {self.name}, {len(self.in_flight)} in flight{f', {self.refusing}' if self.refusing else ''}>"

    @property
    def deferred(self) -> int:
        """How many of them its worker has deferred; they do not count as in flight."""
        return min(self.link.completions.deferred(), len(self.in_flight))

    @property
    def load(self) -> int:
        """The works that a further one would wait for."""
        return len(self.in_flight) - self.deferred


def least_loaded(loads: Sequence[int | None], last: int) -> int:
    """The index of the smallest load, of equal ones that of the next after `last`, in turn; None: it is not eligible.

    -1 if none is.
    """
    found, least = -1, 0
    for step in range(1, len(loads) + 1):
        at = (last + step) % len(loads)
        load = loads[at]
        if load is not None and (found < 0 or load < least):
            found, least = at, load
    return found


class Spread:
    """The links of one tenant to its devices, by their names. Belongs to the event loop of its HTTP side.

    `link` is what the lane uses. A ticket that no device can take is completed at once, with a failure.
    """

    def __init__(self, links: Mapping[str, Link]) -> None:
        self.members = {name: Member(name, link) for name, link in links.items()}
        self._order = list(self.members.values())
        self._last = -1
        self.on_serving: Callable[[int], None] = _ignore
        """Called with how many devices get tickets, when that may have changed."""
        self._homes: dict[int, tuple[Member, Link]] = {}
        """Where the last ticket of an answer in parts went, by slot: the next one follows it."""
        self._ended: list[Done] = []
        """Completions that were made here."""
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events = select.epoll()
        self._by_event: dict[int, Member] = {}
        self._events.register(self._event, select.EPOLLIN)
        for member in self._order:
            self._listen(member)
        first = self._order[0].link.arena
        self.link = Link(first, SpreadTickets(self, first), SpreadCompletions(self, first))

    def __repr__(self) -> str:
        return f"<Spread {self._order!r}>"

    def close(self) -> None:
        """Close what it has opened itself."""
        self._events.close()
        os.close(self._event)

    @property
    def event(self) -> int:
        """A descriptor that is readable when completions have arrived."""
        return self._events.fileno()

    @property
    def refusing(self) -> str:
        """Why no device gets tickets; "" if one does."""
        return "" if any(not member.refusing for member in self._order) else self._order[0].refusing

    @property
    def deferred(self) -> int:
        """How many tickets all devices have deferred."""
        return sum([member.deferred for member in self._order])

    @property
    def on_host_cores(self) -> bool:
        """Whether works run on cores of the host."""
        return any(member.link.completions.on_host_cores() for member in self._order)

    def serve(self, keys: Mapping[ModelKey, Mapping[str, ModelKey]]) -> None:
        """Tickets may name these models from now on: by each key in the catalog, the key that it has on each device."""
        for key, by_device in keys.items():
            for name, own in by_device.items():
                self.members[name].keys[key] = own

    def forget(self, keys: Iterable[ModelKey]) -> None:
        """No ticket will name these models any more."""
        for key in keys:
            for member in self._order:
                member.keys.pop(key, None)

    def refuse(self, name: str, reason: str) -> Sequence[int]:
        """Give this device no tickets, or some again with "". Returns the slots of those that it has."""
        member = self.members[name]
        member.refusing = reason
        self._count()
        return sorted(member.in_flight)

    def stop(self, name: str, reason: str) -> None:
        """The process of this device has ended: what was in flight there fails with this reason. `replace` follows."""
        member = self.members[name]
        self._take(member)
        os.eventfd_write(self._event, 1)
        for slot in member.in_flight:
            self._fail(slot, reason)
        member.in_flight.clear()
        member.keys.clear()
        member.refusing = reason
        self._count()

    def replace(self, name: str, link: Link) -> None:
        """Use this link to a device that was stopped; nothing of the one before is used any more."""
        member = self.members[name]
        del self._by_event[member.link.completions.event]
        self._events.unregister(member.link.completions.event)
        member.link = link
        self._listen(member)

    def send(self, tickets: Iterable[Ticket]) -> None:
        """Put each of these with a device."""
        for ticket in tickets:
            begun = ticket.after != 0 and ticket.after != ticket.serial
            member = self._home(ticket) if begun else self._choose(ticket.model)
            own = member.keys.get(ticket.model) if member else None
            if member is None or own is None:
                self._fail(ticket.slot, _LOST_BETWEEN if begun else self._why(ticket.model))
                continue
            ticket = ticket._replace(model=own)
            member.link.tickets.write(ticket)
            member.in_flight.add(ticket.slot)
            member.put.append(ticket)
            if ticket.after:
                self._homes[ticket.slot] = member, member.link
        for each in self._order:
            if each.put:
                each.link.tickets.put(each.put)
                each.put = []

    def collect(self) -> list[Done]:
        """All completions that have arrived, of all devices."""
        for event, _ in self._events.poll(0):
            if event == self._event:
                os.eventfd_read(event)
            else:
                self._take(self._by_event[event])
        ended, self._ended = self._ended, []
        return ended

    def _count(self) -> None:
        self.on_serving(len([member for member in self._order if not member.refusing]))

    def _listen(self, member: Member) -> None:
        event = member.link.completions.event
        self._by_event[event] = member
        self._events.register(event, select.EPOLLIN)

    def _take(self, member: Member) -> None:
        ended = member.link.completions.take()
        member.in_flight.difference_update([done.slot for done in ended])
        self._ended += ended

    def _choose(self, model: ModelKey) -> Member | None:
        loads = [None if each.refusing or model not in each.keys else each.load for each in self._order]
        at = least_loaded(loads, self._last)
        if at < 0:
            return None
        self._last = at
        return self._order[at]

    def _home(self, ticket: Ticket) -> Member | None:
        """The device that has what was begun of this ticket's answer; None if its process has ended since."""
        member, link = self._homes[ticket.slot]
        return member if member.link is link else None

    def _why(self, model: ModelKey) -> str:
        return next((each.refusing for each in self._order if each.refusing), _NOWHERE)

    def _fail(self, slot: int, reason: str) -> None:
        now = time.monotonic_ns()
        self._ended.append(Done(slot, (), Failure("stopped", reason), now, now))
        os.eventfd_write(self._event, 1)


def _ignore(_: int) -> None:
    """Nothing follows the number of devices."""


class SpreadTickets(Tickets):
    """The tickets of a `Spread`, in the place of a single link's."""

    def __init__(self, spread: Spread, arena: Arena) -> None:
        super().__init__(arena, -1, {})
        self._spread = spread
        self._checks = spread.members[next(iter(spread.members))].link.tickets

    def write(self, ticket: Ticket) -> None:
        """Check that it can be sent; it is written again when it is put. Raises BadRequest if its shapes do not fit."""
        self._checks.write(ticket)

    def put(self, tickets: Iterable[Ticket]) -> None:
        self._spread.send(tickets)


class SpreadCompletions(Completions):
    """The completions of a `Spread`, in the place of a single link's."""

    def __init__(self, spread: Spread, arena: Arena) -> None:
        super().__init__(arena, spread.event, {})
        self._spread = spread

    def take(self) -> list[Done]:
        return self._spread.collect()

    def deferred(self) -> int:
        return self._spread.deferred

    def on_host_cores(self) -> bool:
        return self._spread.on_host_cores
