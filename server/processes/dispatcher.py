"""The process that accepts connections, looks at their first headers, and passes each on to the process it belongs to.

It reads nothing: it peeks, so that whoever gets the socket finds every byte still there. It waits for headers for as long,
as many bytes and as many pieces as set below, and for so many connections at a time: what one connection costs it is bounded,
whatever is sent. What belongs to a process that died waits for the one that takes its place.
"""

import resource
import select
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from ..config.schema import Config
from ..tenants.auth import Tenancy
from . import handoff
from .handoff import Passed
from .process_setup import begin
from .routing import MOST, SHARED, UNAUTHENTICATED, destination

PATIENCE = 30.0
"""Seconds until the headers have to be there."""
MOST_PIECES = 8
"""Pieces in which the headers may come. With more the process for strangers reads on, and gives a tenant's connection back
once it knows whose it is.
"""
MOST_WAITING = 4096
"""Connections that may be without headers at a time; one more, and the oldest is hung up on."""
MOST_QUEUED = 1024
"""Connections that may wait for one process to take them; one more is hung up on."""
ASK, ANSWER = b"?", b"!"
"""What the dispatcher is asked and answers, over `control`, to show that it turns: no process has such a name."""
_BREATH = 0.1
"""Seconds without new connections once there is nothing left to hold them with."""
_AT_ONCE = 64
_NAME = 4096


class Door:
    """The way to one process, and what waits for it. `end` is None while there is no such process."""

    def __init__(self) -> None:
        self.end: socket.socket | None = None
        self._queue: deque[Passed] = deque()

    def __repr__(self) -> str:
        return f"<Door {'open' if self.end else 'shut'}, {len(self._queue)} waiting>"

    @property
    def busy(self) -> bool:
        """Whether connections wait to be taken."""
        return bool(self._queue)

    def put(self, passed: Passed) -> None:
        """Pass this on, now or once there is room; too many, and it is hung up on."""
        self._queue.append(passed)
        self.flush()
        if len(self._queue) > MOST_QUEUED:
            self._queue.pop().close()

    def flush(self) -> None:
        """Pass on what can be."""
        with suppress(OSError):  # No room, or nobody there: epoll tells of either's end.
            while self.end and self._queue:
                handoff.give(self.end, self._queue[0])
                self._queue.popleft().close()

    def close(self) -> None:
        """Hang up on whoever waits, and on the process."""
        if self.end:
            self.end.close()
        while self._queue:
            self._queue.pop().close()


@dataclass(slots=True)
class Waiting:
    """A connection whose headers are not whole: until when they may come, and in how many pieces they came so far."""

    connection: socket.socket
    end: float
    pieces: int = 0


