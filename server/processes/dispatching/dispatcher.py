"""The dispatcher: accepts connections, looks at their first headers, and hands each to the process that it belongs to.

It only peeks at a connection (MSG_PEEK), so the process that gets the socket still finds every byte. What one connection can
cost is bounded, whatever is sent: the constants below limit for how long, for how many bytes and pieces, and for how many
connections at a time it waits for headers; beyond that it refuses them itself (see `refused`). Connections for a process that
died wait for its replacement, and so do those that it was handed but has not taken. A tenant's processes, if it has several,
get connections in turn (see `HandoffQueue`).
"""

import logging
import os
import resource
import select
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import msgspec

from ...config.schema import Config
from ...config.tenant import TenantConfig
from ...http.strict import HEADER_TIMEOUT
from ...tenants.auth import Tenancy
from ..channels import handoff
from ..channels.handoff import Ends, Handoff
from ..channels.routing import DISPATCHER, MAX_HEAD, SHARED, UNAUTHENTICATED, destination, owner
from ..children.process_setup import set_up
from .handoff_queue import MAX_QUEUED, HandoffQueue
from .refused import ABSENT, DESCRIPTORS, QUEUE, TIMEOUT, WAITING, RefusedConnections

log = logging.getLogger("greenlane.processes")

MAX_PIECES = 8
"""Pieces in which the headers may come. After more, the unauthenticated HTTP process reads on, and gives the connection back
once it knows the tenant.
"""
MAX_WAITING = 4096
"""Connections that may wait for their headers at a time; for one more the oldest is refused."""
HEARTBEAT, HEARTBEAT_ANSWER = b"?", b"!"
"""The supervisor's question over `control` and the answer, which show that the dispatcher does not hang; no process's name.

The other messages to the supervisor are RECONFIGURED, what `refused.REFUSED` says, and the name of an HTTP process that sent a
malformed handoff.
"""
WITHDRAWN = b"~"
"""Before the name of an HTTP process: the supervisor's message that it has ended. No name begins so."""
AWAY = b"^"
"""Before the name of an HTTP process: it cannot be started, so that its connections are to be refused until it was."""
RECONFIGURE, RECONFIGURED = b"=", b"."
"""The supervisor's message with a file of the tenants' keys (see `Keys`), and the answer once they are used."""
_PAUSE = 0.1
"""Seconds for which no connections are accepted once there are no descriptors or no memory left for them."""
_MAX_ACCEPTS = 64
"""Connections accepted at a time from one listening socket."""
MAX_NAME = 4096
"""Bytes of the longest message over `control`."""
_MOST_DESCRIPTORS = 2
"""Descriptors in one of these messages."""


class Keys(msgspec.Struct):
    """The digests of each tenant's keys, and the default tenant: what says whose a request is."""

    tenants: dict[str, tuple[str, ...]]
    default: str | None

    def tenancy(self) -> Tenancy:
        """Tenants of which only the names and keys are known."""
        known = [TenantConfig(name=name, models=("*",), keys_sha256=keys) for name, keys in self.tenants.items()]
        return Tenancy(known, self.default)


@dataclass(slots=True)
class Waiting:
    """A connection whose headers are not complete: by when they have to be, and in how many pieces they came so far."""

    connection: socket.socket
    deadline: float
    pieces: int = 0


