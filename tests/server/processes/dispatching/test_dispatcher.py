"""The dispatcher in a thread, with real connections; the test plays the HTTP processes and the supervisor."""

import errno
import os
import re
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import msgspec
import pytest

from server.config.tenant import TenantConfig
from server.processes.channels import handoff
from server.processes.channels.handoff import Handoff
from server.processes.channels.routing import SHARED, UNAUTHENTICATED
from server.processes.dispatching.dispatcher import (
    HEARTBEAT,
    HEARTBEAT_ANSWER,
    MAX_PIECES,
    RECONFIGURE,
    RECONFIGURED,
    WITHDRAWN,
    Dispatcher,
    Keys,
)
from server.processes.dispatching.handoff_queue import MAX_QUEUED, HandoffQueue
from server.processes.dispatching.refused import LINGER, REFUSED
from server.tenants.auth import Tenancy, digest

TENANTS = [TenantConfig(name=name, granules=1, models=("*",)) for name in ("acme", "globex")]
ACME = b"POST /v2 HTTP/1.1\r\nX-Tenant: acme\r\n\r\nbody"
GLOBEX = ACME.replace(b"acme", b"globex")
PATIENCE = 10.0


class Listener:
    """A listening socket that can be scripted to fail, as a system does that has run out of something."""

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


class CountingDispatcher(Dispatcher):
    """Counts in `looks` how often it has looked at a connection. A look counts when it is over: the next sees what comes.

    `released` counts those connections whose headers it waits for no longer.
    """

    looks = released = 0

    def _look(self, connection: socket.socket) -> None:
        super()._look(connection)
        self.looks += 1

    def _release(self, connection: socket.socket) -> None:
        super()._release(connection)
        self.released += 1


class Bench:
    """A dispatcher at work. `now` is its clock, in seconds."""

    def __init__(self, **options: Any) -> None:
        self.listener = Listener()
        self.now = 0.0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listeners: Any = [self.listener]
        self.dispatcher = CountingDispatcher(Tenancy(TENANTS, None), listeners, theirs, clock=lambda: self.now, **options)
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

    def process(self, name: str, announced: AbstractContextManager[object] | None = None) -> socket.socket:
        """Add an HTTP process of this name; returns the socket over which it takes connections.

        The dispatcher is sent it within `announced`.
        """
        ends = handoff.pair()
        self._stack.callback(ends.theirs.close)
        with ends.ours, announced or nullcontext():
            socket.send_fds(self._control, [name.encode()], [end.fileno() for end in ends])
        return ends.theirs

    def end(self, name: str, end: socket.socket) -> None:
        """Let this process end, as its supervisor sees it."""
        end.close()
        self.withdraw(name)

    def withdraw(self, name: str) -> None:
        """Let the supervisor say that the process of this name has ended."""
        self._control.send(WITHDRAWN + name.encode())

    def reports(self) -> bytes:
        """The next message to the supervisor."""
        self._control.settimeout(PATIENCE)
        return self._control.recv(4096)

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = self.listener.connect()
        self._stack.callback(connection.close)
        connection.sendall(data)
        return connection

    def pair(self) -> socket.socket:
        """One end of a new connection, both of which are closed at the end."""
        one, other = socket.socketpair()
        self._stack.callback(one.close)
        self._stack.callback(other.close)
        return one

    def reconfigure(self, keys: Keys) -> None:
        """Have it use these keys, and wait until it does."""
        file = handoff.memory_file(msgspec.json.encode(keys))
        socket.send_fds(self._control, [RECONFIGURE], [file])
        os.close(file)
        assert self.reports() == RECONFIGURED

    def beat(self) -> None:
        """Ask it for a sign of life, as the supervisor does."""
        self._control.send(HEARTBEAT)

    def wake(self) -> None:
        """Make it look at its clock."""
        self.connect(ACME)


def readable(end: socket.socket, seconds: float = PATIENCE) -> bool:
    """Whether there is something to be read within so many seconds. Not by `select`, as there may be over 1,024 descriptors."""
    looked = select.poll()
    looked.register(end, select.POLLIN)
    return bool(looked.poll(seconds * 1000))


