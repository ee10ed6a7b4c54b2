"""Answers that clients of one tenant have not read: limits for how long, and how many bytes of them, this process keeps.

What a socket does not take is copied, so an unread answer holds no slot, but its bytes are memory of the process. Over gRPC
each answer counts as a connection of its own until it is written (`server.grpc.unread`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from ..config.tables import dotted

log = logging.getLogger("greenlane.http")

MIN_RATE = 16 * 1024
"""A client that reads so many bytes gets a second more. A slow mobile line reads several times as many in a second."""
CHECK_INTERVAL = 1.0
"""Seconds between two checks of the connections."""


class Reader(Protocol):
    """A connection whose client has not read all of its answers."""

    def unread(self) -> int:
        """Bytes that were written and that the socket has not taken."""

    def abort(self) -> None:
        """Close at once."""


class UnreadAnswers:
    """The connections of one tenant, or of none, with so much unread that writing pauses. Belongs to the event loop.

    One that takes longer than `seconds`, and a second more for each `MIN_RATE` bytes it has read, is closed; 0: no limit. If
    all together have more than `limit` bytes, those that have been unread the longest are closed; a single one may have more.
    `on_closed` is called for each.
    """

    def __init__(
        self,
        limit: int,
        name: str = "-",
        on_closed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = 60.0
        self.limit = limit
        setting = f" ({dotted(('tenants', name, 'memory'))})" if name != "-" else ""
        self.together = f"together they may have {limit}{setting}"
        self._name = name
        self._on_closed = on_closed
        self._clock = clock
        self._readers: dict[Reader, tuple[float, int, int]] = {}
        self._checking = False

    def __repr__(self) -> str:
        return f"<UnreadAnswers of {self.connections} connections>"

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._readers)

    def add(self, reader: Reader, held: int = 0) -> None:
        """Writing to this connection has paused. `held`: bytes that it keeps until it is discarded, even if some are read."""
        nbytes = reader.unread()
        self._make_room(held or nbytes, self._clock())
        self._readers[reader] = self._clock(), nbytes, held
        if not self._checking:
            self._checking = True
            asyncio.get_running_loop().call_later(CHECK_INTERVAL, self._check_again)

    def discard(self, reader: Reader) -> None:
        """It goes on, or was closed; does nothing if it was not added."""
        self._readers.pop(reader, None)

    def fits(self, nbytes: int, patience: float) -> bool:
        """Whether so many bytes more may be unread. Closes connections that have been unread for `patience` seconds."""
        self._make_room(nbytes, self._clock() - patience)
        return not self._readers or self._total() + nbytes <= self.limit

    def check(self) -> None:
        """Close the connections that have taken too long. The oldest come first, so only few are looked at."""
        now = self._clock()
        for reader, (begun, nbytes, _) in list(self._readers.items()):
            if not self.seconds or now - begun <= self.seconds:
                break
            unread = reader.unread()
            if reader in self._readers and now - begun > self.seconds + max(0, nbytes - unread) / MIN_RATE:
                self.close(reader, f"{unread} of {nbytes} bytes unread after {now - begun:.0f} s (server.write_timeout)")

    def _total(self) -> int:
        return sum([held or reader.unread() for reader, (_, _, held) in self._readers.items()])

    def _make_room(self, nbytes: int, before: float) -> None:
        """Close connections, the oldest first, until the others fit beside so many bytes; none added after `before`."""
        for reader, (begun, _, _) in list(self._readers.items()):
            total = self._total() + nbytes
            if total <= self.limit or begun > before:
                break
            if reader in self._readers:  # Closing one may end others.
                self.close(reader, f"{reader.unread()} bytes unread, and {total} of all connections; {self.together}")

    def close(self, reader: Reader, why: str) -> None:
        """Close a connection for this reason, log and count it."""
        self.discard(reader)
        log.warning("a connection was closed whose client does not read its answer: %s", why, extra={"tenant": self._name})
        self._on_closed()
        reader.abort()

    def _check_again(self) -> None:
        self.check()
        self._checking = bool(self._readers)
        if self._checking:
            asyncio.get_running_loop().call_later(CHECK_INTERVAL, self._check_again)
