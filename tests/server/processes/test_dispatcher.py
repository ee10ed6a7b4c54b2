"""The dispatcher in a thread, with real connections; each door's other end is the test's."""

import errno
import gc
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from server.config.schema import TenantConfig
from server.processes import handoff
from server.processes.dispatcher import MOST_PIECES, MOST_QUEUED, Dispatcher, Door
from server.processes.handoff import Passed
from server.processes.routing import SHARED, UNAUTHENTICATED
from server.tenants.auth import Tenancy

TENANTS = [TenantConfig(name=name, granules=1, models=("*",)) for name in ("acme", "globex")]
ACME = b"POST / HTTP/1.1\r\nX-Tenant: acme\r\n\r\nbody"
GLOBEX = ACME.replace(b"acme", b"globex")
PATIENCE = 10.0


class Listener:
    """A listening socket that can be told to fail, as a system does that has run out of something."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.errors: list[OSError] = []
        self.asked = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Any:
        self.asked += 1
        if self.errors:
            raise self.errors.pop()
        return self._socket.accept()

    def connect(self) -> socket.socket:
        found = socket.create_connection(self._socket.getsockname(), PATIENCE)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found

    def close(self) -> None:
        self._socket.close()


class Bench:
    """A dispatcher at work. `now` is its clock, in seconds."""

    def __init__(self, **options: Any) -> None:
        self.listener = Listener()
        self.now = 0.0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listeners: Any = [self.listener]
        self.dispatcher = Dispatcher(Tenancy(TENANTS, None), listeners, theirs, clock=lambda: self.now, **options)
        self._stack = ExitStack()
        for each in (self._control, theirs, self.listener):
            self._stack.callback(each.close)
        self._thread = threading.Thread(target=self.dispatcher.run)

    def __enter__(self) -> "Bench":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._control.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.dispatcher.close()
        self._stack.close()

    def door(self, name: str) -> socket.socket:
        """Open a door, and return the process's end of it."""
        ours, theirs = handoff.pair()
        with ours:
            socket.send_fds(self._control, [name.encode()], [ours.fileno()])
        self._stack.callback(theirs.close)
        return theirs

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = self.listener.connect()
        self._stack.callback(connection.close)
        connection.sendall(data)
        return connection

    def wake(self) -> None:
        """Make it look at its clock."""
        self.connect(ACME)


def taken(end: socket.socket) -> tuple[bytes, bytes]:
    """The bytes of the next connection that comes through: those read before, and those still to be read."""
    assert select.select([end], [], [], PATIENCE)[0], "no connection came"
    passed = handoff.take(end)
    assert passed
    passed.connection.settimeout(PATIENCE)
    found = passed.data(), passed.connection.recv(1 << 16)
    passed.close()
    return found


def hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # With bytes that it never read.
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench() as bench:
        yield bench


def test_each_connection_goes_through_its_door_with_every_byte_unread(bench: Bench) -> None:
    acme, globex = bench.door("acme"), bench.door("globex")
    bench.connect(GLOBEX)
    bench.connect(ACME)
    assert taken(acme) == (b"", ACME)
    assert taken(globex) == (b"", GLOBEX)


def send(bench: Bench, connection: socket.socket, piece: bytes) -> None:
    """Send this and wait until the dispatcher has looked at it."""
    before = bench.dispatcher.looks
    connection.sendall(piece)
    until(lambda: bench.dispatcher.looks > before)


def test_headers_may_come_in_a_few_pieces(bench: Bench) -> None:
    acme = bench.door("acme")
    connection = bench.connect()
    until(lambda: bench.dispatcher.looks == 1)
    for piece in (b"POST / HTTP/1.1\r\n", b"X-Tenant: acme", b"\r\n\r", b"\nbody"):
        send(bench, connection, piece)
    assert taken(acme) == (b"", ACME)


def test_headers_that_come_in_many_pieces_are_read_by_the_strangers_process(bench: Bench) -> None:
    unauthenticated = bench.door(UNAUTHENTICATED)
    connection = bench.connect()
    until(lambda: bench.dispatcher.looks == 1)
    for index in range(MOST_PIECES):
        send(bench, connection, ACME[index : index + 1])
    assert taken(unauthenticated) == (b"", ACME[:MOST_PIECES])
    connection.sendall(ACME[MOST_PIECES:])
    assert bench.dispatcher.looks == MOST_PIECES + 1


@pytest.mark.parametrize("data", [b"\r\n" + b"X" * 17_000, b"\r\n" * 8_500], ids=["a line", "empty lines"])
def test_what_is_no_head_after_empty_lines_does_not_keep_the_dispatcher_busy(bench: Bench, data: bytes) -> None:
    unauthenticated = bench.door(UNAUTHENTICATED)
    bench.connect(data)
    assert select.select([unauthenticated], [], [], PATIENCE)[0], "the dispatcher waits for headers that cannot come"
    passed = handoff.take(unauthenticated)
    assert passed
    passed.close()
    assert bench.dispatcher.looks < MOST_PIECES


def test_a_client_may_stop_sending_once_its_request_is_whole(bench: Bench) -> None:
    acme = bench.door("acme")
    bench.connect(ACME).shutdown(socket.SHUT_WR)
    assert taken(acme) == (b"", ACME)


@pytest.mark.parametrize("data", [b"", b"POST / HTTP/1.1\r\n"])
def test_a_client_that_leaves_before_its_headers_are_whole_is_let_go(bench: Bench, data: bytes) -> None:
    connection = bench.connect(data)
    connection.shutdown(socket.SHUT_WR)
    assert hung_up(connection)
    reset = bench.connect(data)
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    reset.close()
    until(lambda: repr(bench.dispatcher).startswith("<Dispatcher 0 waiting"))