def taken(end: socket.socket) -> tuple[bytes, bytes]:
    """The bytes of the next connection that comes through: those read before, and those still to be read."""
    assert readable(end), "no connection came"
    passed = handoff.receive(end)
    assert passed
    passed.connection.settimeout(PATIENCE)
    found = passed.data(), passed.connection.recv(1 << 16)
    passed.close()
    return found


def everything(connection: socket.socket) -> bytes:
    """What is answered until the end of the answers."""
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    return data


def is_reset(connection: socket.socket) -> bool:
    try:
        connection.send(b"a")
    except OSError:
        return True
    return False


def hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # With bytes that it never read.
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench() as bench:
        yield bench


def test_each_connection_goes_to_its_process_with_every_byte_unread(bench: Bench) -> None:
    acme, globex = bench.process("acme"), bench.process("globex")
    bench.connect(GLOBEX)
    bench.connect(ACME)
    assert taken(acme) == (b"", ACME)
    assert taken(globex) == (b"", GLOBEX)


def test_keys_change_while_it_serves(bench: Bench) -> None:
    acme, unauthenticated = bench.process("acme"), bench.process(UNAUTHENTICATED)
    bench.reconfigure(Keys({"acme": (digest("key"),), "globex": ()}, None))
    bench.connect(named := ACME.replace(b"/v2", b"/v2/models/m/infer"))
    assert taken(unauthenticated) == (b"", named)
    bench.connect(keyed := named.replace(b"X-Tenant: acme", b"Authorization: Bearer key"))
    assert taken(acme) == (b"", keyed)


def send(bench: Bench, connection: socket.socket, piece: bytes) -> None:
    """Send this and wait until the dispatcher has looked at it."""
    before = bench.dispatcher.looks
    connection.sendall(piece)
    until(lambda: bench.dispatcher.looks > before)


def test_headers_may_come_in_a_few_pieces(bench: Bench) -> None:
    acme = bench.process("acme")
    connection = bench.connect()
    until(lambda: bench.dispatcher.looks == 1)
    for piece in (b"POST /v2 HTTP/1.1\r\n", b"X-Tenant: acme", b"\r\n\r", b"\nbody"):
        send(bench, connection, piece)
    assert taken(acme) == (b"", ACME)


def test_headers_in_many_pieces_go_to_the_unauthenticated_process(bench: Bench) -> None:
    unauthenticated = bench.process(UNAUTHENTICATED)
    connection = bench.connect()
    until(lambda: bench.dispatcher.looks == 1)
    for index in range(MAX_PIECES):
        send(bench, connection, ACME[index : index + 1])
    assert taken(unauthenticated) == (b"", ACME[:MAX_PIECES])
    connection.sendall(ACME[MAX_PIECES:])
    until(lambda: bench.dispatcher.looks == MAX_PIECES + 1)


@pytest.mark.parametrize("data", [b"\r\n" + b"X" * 17_000, b"\r\n" * 8_500], ids=["a line", "empty lines"])
def test_what_is_no_head_after_empty_lines_does_not_keep_the_dispatcher_busy(bench: Bench, data: bytes) -> None:
    unauthenticated = bench.process(UNAUTHENTICATED)
    bench.connect(data)
    assert readable(unauthenticated), "the dispatcher waits for headers that cannot come"
    passed = handoff.receive(unauthenticated)
    assert passed
    passed.close()
    assert bench.dispatcher.looks < MAX_PIECES


def test_a_client_may_stop_sending_once_its_request_is_whole(bench: Bench) -> None:
    acme = bench.process("acme")
    bench.connect(ACME).shutdown(socket.SHUT_WR)
    assert taken(acme) == (b"", ACME)


@pytest.mark.parametrize("data", [b"", b"POST /v2 HTTP/1.1\r\n"])
def test_a_client_that_disconnects_before_its_headers_are_complete(bench: Bench, data: bytes) -> None:
    connection = bench.connect(data)
    connection.shutdown(socket.SHUT_WR)
    assert hung_up(connection)
    reset = bench.connect(data)
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    reset.close()
    until(lambda: repr(bench.dispatcher).startswith("<Dispatcher 0 waiting"))


def test_header_timeout_closes_only_the_slow_client(bench: Bench) -> None:
    slow = bench.connect(b"POST /v2 HTTP/1.1\r\n")
    until(lambda: "1 waiting" in repr(bench.dispatcher))
    bench.now = 29.0
    later = bench.connect(b"POST")
    until(lambda: "2 waiting" in repr(bench.dispatcher))
    bench.now = 31.0
    bench.wake()
    answer = everything(slow)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert answer.endswith(b'{"error":"the headers did not come within 30 s"}')
    acme = bench.process("acme")
    later.sendall(ACME[4:])
    assert {taken(acme)[1], taken(acme)[1]} == {ACME}