class Dispatcher:
    """Serves until `control` is hung up. `listeners` are non-blocking; `patience` is in seconds of `clock`.

    `looks` is how often it looked at what came on a connection, for tests.
    """

    def __init__(
        self,
        tenancy: Tenancy,
        listeners: Iterable[socket.socket],
        control: socket.socket,
        patience: float = PATIENCE,
        most_waiting: int = MOST_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenancy = tenancy
        self._control = control
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._patience = patience
        self._most_waiting = most_waiting
        self._clock = clock
        self._epoll = select.epoll()
        self._doors = {name: Door() for name in (*tenancy.tenants, SHARED, UNAUTHENTICATED)}
        self._waiting: OrderedDict[int, Waiting] = OrderedDict()
        self.looks = 0
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._resume: float | None = None
        self._open = True

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self._waiting)} waiting, {self._doors}>"

    def run(self) -> None:
        """Serve. Blocks."""
        self._watch(self._control, self._on_control)
        self._welcome()
        while self._open:
            events = self._epoll.poll(self._until_next())
            # New connections last, so that none has the number of one that an event of this turn is about.
            for descriptor, event in sorted(events, key=lambda told: told[0] in self._listeners):
                if handler := self._handlers.get(descriptor):
                    handler(event)
            self._expire(self._clock())

    def close(self) -> None:
        """Let go of everyone who waits. `run` has returned."""
        while self._waiting:
            self._hang_up(next(iter(self._waiting)))
        for way in self._doors.values():
            way.close()
        self._epoll.close()

    def _watch(self, end: socket.socket, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        self._handlers[end.fileno()] = handler
        self._epoll.register(end.fileno(), events)

    def _forget(self, end: socket.socket) -> None:
        del self._handlers[end.fileno()]
        self._epoll.unregister(end.fileno())

    def _until_next(self) -> float:
        """Seconds to sleep at most; -1 for as long as nothing happens."""
        ends = [each.end for each in islice(self._waiting.values(), 1)] + ([] if self._resume is None else [self._resume])
        return max(0.0, min(ends) - self._clock()) if ends else -1

    def _expire(self, now: float) -> None:
        while self._waiting and next(iter(self._waiting.values())).end <= now:
            self._hang_up(next(iter(self._waiting)))
        if self._resume is not None and self._resume <= now:
            self._resume = None
            self._welcome()

    def _on_control(self, _: int) -> None:
        """A new process takes this name's place, it is asked whether it turns, or everything ends."""
        try:
            name, descriptors, _flags, _address = socket.recv_fds(self._control, _NAME, 1)
        except ConnectionError:  # The other end was killed before it read what was sent to it.
            name, descriptors = b"", []
        if not name:
            self._open = False
            return
        if name == ASK:
            with suppress(OSError):
                self._control.send(ANSWER)
            return
        end, way = socket.socket(fileno=descriptors[0]), self._doors[name.decode()]
        self._shut(way)
        way.end = end
        self._watch(end, lambda events: self._on_door(way, events))
        self._pass(way)

    def _on_door(self, way: Door, events: int) -> None:
        if events & select.EPOLLIN:
            self._take_back(way)
        elif events & (select.EPOLLHUP | select.EPOLLERR):
            self._shut(way)
        self._pass(way)

    def _take_back(self, way: Door) -> None:
        """A process gives a connection back whose next request is somebody else's, or it is gone."""
        assert way.end
        with suppress(BlockingIOError):
            if passed := handoff.take(way.end):
                self._send(passed)
            else:
                self._shut(way)

    def _shut(self, way: Door) -> None:
        if way.end:
            self._forget(way.end)
            way.end.close()
            way.end = None

    def _send(self, passed: Passed) -> None:
        way = self._doors[passed.name]
        way.put(passed)
        self._pass(way)

    def _pass(self, way: Door) -> None:
        way.flush()
        if way.end:
            self._epoll.modify(way.end.fileno(), select.EPOLLIN | (select.EPOLLOUT if way.busy else 0))

    def _welcome(self) -> None:
        for listener in self._listeners.values():
            self._watch(listener, lambda _, listener=listener: self._accept(listener))  # type: ignore[misc]

    def _accept(self, listener: socket.socket) -> None:
        try:
            for _ in range(_AT_ONCE):
                connection, _address = listener.accept()
                connection.setblocking(False)
                self._look(connection)
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # No descriptors or no memory are left.
            self._make_room()

    def _make_room(self) -> None:
        """Hang up on whoever waits the longest; if nobody waits, leave newcomers in the kernel's queue for a moment."""
        if self._waiting:
            self._hang_up(next(iter(self._waiting)))
        elif self._resume is None:
            self._resume = self._clock() + _BREATH
            for listener in self._listeners.values():
                self._forget(listener)

    def _look(self, connection: socket.socket) -> None:
        """Pass a connection on if its headers are there, or will not be soon; else wait for more of them."""
        self.looks += 1
        try:
            data = connection.recv(MOST, socket.MSG_PEEK)
        except BlockingIOError:
            self._wait(connection, 1)
            return
        except OSError:
            data = b""
        where = destination(data, self._tenancy) if data else None
        if where is not None:
            self._release(connection)
            self._send(Passed(where, connection))
        elif data and not self._is_slow(connection):
            self._wait(connection, len(data) + 1)
        elif data:
            self._release(connection)
            self._send(Passed(UNAUTHENTICATED, connection))
        else:
            self._release(connection)
            connection.close()

    def _is_slow(self, connection: socket.socket) -> bool:
        """Whether its headers came in so many pieces by now that it is not waited for here."""
        waiting = self._waiting.get(connection.fileno())
        if waiting is None:
            return False
        waiting.pieces += 1
        return waiting.pieces >= MOST_PIECES

    def _wait(self, connection: socket.socket, nbytes: int) -> None:
        """Be told when there are so many bytes to read, or the client hung up."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        if connection.fileno() not in self._waiting:
            self._waiting[connection.fileno()] = Waiting(connection, self._clock() + self._patience)
            events = select.EPOLLIN | select.EPOLLRDHUP
            self._watch(connection, lambda events: self._on_more(connection, events), events)
            if len(self._waiting) > self._most_waiting:
                self._hang_up(next(iter(self._waiting)))

    def _on_more(self, connection: socket.socket, events: int) -> None:
        self._look(connection)
        gone = events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR)
        if gone and connection.fileno() in self._waiting:  # Nothing more comes of those headers.
            self._hang_up(connection.fileno())

    def _release(self, connection: socket.socket) -> None:
        if self._waiting.pop(connection.fileno(), None):
            self._forget(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _hang_up(self, descriptor: int) -> None:
        connection = self._waiting[descriptor].connection
        self._release(connection)
        connection.close()


def main(config: Config, listeners: list[socket.socket], control: socket.socket) -> None:
    """The process."""
    begin("(dispatcher)", config)
    tenancy = Tenancy(config.tenants.values(), config.server.default_tenant)
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    Dispatcher(tenancy, listeners, control, most_waiting=min(MOST_WAITING, descriptors // 2)).run()
