"""Load as hard as it can be made: every connection sends again as soon as it was answered, hardly sends, hardly reads, or
never stays."""

import select
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from time import perf_counter, sleep

from .jobs import ClosedLoop, Tally
from .wire import Broken, Connection

EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
"""Edge-triggered, so that a connection is registered once in its life."""
SIP, PAUSE, HOLD = 64, 0.02, 0.5
"""A slow reader takes so many bytes every so many seconds, and hangs up after so many."""
NARROW = 4096
"""Bytes of a slow reader's receive buffer: what it does not read stays with the server."""


class Load(ABC):
    """What every behaviour has: its job, its requests in turn, and its `tally`."""

    def __init__(self, job: ClosedLoop) -> None:
        self._job = job
        self._asks = cycle(job.asks)
        self.tally = Tally(job.name, job.ahead + job.seconds)

    @abstractmethod
    def run(self, start: float) -> Tally:
        """Begin `ahead` seconds before `start` (by `time.perf_counter`), end `seconds` after it. Blocks."""

    def _open(self, receive_buffer: int | None = None) -> Connection:
        connection = Connection(self._job.port, receive_buffer, self._job.host)
        connection.open()
        return connection

    def _close(self, connection: Connection) -> None:
        self.tally.sent += connection.sent
        self.tally.received += connection.received
        connection.close()


class Flood(Load):
    """Connections that ask again at once; with `churn`, each time on a new one."""

    def __init__(self, job: ClosedLoop) -> None:
        super().__init__(job)
        self._poll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._missing = job.connections

    def run(self, start: float) -> Tally:
        _sleep_until(start - self._job.ahead)
        while (left := start + self._job.seconds - perf_counter()) > 0:
            missing, self._missing = self._missing, 0
            for _ in range(missing):
                self._begin()
            for number, events in self._poll.poll(0.001 if self._missing else left):
                self._step(number, events)
        for connection in self._connections.values():
            self._close(connection)
        self._poll.close()
        return self.tally

    def _begin(self) -> None:
        connection = self._open()
        self.tally.opened += 1
        number = connection.socket.fileno()
        self._connections[number] = connection
        self._poll.register(number, EVENTS)
        self._ask(number, connection)

    def _ask(self, number: int, connection: Connection) -> None:
        try:
            connection.send(next(self._asks).data)
        except Broken:
            self._end(number, 0)

    def _step(self, number: int, events: int) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        try:
            connection.flush()
            answer = connection.receive() if events & ~select.EPOLLOUT else None
        except Broken:
            self._end(number, 0)
            return
        if answer and (answer.last or self._job.behaviour == "churn"):
            self._end(number, answer.status)
        elif answer:
            self.tally.count(answer.status)
            self._ask(number, connection)

    def _end(self, number: int, status: int) -> None:
        """Close a connection, which takes it out of the poll; another is begun before the next look at all of them."""
        self.tally.count(status)
        self._close(self._connections.pop(number))
        self._missing += 1


class SlowReaders(Load):
    """Connections that ask for much, take a few bytes of it now and then, and hang up."""

    def run(self, start: float) -> Tally:
        """As `Load.run`. Connections begin apart, so that they do not all hang up at once."""
        _sleep_until(start - self._job.ahead)
        began, count = perf_counter(), self._job.connections
        readers = {self._new(): began - HOLD * index / count for index in range(count)}
        while (now := perf_counter()) < start + self._job.seconds:
            for connection, since in list(readers.items()):
                if now - since > HOLD or not self._sip(connection):
                    self._count(connection)
                    del readers[connection]
                    readers[self._new()] = now
            sleep(PAUSE)
        for connection in readers:
            self._count(connection)
        return self.tally

    def _new(self) -> Connection:
        connection = self._open(NARROW)
        with suppress(Broken):  # The first sip finds out.
            connection.send(next(self._asks).data)
        return connection

    def _sip(self, connection: Connection) -> bool:
        """Take a little; whether there is more to come."""
        try:
            connection.flush()
            answer = connection.receive(SIP)
        except Broken:
            return False
        return answer is None

    def _count(self, connection: Connection) -> None:
        """An answer that was begun and not read to its end is what a slow reader is about: it counts as one."""
        self.tally.count(connection.status)
        self._close(connection)


class Drippers(Load):
    """Connections that each send a byte of their request now and then; those that are answered or closed begin again."""

    def run(self, start: float) -> Tally:
        """As `Load.run`. Connections begin apart, so that their bytes come one by one."""
        _sleep_until(start - self._job.ahead)
        until, gap = start + self._job.seconds, self._job.every / self._job.connections
        held = deque(self._begin() for _ in range(self._job.connections))
        due = perf_counter()
        while (due := due + gap) < until:
            _sleep_until(due)
            connection, left = held.popleft()
            held.append((connection, left) if self._drip(connection, left) else self._begin())
        for connection, _ in held:
            connection.close()
        return self.tally

    def _begin(self) -> tuple[Connection, Iterator[int]]:
        connection = self._open()
        self.tally.opened += 1
        connection.send(b"")
        return connection, iter(next(self._asks).data)

    def _drip(self, connection: Connection, left: Iterator[int]) -> bool:
        """Send the next byte, if there is one; whether that is all for now."""
        if (byte := next(left, None)) is None:
            return self._look(connection)
        try:
            connection.unsent = memoryview(bytes([byte]))
            connection.flush()
        except Broken:
            return self._end(connection, 0)
        self.tally.sent += 1
        return self._look(connection)

    def _look(self, connection: Connection) -> bool:
        try:
            answer = connection.receive()
        except Broken:
            return self._end(connection, 0)
        return self._end(connection, answer.status) if answer else True

    def _end(self, connection: Connection, status: int) -> bool:
        self.tally.count(status)
        connection.close()
        return False


class Knockers(Load):
    """Connections that say nothing and are closed as soon as they are there."""

    def run(self, start: float) -> Tally:
        """As `Load.run`, in batches of as many connections as there may be at a time."""
        _sleep_until(start - self._job.ahead)
        while perf_counter() < start + self._job.seconds:
            connections = [self._open() for _ in range(self._job.connections)]
            for connection in connections:
                connection.close()
            self.tally.opened += len(connections)
            sleep(self._job.every)
        return self.tally


class Once(Load):
    """Connections that each ask once; what is not answered in time counts as 0."""

    def run(self, start: float) -> Tally:
        """As `Load.run`."""
        _sleep_until(start - self._job.ahead)
        until = start + self._job.seconds + self._job.grace
        for connection in [self._begin() for _ in range(self._job.connections)]:
            self._end(connection, until)
        return self.tally

    def _begin(self) -> Connection:
        connection = self._open()
        self.tally.opened += 1
        with suppress(Broken):  # The look for its answer finds out.
            connection.send(next(self._asks).data, keep=True)
        return connection

    def _end(self, connection: Connection, until: float) -> None:
        answer = None
        with suppress(Broken):
            while not answer and (left := until - perf_counter()) > 0:
                answer = connection.step(left)
        self.tally.count(answer.status if answer else 0)
        if answer:
            self.tally.bodies.append(answer.body or b"")
        self._close(connection)


def closed_loop(job: ClosedLoop) -> Load:
    """The behaviour that the job names."""
    match job.behaviour:
        case "slow":
            return SlowReaders(job)
        case "drip":
            return Drippers(job)
        case "knock":
            return Knockers(job)
        case "once":
            return Once(job)
    return Flood(job)


def _sleep_until(moment: float) -> None:
    sleep(max(0.0, moment - perf_counter()))