def test_beyond_max_waiting_the_oldest_is_closed() -> None:
    with Bench(max_waiting=2) as bench:
        first = bench.connect()
        until(lambda: "1 waiting" in repr(bench.dispatcher))
        others = [bench.connect(), bench.connect()]
        assert hung_up(first)
        acme = bench.process("acme")
        for connection in others:
            connection.sendall(ACME)
            assert taken(acme) == (b"", ACME)


def test_a_tenants_processes_get_connections_in_turn_and_the_lead_fewer(bench: Bench) -> None:
    known = bench.dispatcher.queues["acme"].ends
    lead, two, three = ends = [bench.process(name) for name in ("acme", "acme (2)", "acme (3)")]
    until(lambda: len(known) == 3)
    for _ in range(10):
        bench.connect(ACME)
    assert [taken(end)[1] for end in (lead, two, three, two, three) * 2] == [ACME] * 10
    bench.end("acme (2)", two)
    until(lambda: len(known) == 2)
    for _ in range(4):
        bench.connect(ACME)
    assert [taken(end)[1] for end in (lead, three) * 2] == [ACME] * 4, "of two processes both get as many"
    replaced = bench.process("acme (2)")
    until(lambda: len(known) == 3)
    for _ in ends:
        bench.connect(ACME)
    assert [taken(end)[1] for end in (lead, replaced, three)] == [ACME] * 3, "and the new one no more than others"


def test_a_malformed_handoff_names_the_one_of_several_processes(bench: Bench) -> None:
    _, helper = bench.process("acme"), bench.process("acme (2)")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handoff.send(helper, Handoff("nobody", ours))
        assert bench.reports() == b"acme (2)"


def test_connections_of_a_process_that_died_wait_for_the_next(bench: Bench) -> None:
    bench.end("acme", bench.process("acme"))
    bench.connect(ACME)
    bench.connect(GLOBEX)
    assert taken(bench.process("globex")) == (b"", GLOBEX), "and delay no other tenant"
    assert taken(bench.process("acme")) == (b"", ACME)


@pytest.mark.parametrize("count", [1, 600])
def test_connections_that_a_killed_process_has_not_taken_go_to_the_next_in_order(bench: Bench, count: int) -> None:
    """600 are more than its socket has room for."""
    died, heads = bench.process("acme"), [ACME + b"%d" % number for number in range(count)]
    for number, head in enumerate(heads):
        bench.connect(head)
        until(lambda before=number: bench.dispatcher.released > before)  # type: ignore[misc]  # One after the other.
    died.close()
    second = bench.process("acme")
    assert taken(second)[1] == heads[0]
    second.close()
    third = bench.process("acme")
    assert [taken(third)[1] for _ in heads[1:]] == heads[1:]


def test_connections_that_a_killed_helper_has_not_taken_go_to_the_others_at_once(bench: Bench) -> None:
    lead, helper = bench.process("acme"), bench.process("acme (2)")
    known = bench.dispatcher.queues["acme"].ends
    until(lambda: len(known) == 2)
    heads = [ACME + b"%d" % number for number in range(4)]
    for head in heads:
        bench.connect(head)
    until(lambda: bench.dispatcher.released >= 4)
    bench.end("acme (2)", helper)
    assert sorted(taken(lead)[1] for _ in heads) == heads


def test_connections_that_the_process_of_a_tenant_that_has_gone_did_not_take_show_no_valid_tenant(bench: Bench) -> None:
    acme, unauthenticated = bench.process("acme"), bench.process(UNAUTHENTICATED)
    bench.connect(ACME)
    assert readable(acme)
    bench.reconfigure(Keys({"globex": ()}, None))
    bench.end("acme", acme)
    assert taken(unauthenticated)[1] == ACME


def test_a_tenant_that_has_not_come_after_all_is_unknown_here(bench: Bench) -> None:
    """Its process is ended before any dispatcher was sent the configuration with it."""
    bench.withdraw("initech")
    bench.withdraw("initech (2)")
    acme = bench.process("acme")
    bench.connect(ACME)
    assert taken(acme)[1] == ACME


