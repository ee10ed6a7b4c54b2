"""How many connections one process that speaks HTTP has, and which of them give way to new ones.

Who opens connections and finishes no request on them must not keep others out: where there are too many, those are closed that
wait for more of a request, then those that wait for another one, each time the oldest first. One that is being answered stays,
and so does the youngest quarter, of which nothing may have been read yet.
"""

import resource
from collections.abc import Iterator, MutableSet
from enum import IntEnum
from itertools import islice
from typing import Protocol

from uvicorn.server import ServerState

NOBODYS = 1024
"""Connections of the processes that are no tenant's; a few are used by health checks and administrators."""
_STEP, _YOUNG = 16, 4
"""What part of them is closed at once, so that they are seldom looked through, and what part is young: one in so many."""


class Standing(IntEnum):
    """What a connection is about, in the order in which they give way."""

    UNFINISHED = 0
    IDLE = 1
    ANSWERED = 2


class Connection(Protocol):
    """One of them."""

    def standing(self) -> Standing:
        """What it is about now."""

    def give_way(self) -> None:
        """Close at once."""


class Connections(MutableSet[Connection]):
    """Those of one process, the oldest first; in place of uvicorn's own set. Belongs to the event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: dict[Connection, None] = {}

    def __repr__(self) -> str:
        return f"<Connections {len(self._all)} of {self._most}>"

    def __contains__(self, connection: object) -> bool:
        return connection in self._all

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, value: Connection) -> None:
        """There is one more; others may have to give way."""
        if len(self._all) >= self._most:
            self._make_room()
        self._all[value] = None

    def discard(self, value: Connection) -> None:
        self._all.pop(value, None)

    def _make_room(self) -> None:
        """Close some, as many as may be."""
        older = islice(self._all, len(self._all) - self._most // _YOUNG)
        candidates = sorted((each for each in older if each.standing() < Standing.ANSWERED), key=_standing)
        for each in candidates[: max(1, self._most // _STEP)]:
            self.discard(each)
            each.give_way()


def connections(state: ServerState) -> Connections:
    """Those of the process that uvicorn has this state of: as many as its descriptors are for, which it needs for more."""
    found: object = state.connections
    if not isinstance(found, Connections):
        found = Connections(allowed())
        state.connections = found  # type: ignore[assignment]
    return found


def allowed() -> int:
    """How many a process may have."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, descriptors * 3 // 4)


def _standing(connection: Connection) -> Standing:
    return connection.standing()