def test_a_client_that_takes_too_long_is_hung_up_on_and_others_are_not(bench: Bench) -> None:
    slow = bench.connect(b"POST / HTTP/1.1\r\n")
    until(lambda: "1 waiting" in repr(bench.dispatcher))
    bench.now = 29.0
    later = bench.connect(b"POST")
    until(lambda: "2 waiting" in repr(bench.dispatcher))
    bench.now = 31.0
    bench.wake()
    assert hung_up(slow)
    acme = bench.door("acme")
    later.sendall(ACME[4:])
    assert {taken(acme)[1], taken(acme)[1]} == {ACME}


def test_when_too_many_wait_the_oldest_is_hung_up_on() -> None:
    with Bench(most_waiting=2) as bench:
        first = bench.connect()
        until(lambda: "1 waiting" in repr(bench.dispatcher))
        others = [bench.connect(), bench.connect()]
        assert hung_up(first)
        acme = bench.door("acme")
        for connection in others:
            connection.sendall(ACME)
            assert taken(acme) == (b"", ACME)


def test_connections_of_a_process_that_died_wait_for_the_next(bench: Bench) -> None:
    bench.door("acme").close()
    bench.connect(ACME)
    bench.connect(GLOBEX)
    assert taken(bench.door("globex")) == (b"", GLOBEX), "and hold up nobody else"
    assert taken(bench.door("acme")) == (b"", ACME)


def test_a_dead_door_costs_nothing(bench: Bench) -> None:
    bench.door("acme").close()
    bench.connect(ACME)
    globex = bench.door("globex")
    bench.connect(GLOBEX)
    assert taken(globex)[1] == GLOBEX
    spent = time.process_time()
    assert select.select([globex], [], [], 0.1)[0] == []
    assert time.process_time() - spent < 0.05, "it spins"


def test_a_new_process_takes_the_place_of_one_that_still_lives(bench: Bench) -> None:
    before, after = bench.door("acme"), bench.door("acme")
    assert select.select([before], [], [], PATIENCE)[0]
    assert handoff.take(before) is None
    bench.connect(ACME)
    assert taken(after)[1] == ACME


def test_a_connection_that_is_given_back_goes_where_it_is_told_with_what_was_read(bench: Bench) -> None:
    shared, acme = bench.door(SHARED), bench.door("acme")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handoff.give(shared, Passed("acme", ours, handoff.write_down(b"read already, ")))
        theirs.sendall(b"not yet")
        assert taken(acme) == (b"read already, ", b"not yet")


def test_strangers_have_a_door_of_their_own(bench: Bench) -> None:
    unauthenticated = bench.door(UNAUTHENTICATED)
    bench.connect(b"\x16\x03\x01")
    assert taken(unauthenticated)[1] == b"\x16\x03\x01"


def test_what_a_full_door_has_no_room_for_goes_through_later(bench: Bench) -> None:
    acme, count = bench.door("acme"), 600
    connections = [bench.connect(ACME) for _ in range(count)]
    assert [taken(acme)[1] for _ in range(count)] == [ACME] * count
    assert all(hung_up(connection) for connection in connections)


def test_without_descriptors_the_one_who_waits_longest_makes_room(bench: Bench) -> None:
    waiting = bench.connect()
    until(lambda: "1 waiting" in repr(bench.dispatcher))
    bench.listener.errors = [OSError(errno.EMFILE, "no more")]
    acme = bench.door("acme")
    bench.connect(ACME)
    assert hung_up(waiting)
    assert taken(acme) == (b"", ACME)


def test_without_descriptors_and_nobody_waiting_newcomers_stay_in_the_queue_for_a_while(bench: Bench) -> None:
    bench.listener.errors = [OSError(errno.ENFILE, "no more")]
    acme, globex = bench.door("acme"), bench.door("globex")
    bench.connect(ACME)
    until(lambda: not bench.listener.errors)
    asked = bench.listener.asked
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handoff.give(acme, Passed("globex", ours))
        theirs.sendall(b"x")
        assert taken(globex) == (b"", b"x"), "what was accepted goes on"
    assert bench.listener.asked == asked
    bench.now = 1.0
    assert taken(acme) == (b"", ACME)


def test_an_aborted_connection_is_no_reason_to_stop(bench: Bench) -> None:
    bench.listener.errors = [ConnectionAbortedError()]
    acme = bench.door("acme")
    bench.connect(ACME)
    assert taken(acme) == (b"", ACME)


def test_a_shut_door_holds_so_many_and_no_more() -> None:
    way, pairs = Door(), [socket.socketpair() for _ in range(3)]
    for _ in range(MOST_QUEUED - 1):
        way._queue.append(Passed("acme", pairs[0][0]))
    way.put(Passed("acme", pairs[1][0]))
    way.put(Passed("acme", pairs[2][0]))
    assert way.busy
    assert repr(way) == f"<Door shut, {MOST_QUEUED} waiting>"
    assert pairs[1][0].fileno() > 0
    assert pairs[2][1].recv(1) == b""
    for one, other in pairs:
        one.close()
        other.close()
    gc.collect()


def test_it_ends_quietly_though_the_process_that_controls_it_was_killed_with_answers_unread() -> None:
    """The kernel then reports a reset connection instead of its end."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listeners: Any = [Listener()]
    dispatcher = Dispatcher(Tenancy(TENANTS, None), listeners, theirs)
    theirs.send(b"unread")
    control.close()

    dispatcher.run()

    dispatcher.close()
    theirs.close()
    listeners[0].close()