def test_connections_that_a_process_gave_back_before_it_was_killed_are_passed_on() -> None:
    bench, count = Bench(), 20
    acme, globex = bench.process("acme"), bench.process("globex")
    pairs = [socket.socketpair() for _ in range(count)]
    for number, (ours, theirs) in enumerate(pairs):
        theirs.sendall(b"%d" % number)
        handoff.send(acme, Handoff("globex", ours))
        ours.close()
    bench.end("acme", acme)
    with bench:  # It begins only now, so that it learns of the end before it has read all of them.
        assert [taken(globex)[1] for _ in pairs] == [b"%d" % number for number in range(count)]
    for _, theirs in pairs:
        theirs.close()


def test_a_process_cannot_make_the_dispatcher_wait_for_what_it_has_left(bench: Bench) -> None:
    """The sockets' settings are shared with the process, which may serve a tenant that wants to harm others."""
    hostile = bench.process("acme")
    hostile.setblocking(True)
    hostile.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    bench.connect(ACME)
    assert readable(hostile)
    known = bench.dispatcher.queues["acme"].ends
    before = known["acme"]
    bench.end("acme", hostile)
    acme, globex = bench.process("acme"), bench.process("globex")
    until(lambda: known.get("acme", before) is not before)  # What is handed to the hostile one is lost.
    bench.connect(ACME + b"2")
    assert taken(acme)[1] == ACME + b"2"
    bench.connect(GLOBEX)
    assert taken(globex)[1] == GLOBEX


def test_a_process_that_died_causes_no_events(bench: Bench) -> None:
    bench.process("acme").close()
    bench.connect(ACME)
    globex = bench.process("globex")
    bench.connect(GLOBEX)
    assert taken(globex)[1] == GLOBEX
    spent = time.process_time()
    assert not readable(globex, 0.1)
    assert time.process_time() - spent < 0.05, "it spins"


def test_a_new_process_replaces_one_that_still_runs(bench: Bench) -> None:
    before, after = bench.process("acme"), bench.process("acme")
    assert readable(before)
    assert handoff.receive(before) is None
    bench.connect(ACME)
    assert taken(after)[1] == ACME


def test_a_connection_that_is_given_back_is_passed_on_with_its_read_ahead(bench: Bench) -> None:
    shared, acme = bench.process(SHARED), bench.process("acme")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handoff.send(shared, Handoff("acme", ours, handoff.memory_file(b"read already, ")))
        theirs.sendall(b"not yet")
        assert taken(acme) == (b"read already, ", b"not yet")


@pytest.mark.parametrize("name", ["nobody", "acme\\0", "?"])
def test_a_malformed_handoff_disconnects_its_sender_and_reports_it(bench: Bench, name: str) -> None:
    acme, globex = bench.process("acme"), bench.process("globex")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handoff.send(acme, Handoff(name, ours))
        assert bench.reports() == b"acme"
        ours.close()
        assert hung_up(theirs)
        bench.connect(GLOBEX)
        assert taken(globex) == (b"", GLOBEX)
        bench.connect(ACME)
        assert taken(bench.process("acme")) == (b"", ACME), "its replacement takes connections"


def test_unauthenticated_connections_go_to_a_process_of_their_own(bench: Bench) -> None:
    unauthenticated = bench.process(UNAUTHENTICATED)
    bench.connect(b"\x16\x03\x01")
    assert taken(unauthenticated)[1] == b"\x16\x03\x01"


def test_connections_beyond_a_full_socket_are_sent_later(bench: Bench) -> None:
    acme, count = bench.process("acme"), 600
    connections = [bench.connect(ACME) for _ in range(count)]
    assert [taken(acme)[1] for _ in range(count)] == [ACME] * count
    assert all(hung_up(connection) for connection in connections)


def test_without_descriptors_the_oldest_waiting_connection_is_closed(bench: Bench) -> None:
    waiting = bench.connect()
    until(lambda: "1 waiting" in repr(bench.dispatcher))
    bench.listener.errors = [OSError(errno.EMFILE, "no more")]
    acme = bench.process("acme")
    bench.connect(ACME)
    assert hung_up(waiting)
    assert taken(acme) == (b"", ACME)