class Dispatcher:
    """Serves until the other end of `control` is closed. `listeners` are non-blocking.

    Over `control` the supervisor sends the name of an HTTP process with both ends of the socket over which it takes
    connections, the name of one that has ended after WITHDRAWN, or cannot be started after AWAY, and heartbeats.
    """

    def __init__(
        self,
        tenancy: Tenancy,
        listeners: Iterable[socket.socket],
        control: socket.socket,
        max_waiting: int = MAX_WAITING,
        clock: Callable[[], float] = time.monotonic,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._tenancy = tenancy
        self._control = control
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._max_waiting = max_waiting
        self._clock = clock
        self._epoll = select.epoll()
        self._max_queued = max_queued
        self.queues = {name: self._queue_of(name) for name in (*tenancy.tenants, SHARED, UNAUTHENTICATED)}
        """The connections on their way to each tenant's processes, or to those of no tenant."""
        self._refused = RefusedConnections(self._watch_refused, self._unwatch, clock)
        self._away: set[str] = set()
        """The tenants whose process cannot be started."""
        self._gone: set[str] = set()
        """Tenants that have gone: a connection for one of them shows no valid tenant any more."""
        self._waiting: OrderedDict[int, Waiting] = OrderedDict()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._resume_at: float | None = None
        self._open = True

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self._waiting)} waiting, {self.queues}>"

    def run(self) -> None:
        """Serve. Blocks."""
        self._watch(self._control, self._on_control)
        self._start_accepting()
        while self._open:
            events = self._epoll.poll(self._poll_timeout())
            # Accept last, so that no new connection reuses a descriptor that another event of this round is about.
            for descriptor, event in sorted(events, key=lambda ready: ready[0] in self._listeners):
                if handler := self._handlers.get(descriptor):
                    handler(event)
            self._expire(self._clock())

    def close(self) -> None:
        """Close all connections that wait. Call it after `run` has returned."""
        while self._waiting:
            self._close_waiting(next(iter(self._waiting)))
        self._refused.close()
        for queue in self.queues.values():
            queue.close()
        self._epoll.close()

    def _watch(self, end: socket.socket, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        self._handlers[end.fileno()] = handler
        self._epoll.register(end.fileno(), events)

    def _unwatch(self, end: socket.socket) -> None:
        del self._handlers[end.fileno()]
        self._epoll.unregister(end.fileno())

    def _poll_timeout(self) -> float:
        """Seconds until the next deadline, or -1 without one."""
        deadlines = [each.deadline for each in islice(self._waiting.values(), 1)]
        if self._resume_at is not None:
            deadlines.append(self._resume_at)
        if (next_ := self._refused.deadline) is not None:
            deadlines.append(next_)
        return max(0.0, min(deadlines) - self._clock()) if deadlines else -1

    def _expire(self, now: float) -> None:
        while self._waiting and next(iter(self._waiting.values())).deadline <= now:
            self._refuse_oldest(TIMEOUT)
        self._refused.expire(now)
        if self._resume_at is not None and self._resume_at <= now:
            self._resume_at = None
            self._start_accepting()

    def _on_control(self, _: int) -> None:
        """The supervisor says that a process has started or ended, or something else, or closed the socket to end this one."""
        self._keep_room()
        try:
            name, descriptors, _flags, _address = socket.recv_fds(self._control, MAX_NAME, _MOST_DESCRIPTORS)
        except ConnectionError:  # The supervisor was killed before it read what was sent to it.
            name, descriptors = b"", []
        if not name:
            self._open = False
            return
        if name == RECONFIGURE:
            self._reconfigure(descriptors[0])
            return
        if name == HEARTBEAT:
            with suppress(OSError):
                self._control.send(HEARTBEAT_ANSWER)
            self._refused.report(self._control)
            return
        if name.startswith(AWAY):
            self._refuse_all(owner(name.removeprefix(AWAY).decode()))
            return
        process = name.removeprefix(WITHDRAWN).decode()
        queue = self.queues.get(owner(process))
        if queue is None:  # Its tenant has not come after all, or had gone when this dispatcher was started.
            for each in descriptors:
                os.close(each)
            return
        self._take_back_rest(queue, process)
        self._disconnect(queue, process)
        if not name.startswith(WITHDRAWN):
            ends = Ends(*[socket.socket(fileno=each) for each in descriptors])
            queue.connect(process, ends)
            self._away.discard(owner(process))
            self._watch(ends.ours, lambda events: self._on_process(queue, process, events))
        elif owner(process) in self._gone:
            self._empty(queue)
        self._flush(queue)

    def _reconfigure(self, descriptor: int) -> None:
        """Use the keys in this file from now on."""
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)  # The offset is the sender's, who has just written it.
            self._tenancy = msgspec.json.decode(file.read(), type=Keys).tenancy()
        self._follow_tenants()
        with suppress(OSError):
            self._control.send(RECONFIGURED)

    def _follow_tenants(self) -> None:
        """Have a queue for each tenant. That of one that has gone stays for what its processes may give back until they end."""
        known = {*self._tenancy.tenants, SHARED, UNAUTHENTICATED}
        for name in known - self.queues.keys():
            self.queues[name] = self._queue_of(name)
        self._gone = self.queues.keys() - known
        for name in self._gone:
            self._empty(self.queues[name])

    def _empty(self, queue: HandoffQueue) -> None:
        """Hand over once more what waits for a tenant that has gone."""
        for waiting in queue.take():
            self._hand_over(waiting)

    def _on_process(self, queue: HandoffQueue, process: str, events: int) -> None:
        """An HTTP process gives a connection back, has room for more, or is gone."""
        if events & select.EPOLLIN:
            self._take_back(queue, process)
        elif events & (select.EPOLLHUP | select.EPOLLERR):
            self._disconnect(queue, process)
        self._flush(queue)

    def _take_back(self, queue: HandoffQueue, process: str) -> None:
        """Pass on a connection whose next request is for another process.

        A process that sends one for an unknown process is no longer trusted: it is reported, and the supervisor replaces it.
        """
        try:
            received = handoff.receive(queue.ends[process].ours)
        except BlockingIOError:
            return
        if received and received.name in self.queues:
            self._hand_over(received)
            return
        self._disconnect(queue, process)
        if received:
            received.close()
            log.error("malformed handoff from the HTTP process of %s; closing its socket", process)
            with suppress(OSError):
                self._control.send(process.encode())

    def _take_back_rest(self, queue: HandoffQueue, process: str) -> None:
        """Pass on what a process gave back before it ended. No more than its socket can hold: one that hangs may send on."""
        for _ in range(MAX_QUEUED if process in queue.ends else 0):
            try:
                received = handoff.receive(queue.ends[process].ours)
            except BlockingIOError:
                return
            if received is None:
                return
            if received.name in self.queues:
                self._hand_over(received)
            else:
                received.close()

    def _disconnect(self, queue: HandoffQueue, process: str) -> None:
        if end := queue.disconnect(process):
            self._unwatch(end)

    def _hand_over(self, handoff: Handoff) -> None:
        if handoff.name in self._gone:
            handoff = handoff._replace(name=UNAUTHENTICATED)
        queue = self.queues[handoff.name]
        if handoff.name in self._away:
            self._refuse(handoff, ABSENT)
        elif not queue.put(handoff):
            self._refuse(handoff, QUEUE)
        self._flush(queue)

    def _refuse_all(self, tenant: str) -> None:
        """Answer what waits for a process that cannot be started, and what comes until it was."""
        self._away.add(tenant)
        for waiting in self.queues[tenant].take() if tenant in self.queues else ():
            self._refuse(waiting, ABSENT)

    def _refuse(self, handoff: Handoff, reason: str) -> None:
        """Answer a connection that no process takes; a flood of those without a tenant is only counted."""
        if handoff.name == UNAUTHENTICATED:
            self._refused.count(reason)
            handoff.close()
            return
        self._refused.refuse(handoff.connection, reason)
        if handoff.read_ahead is not None:
            os.close(handoff.read_ahead)

    def _queue_of(self, name: str) -> HandoffQueue:
        return HandoffQueue(MAX_QUEUED if name == UNAUTHENTICATED else self._max_queued)

    def _watch_refused(self, connection: socket.socket) -> None:
        self._watch(connection, lambda _: self._refused.dropped(connection), select.EPOLLIN | select.EPOLLRDHUP)

    def _flush(self, queue: HandoffQueue) -> None:
        queue.flush()
        for end, _ in queue.ends.values():
            self._epoll.modify(end.fileno(), select.EPOLLIN | (select.EPOLLOUT if queue.waiting else 0))

    def _start_accepting(self) -> None:
        for listener in self._listeners.values():
            self._watch(listener, lambda _, listener=listener: self._accept(listener))  # type: ignore[misc]

    def _accept(self, listener: socket.socket) -> None:
        try:
            for _ in range(_MAX_ACCEPTS):
                connection, _address = listener.accept()
                connection.setblocking(False)
                self._look(connection)
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # No descriptors or no memory are left.
            self._make_room()

    def _keep_room(self) -> None:
        """Close connections until the descriptors of a message have room: as many may wait for a tenant's process as there are
        descriptors, and what the supervisor sends comes but once.
        """
        while not _has_room(self._control.fileno()) and not self._refused.drop_oldest():
            if self._waiting:
                self._refuse_oldest(DESCRIPTORS)
            elif max(self.queues.values(), key=lambda queue: queue.length).drop_newest():
                self._refused.count(DESCRIPTORS)
            else:
                return

    def _make_room(self) -> None:
        """Refuse the connection that waits longest; if none waits, leave new ones in the kernel's queue for a moment."""
        if self._waiting:
            self._refuse_oldest(DESCRIPTORS)
        elif self._resume_at is None:
            self._resume_at = self._clock() + _PAUSE
            for listener in self._listeners.values():
                self._unwatch(listener)

    def _look(self, connection: socket.socket) -> None:
        """Hand a connection over if its headers are complete, or came in too many pieces; else wait for more of them."""
        try:
            data = connection.recv(MAX_HEAD, socket.MSG_PEEK)
        except BlockingIOError:
            self._wait(connection, 1)
            return
        except OSError:
            data = b""
        name = destination(data, self._tenancy) if data else None
        if name is not None:
            self._release(connection)
            self._hand_over(Handoff(name, connection))
        elif data and not self._has_max_pieces(connection):
            self._wait(connection, len(data) + 1)
        elif data:
            self._release(connection)
            self._hand_over(Handoff(UNAUTHENTICATED, connection))
        else:
            self._release(connection)
            connection.close()

    def _has_max_pieces(self, connection: socket.socket) -> bool:
        """Count one more piece of a connection's headers. Whether these were as many as this process waits for."""
        waiting = self._waiting.get(connection.fileno())
        if waiting is None:
            return False
        waiting.pieces += 1
        return waiting.pieces >= MAX_PIECES

    def _wait(self, connection: socket.socket, nbytes: int) -> None:
        """Look again when this many bytes can be read, or the client has disconnected."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        if connection.fileno() not in self._waiting:
            self._waiting[connection.fileno()] = Waiting(connection, self._clock() + HEADER_TIMEOUT)
            events = select.EPOLLIN | select.EPOLLRDHUP
            self._watch(connection, lambda events: self._on_more(connection, events), events)
            if len(self._waiting) > self._max_waiting:
                self._refuse_oldest(WAITING)

    def _on_more(self, connection: socket.socket, events: int) -> None:
        self._look(connection)
        disconnected = events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR)
        if disconnected and connection.fileno() in self._waiting:  # The rest of the headers will not come.
            self._close_waiting(connection.fileno())

    def _release(self, connection: socket.socket) -> None:
        """No longer wait for this connection's headers, if it does."""
        if self._waiting.pop(connection.fileno(), None):
            self._unwatch(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _refuse_oldest(self, reason: str) -> None:
        """Refuse the connection that waits longest for its headers: with an answer if it has sent any, or else by a close."""
        connection = next(iter(self._waiting.values())).connection
        self._release(connection)
        try:
            sent = connection.recv(1, socket.MSG_PEEK)
        except OSError:
            sent = b""
        if sent and reason != DESCRIPTORS:
            self._refused.refuse(connection, reason)
            return
        if sent or reason != TIMEOUT:  # A client may also open a connection that it has no use for in the end.
            self._refused.count(reason)
        connection.close()

    def _close_waiting(self, descriptor: int) -> None:
        connection = self._waiting[descriptor].connection
        self._release(connection)
        connection.close()


def _has_room(descriptor: int) -> bool:
    """Whether this process may have as many descriptors more as a message has."""
    copies: list[int] = []
    try:
        copies += (os.dup(descriptor) for _ in range(_MOST_DESCRIPTORS))
    except OSError:
        return False
    finally:
        for each in copies:
            os.close(each)
    return True


def keys_of(config: Config) -> Keys:
    """The keys of a configuration."""
    return Keys({name: each.keys_sha256 for name, each in config.tenants.items()}, config.server.default_tenant)


def main(keys: Keys, log_format: str, log_level: str, listeners: list[socket.socket], control: socket.socket) -> None:
    """The dispatcher's process."""
    set_up(DISPATCHER, log_format, log_level)
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting, queued = min(MAX_WAITING, descriptors // 2), max(MAX_QUEUED, descriptors // 4)
    Dispatcher(keys.tenancy(), listeners, control, max_waiting=waiting, max_queued=queued).run()
