"""Connections that the dispatcher refuses: it answers them itself, counts them, and closes them once the answer was read."""

import logging
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress

import orjson

from ...http.strict import HEADER_TIMEOUT_TEXT

log = logging.getLogger("greenlane.processes")

REFUSED = b"#"
"""Before the JSON of how many connections were refused for which reason since the last message to the supervisor."""
QUEUE, ABSENT, WAITING, DESCRIPTORS, TIMEOUT = "queue", "absent", "waiting", "descriptors", "headers"
"""The reasons: too many wait for one process; it cannot be started; too many whose headers are incomplete; no descriptors are
left, so that it is closed without an answer; the headers did not come in time."""
_TEXTS = {
    QUEUE: "too many connections wait for the process that serves this tenant; try again in a second",
    ABSENT: "the process that serves this tenant cannot be started now, and the log says why; try again in a second",
    WAITING: "too many connections wait for the rest of their headers; try again in a second",
    TIMEOUT: HEADER_TIMEOUT_TEXT,
}
LINGER = 2.0
"""Seconds for which what the client still sends is read and dropped: a close with bytes unread would destroy the answer."""
MAX_LINGERING = 512
"""Refused connections kept for that at a time; one more closes the oldest."""
_MAX_READ = 64 * 1024
_MAX_READS = 16
"""How often a connection is read from in one turn."""
_LOG_INTERVAL = 10.0


class RefusedConnections:
    """Belongs to the dispatcher. `watch` has `dropped` called when a connection can be read, until `unwatch`."""

    def __init__(
        self,
        watch: Callable[[socket.socket], None],
        unwatch: Callable[[socket.socket], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._clock = clock
        self._lingering: OrderedDict[int, tuple[socket.socket, float]] = OrderedDict()
        self._unreported: Counter[str] = Counter()
        self._unlogged: Counter[str] = Counter()
        self._log_at = 0.0

    @property
    def deadline(self) -> float | None:
        """When `expire` has something to do next."""
        times = [deadline for _, deadline in self._lingering.values()][:1]
        if self._unlogged:
            times.append(self._log_at)
        return min(times, default=None)

    def refuse(self, connection: socket.socket, reason: str) -> None:
        """Answer this connection, which is not watched, and close it once its client has read that."""
        self.count(reason)
        status = b"408 Request Timeout" if reason == TIMEOUT else b"503 Service Unavailable\r\nretry-after: 1"
        body = orjson.dumps({"error": _TEXTS[reason]})
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            connection.send(head % (status, len(body)) + body)
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # The client has gone, or reads nothing.
            connection.close()
            return
        if len(self._lingering) >= MAX_LINGERING:
            self.drop_oldest()
        self._lingering[connection.fileno()] = connection, self._clock() + LINGER
        self._watch(connection)

    def count(self, reason: str) -> None:
        """Count a connection that was refused."""
        self._unreported[reason] += 1
        self._unlogged[reason] += 1

    def dropped(self, connection: socket.socket) -> None:
        """Drop what can be read from a refused connection, and close it if the client has closed its side."""
        with suppress(BlockingIOError):
            for _ in range(_MAX_READS):
                try:
                    data = connection.recv(_MAX_READ)
                except BlockingIOError:
                    raise
                except OSError:
                    data = b""
                if not data:
                    self._close(connection.fileno())
                    return

    def drop_oldest(self) -> bool:
        """Close the connection that was refused first; False if there is none."""
        if self._lingering:
            self._close(next(iter(self._lingering)))
            return True
        return False

    def expire(self, now: float) -> None:
        """Close what has lingered for long enough, and log what was refused, every few seconds."""
        while self._lingering and next(iter(self._lingering.values()))[1] <= now:
            self._close(next(iter(self._lingering)))
        if self._unlogged and self._log_at <= now:
            counts = ", ".join(f"{count} for {reason}" for reason, count in sorted(self._unlogged.items()))
            log.warning("connections were refused by the dispatcher: %s (greenlane_refused_connections_total)", counts)
            self._unlogged.clear()
            self._log_at = now + _LOG_INTERVAL

    def report(self, control: socket.socket) -> None:
        """Send the supervisor what it does not know of yet."""
        if self._unreported:
            with suppress(OSError):
                control.send(REFUSED + orjson.dumps(self._unreported))
                self._unreported.clear()

    def close(self) -> None:
        """Close all of them."""
        while self.drop_oldest():
            pass

    def _close(self, descriptor: int) -> None:
        connection, _ = self._lingering.pop(descriptor)
        self._unwatch(connection)
        connection.close()