def test_without_descriptors_accepting_pauses(bench: Bench) -> None:
    bench.listener.errors = [OSError(errno.ENFILE, "no more")]
    acme, globex = bench.process("acme"), bench.process("globex")
    bench.connect(ACME)
    until(lambda: not bench.listener.errors)
    asked = bench.listener.asked
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handoff.send(acme, Handoff("globex", ours))
        theirs.sendall(b"x")
        assert taken(globex) == (b"", b"x"), "what was accepted goes on"
    assert bench.listener.asked == asked
    bench.now = 1.0
    assert taken(acme) == (b"", ACME)


@contextmanager
def no_descriptors(then: Callable[[], None]) -> Iterator[None]:
    """This process may have no more descriptors than it has, until `then` has returned."""
    before, used = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    try:
        with suppress(OSError):
            while True:
                used.append(os.dup(0))
        yield
        then()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in used:
            os.close(each)


@pytest.mark.parametrize(("data", "closed"), [(b"", slice(0, 2)), (GLOBEX, slice(1, 3))], ids=["headers", "process"])
def test_without_descriptors_a_process_that_starts_is_not_lost(bench: Bench, data: bytes, closed: slice) -> None:
    waiting = [bench.connect(data) for _ in range(3)]
    until(lambda: "3 waiting" in repr(bench.dispatcher))
    acme = bench.process("acme", no_descriptors(lambda: until(lambda: all(map(hung_up, waiting[closed])))))
    bench.connect(ACME)
    assert taken(acme) == (b"", ACME)
    (kept,) = {*waiting}.difference(waiting[closed])
    assert not readable(kept, 0)


def test_an_aborted_connection_is_ignored(bench: Bench) -> None:
    bench.listener.errors = [ConnectionAbortedError()]
    acme = bench.process("acme")
    bench.connect(ACME)
    assert taken(acme) == (b"", ACME)


def test_a_queue_without_a_process_holds_so_many() -> None:
    queue = HandoffQueue(2)
    with ExitStack() as stack:
        pairs = [tuple(map(stack.enter_context, socket.socketpair())) for _ in range(3)]
        assert [queue.put(Handoff("acme", one)) for one, _ in pairs] == [True, True, False]
        assert queue.waiting
        assert repr(queue) == "<HandoffQueue closed, 2 waiting>"


def test_connections_beyond_a_full_queue_are_answered_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with Bench(max_queued=2) as bench:
        kept = [bench.connect(ACME) for _ in range(2)]
        until(lambda: "2 waiting>" in repr(bench.dispatcher))
        refused = [bench.connect(ACME * 5000) for _ in range(3)]
        for connection in refused:
            head, _, body = everything(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n")
            assert b"try again in a second" in body
        bench.now = 10.0  # The first may have been logged at once, alone.
        bench.beat()
        assert bench.reports() == HEARTBEAT_ANSWER
        assert bench.reports() == REFUSED + b'{"queue":3}'
        acme = bench.process("acme")
        assert [taken(acme)[1] for _ in kept] == [ACME] * 2
    counts = re.findall(r"by the dispatcher: (\d) for queue \(greenlane_refused_connections_total\)", caplog.text)
    assert sum(map(int, counts)) == 3


def test_connections_without_a_tenant_beyond_a_full_queue_are_closed_and_counted(bench: Bench) -> None:
    for _ in range(MAX_QUEUED):
        assert bench.dispatcher.queues[UNAUTHENTICATED].put(Handoff(UNAUTHENTICATED, bench.pair()))
    assert hung_up(bench.connect(b"\x16"))
    bench.beat()
    assert (bench.reports(), bench.reports()) == (HEARTBEAT_ANSWER, REFUSED + b'{"queue":1}')


def test_a_refused_connection_that_its_client_keeps_open_is_closed(bench: Bench) -> None:
    slow = bench.connect(b"POST /v2 HTTP/1.1\r\n")
    until(lambda: "1 waiting" in repr(bench.dispatcher))
    bench.now = 31.0
    bench.wake()
    assert everything(slow)
    ends = time.monotonic() + PATIENCE
    while not is_reset(slow):  # It may look at its clock for the end a little after the client has the answer.
        assert time.monotonic() < ends
        bench.now += LINGER + 1
        bench.wake()


def test_it_ends_when_the_supervisor_was_killed_with_answers_unread() -> None:
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
