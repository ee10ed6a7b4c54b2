"""Limits the number of connections of one HTTP process, and decides which are closed to make room for new ones.

A client that opens connections without completing a request must not lock others out. At the limit some are closed: first
those whose request has not arrived completely, then idle ones, of each kind the oldest first. Two kinds are never closed:
connections whose request is being answered, and the youngest quarter, whose first bytes may not have been read yet.

A tenant's own limit, `max_connections`, works in another way: no connection is closed to make room for another. One that is
opened beyond the limit has its first request refused, and is closed then, unless others have been closed meanwhile.

Refusals of another kind only wait: a flood of requests without the right key is answered 401 at a pace (`Refusals`), so that it
takes little of the cores.
"""

import logging
import resource
import time
from collections.abc import Callable, Iterator, MutableSet
from enum import IntEnum
from itertools import islice
from typing import Any, Protocol

from ..errors import RequestError
from ..link.occupancy import CONNECTIONS, Occupancy

log = logging.getLogger("greenlane.http")

MAX_SHARED_CONNECTIONS = 1024
"""Connections of a process that serves no single tenant: health checks and administrators need only a few."""
_CLOSED_FRACTION = 16
"""A sixteenth of the limit is closed at a time, so that the connections need not be searched for each new one."""
_LOG_INTERVAL = 10.0
"""Seconds between two lines in the log."""
_YOUNG_FRACTION = 4
"""The youngest connections, a quarter of the limit, are never closed."""


class Activity(IntEnum):
    """What a connection is doing; the lower values are closed first."""

    RECEIVING = 0
    IDLE = 1
    ANSWERING = 2


class Connection(Protocol):
    """An open connection."""

    def activity(self) -> Activity:
        """What it is doing now."""

    def abort(self) -> None:
        """Close at once."""


class Connections(MutableSet[Connection]):
    """The connections of one process, oldest first; replaces uvicorn's own set. Belongs to the event loop."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._closed = 0  # Since the last line in the log.
        self._log_at = 0.0
        self._all: dict[Connection, None] = {}
        self._ending: set[Connection] = set()
        self._most: int | None = None
        self._refuse: Callable[[int], RequestError] | None = None
        self._occupancy: Occupancy | None = None

    def __repr__(self) -> str:
        return f"<Connections {len(self._all)} of {self._limit}>"

    def __contains__(self, connection: object) -> bool:
        return connection in self._all

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, value: Connection) -> None:
        """Add a new connection; at the limit, close others first."""
        if len(self._all) >= self._limit:
            self._make_room()
        self._all[value] = None
        self._tell()

    def add_ending(self, value: Connection) -> None:
        """Add a connection that is answered no more: it does not count as one of the tenant's."""
        self._ending.add(value)
        self.add(value)

    def discard(self, value: Connection) -> None:
        self._all.pop(value, None)
        self._ending.discard(value)
        self._tell()

    def allow(self, most: int | None, refuse: Callable[[int], RequestError], occupancy: Occupancy | None = None) -> None:
        """Set how many connections the tenant may have open; None for any number.

        With an `occupancy` those of the tenant's other processes count, too. `refuse` is called with that number for each
        refusal, and returns the error.
        """
        self._most, self._refuse, self._occupancy = most, refuse, occupancy
        self._tell()

    @property
    def surplus(self) -> bool:
        """Whether more are open than the tenant may have."""
        if self._most is None:
            return False
        elsewhere = self._occupancy.elsewhere(CONNECTIONS) if self._occupancy else 0
        return len(self._all) - len(self._ending) + elsewhere > self._most

    def refuse(self) -> RequestError:
        """The error for the request on a connection beyond the tenant's limit."""
        assert self._refuse
        assert self._most is not None
        return self._refuse(self._most)

    def _tell(self) -> None:
        if self._occupancy is not None:
            self._occupancy.set(CONNECTIONS, len(self._all) - len(self._ending))

    def _make_room(self) -> None:
        """Close up to a sixteenth of the limit, at least one if there is a candidate."""
        older = islice(self._all, len(self._all) - self._limit // _YOUNG_FRACTION)
        candidates = sorted((each for each in older if each.activity() < Activity.ANSWERING), key=_activity)
        closed = candidates[: max(1, self._limit // _CLOSED_FRACTION)]
        for each in closed:
            self.discard(each)
            each.abort()
        self._closed += len(closed)
        if self._closed and (now := self._clock()) >= self._log_at:
            text = "%d connections were closed, the oldest that were not being answered: %d are open, which is the limit"
            log.warning(text, self._closed, self._limit)
            self._closed, self._log_at = 0, now + _LOG_INTERVAL


def connections(state: Any) -> Connections:
    """The connections of this uvicorn server, limited by the process's file descriptors.

    `state` is a ServerState; with that type compiled code would refuse to read anything but a set from it.
    """
    found = state.connections
    if not isinstance(found, Connections):
        found = Connections(descriptor_limit())
        state.connections = found
    return found


def descriptor_limit() -> int:
    """How many connections the process's file descriptors allow: three quarters, since uvicorn and others need some too."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, descriptors * 3 // 4)


def _activity(connection: Connection) -> Activity:
    return connection.activity()


REFUSAL_RATE = 100
"""Answers a second, and as many at once after a second without any."""
MAX_REFUSAL_WAIT = 2.0
"""Seconds that one answer waits, at most: where more than 200 wait, they are sent faster than `REFUSAL_RATE`."""


class Refusals:
    """Belongs to the event loop. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0
        """When the next answer could be sent, if each took its part of a second."""

    def wait(self) -> float:
        """Count one more; for how many seconds it has to wait, 0 while there are few."""
        now = self._clock()
        self._next = min(max(self._next, now - 1.0) + 1 / REFUSAL_RATE, now + MAX_REFUSAL_WAIT)
        return max(0.0, self._next - now)
