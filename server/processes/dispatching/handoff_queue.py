"""The connections that wait for one tenant's HTTP processes, in the dispatcher."""

import socket
from collections import deque
from contextlib import suppress

from ..channels import handoff
from ..channels.handoff import Ends, Handoff
from ..channels.routing import owner

MAX_QUEUED = 1024
"""Connections that may wait for one process to take them, beside those in its socket, at least; one more is refused."""


class HandoffQueue:
    """The connections that wait to be handed to one tenant's process, or to the next of several.

    `ends` are the sockets to the processes, by their names. Helpers get connections in turn. The lead, which does something for
    every request of theirs, gets one where each of them gets as many as there are helpers.

    What a process that has ended did not take is sent to the next before all that came later. It stays in the socket of the
    process until then: at most one such connection has a descriptor here, however many processes end. `most` may wait.
    """

    def __init__(self, most: int = MAX_QUEUED) -> None:
        self.ends: dict[str, Ends] = {}
        self._had: dict[str, int] = {}  # The connections of each process, those of a lead several times.
        self._ended: deque[Ends] = deque()  # The sockets of processes that have ended, which may have connections in them.
        self._untaken: Handoff | None = None  # The next one from there.
        self._queue: deque[Handoff] = deque()
        self._most = most

    def __repr__(self) -> str:
        return f"<HandoffQueue {'open' if self.ends else 'closed'}, {len(self._queue)} waiting>"

    @property
    def waiting(self) -> bool:
        """Whether there are connections that could not be sent yet."""
        return bool(self._queue or self._ended or self._untaken)

    @property
    def length(self) -> int:
        """How many of them are here, and not with a process that has ended."""
        return len(self._queue)

    def drop_newest(self) -> bool:
        """Close the connection of these that came last; False if there is none."""
        if self._queue:
            self._queue.pop().close()
            return True
        return False

    def put(self, handoff: Handoff) -> bool:
        """Send this connection, now or once there is room; False, and it is the caller's, if too many wait already."""
        self._queue.append(handoff)
        self.flush()
        if len(self._queue) > self._most:
            self._queue.pop()
            return False
        return True

    def flush(self) -> None:
        """Send as many as there is room for."""
        open_ = dict(self.ends)
        while open_ and (first := self._first()):
            name = min(open_, key=lambda name: (self._had[name], name))
            try:
                handoff.send(open_[name].ours, first)
            except OSError:  # No room, or the process is gone: epoll reports the one, and the supervisor the other.
                del open_[name]
            else:
                self._drop_first()
                first.close()
                self._had[name] += max(1, len(self.ends) - 1) if owner(name) == name else 1

    def _first(self) -> Handoff | None:
        """The connection that has waited longest, if any waits."""
        while self._ended and self._untaken is None:
            with suppress(BlockingIOError):
                self._untaken = handoff.receive(self._ended[0].theirs)
            if self._untaken is None:
                self._ended.popleft().close()
        return self._untaken or (self._queue[0] if self._queue else None)

    def _drop_first(self) -> None:
        if self._untaken:
            self._untaken = None
        else:
            self._queue.popleft()

    def connect(self, name: str, ends: Ends) -> None:
        """Hand connections to a process from now on: as many as to that with the fewest, and not all that it has missed."""
        self._had[name] = min((self._had[each] for each in self.ends), default=0)
        self.ends[name] = ends

    def disconnect(self, name: str) -> socket.socket | None:
        """Hand a process no more connections, and what it has not taken to the next; the socket over which it was sent them."""
        if ends := self.ends.pop(name, None):
            self._ended.append(ends)
        return ends and ends.ours

    def take(self) -> list[Handoff]:
        """The connections that wait, which are the caller's now."""
        waiting: list[Handoff] = []
        while first := self._first():
            waiting.append(first)
            self._drop_first()
        return waiting

    def close(self) -> None:
        """Close the sockets to the processes, and all connections that wait."""
        for connection in self.take():
            connection.close()
        for ends in self.ends.values():
            ends.close()
