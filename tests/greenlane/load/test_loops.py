"""The load generator against a scripted server."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from threading import Condition, Event, Thread
from time import perf_counter, thread_time

import pytest

from benchmarks.loads import together
from greenlane.load import openloop
from greenlane.load.closedloop import closed_loop
from greenlane.load.jobs import Ask, Behaviour, ClosedLoop, InTurn, OpenLoop, Seen, Tally
from greenlane.load.openloop import Generator
from greenlane.load.processes import LoadProcessFailed, begun, run
from greenlane.load.server_process import free_port
from greenlane.load.wire import Broken, Caller, Connection, ask

REQUEST = b"POST /x HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
WORSE = b"HTTP/1.1 400 Bad\r\ncontent-length: 0\r\nConnection: close\r\n\r\n"
Answer = Callable[[int], bytes]


class Server:
    """Answers the n-th request on all connections with `answer(n)`; nothing ends the connection."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.seen = 0
        self.connections = 0
        self.changed = Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads[1:]:
            thread.join()

    def wait_for(self, count: int) -> None:
        """Until so many requests have come."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.seen >= count, 30)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            self._threads.append(Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            came = b""
            while True:
                try:
                    data = connection.recv(65536)
                    came += data
                    while data and came.startswith(REQUEST):
                        came = came[len(REQUEST) :]
                        answer = self._next()
                        connection.sendall(answer)
                        data = data if answer and answer != WORSE else b""
                except OSError:
                    return
                if not data:
                    return

    def _next(self) -> bytes:
        with self.changed:
            self.seen += 1
            number = self.seen
            self.changed.notify_all()
        return self.answer(number)


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    servers: list[Server] = []

    def start(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def open_loop(server: Server, arrivals: list[float], connections: int = 1, most: int = 8, **more: object) -> OpenLoop:
    return OpenLoop(
        port=server.port,
        ask=Ask(REQUEST, 5),
        arrivals=arrivals,
        connections=connections,
        most=most,
        **more,  # type: ignore[arg-type]
    )


def closed(server: Server, behaviour: Behaviour, connections: int = 2) -> ClosedLoop:
    ask = (Ask(REQUEST),)
    return ClosedLoop(
        name="x", port=server.port, asks=ask, connections=connections, behaviour=behaviour, seconds=0.2, ahead=0.0
    )


def seen(job: OpenLoop, start: float | None = None) -> Seen:
    generator = Generator(job)
    generator.open()
    return generator.run(perf_counter() if start is None else start)


@pytest.fixture
def server(serve: Callable[[Answer], Server]) -> Server:
    return serve(lambda _: OK)


def test_an_answer_counts_from_when_its_request_was_due(server: Server) -> None:
    """The generator itself is half a second late, and says so."""
    found = seen(open_loop(server, [0.0, 0.1], keep=1), start=perf_counter() - 0.5)

    assert found.samples.status == [200, 200]
    last, first = sorted(found.samples.latency)  # Either may be answered before the other.
    assert last >= 0.4e6
    assert first >= 0.5e6
    assert max(found.late) >= 0.5e6
    assert found.bodies == [b"hello"] * 2


def test_a_client_that_spins_leaves_its_core_to_others_until_shortly_before_its_first_request(server: Server) -> None:
    began = thread_time()

    found = seen(open_loop(server, [0.5, 0.52], spin=True))

    assert found.samples.status == [200, 200]
    assert thread_time() - began < 0.3


def test_the_slowest_answers_say_where_their_time_went(serve: Callable[[Answer], Server]) -> None:
    timed = OK.replace(b"200 OK\r\n", b"200 OK\r\nserver-timing: queue;dur=0.250, execute;dur=1.500\r\n")
    server = serve(lambda number: timed if number == 3 else OK)
    arrivals = [index / 1000 for index in range(openloop.SLOWEST + 10)]

    found = seen(open_loop(server, arrivals, most=1), start=perf_counter() - 0.5)

    slowest = sorted(each / 1e3 for each in found.samples.latency)[10:]
    assert sorted(each.latency for each in found.slowest) == pytest.approx(slowest)
    assert [(each.due, each.queued, each.executed) for each in found.slowest if each.executed] == [(0.001, 0.25, 1.5)]
    assert all(0 <= each.sent <= each.latency for each in found.slowest)


def test_requests_are_sent_whatever_came_of_those_before(serve: Callable[[Answer], Server]) -> None:
    """Nothing is answered before the last has come: a loop that waits for answers would never end."""

    def once_all_are_there(number: int) -> bytes:
        if number > 1:
            server.wait_for(6)
        return OK

    server = serve(once_all_are_there)

    found = seen(open_loop(server, [0.0, 0.001, 0.002, 0.003, 0.004]))

    assert found.samples.status == [200] * 5
    assert found.connections == 5


def test_an_arrival_without_a_connection_waits_for_one_and_the_wait_counts(server: Server) -> None:
    found = seen(open_loop(server, [0.0, 0.0, 0.0], connections=1, most=1))

    assert found.waited == 2
    assert found.samples.status == [200] * 3
    assert len(found.late) == 1


def test_descriptors_may_have_any_number(server: Server) -> None:
    generator = Generator(open_loop(server, [0.0, 0.01]))
    with ExitStack() as stack:
        for _ in range(1024):
            stack.callback(os.close, os.dup(0))
        caller = stack.enter_context(closing(Caller(server.port)))
        generator.open()
        assert list(generator.run(perf_counter()).samples.status) == [200, 200]
        assert caller.ask(Ask(REQUEST)).status == 200


@pytest.mark.parametrize(("answer", "cause"), [(None, ConnectionRefusedError), (OK[:-1], TimeoutError), (b"", type(None))])
def test_why_a_request_has_no_answer_is_the_cause(
    serve: Callable[[Answer], Server], answer: bytes | None, cause: type[object]
) -> None:
    port = serve(lambda _: answer).port if answer is not None else free_port()
    with closing(Caller(port, 0.05)) as caller, pytest.raises(Broken) as broken:
        caller.ask(Ask(REQUEST))
    assert isinstance(broken.value.__cause__, cause)


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n", OK.replace(b"5", b"999999")])
def test_a_server_that_goes_on_answering_is_given_up(begin: bytes) -> None:
    ended = Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(begin)
            while not ended.wait(0.01):
                connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        dripping = pool.submit(drip, listener)
        try:
            with pytest.raises(TimeoutError, match=r"no answer within 0\.3 s"):
                ask(listener.getsockname()[1], "GET", "/", timeout=0.3)
        finally:
            ended.set()
            dripping.result(30)


def test_an_answer_is_taken_apart(serve: Callable[[Answer], Server]) -> None:
    head = b"Server-Timing: queue;dur=0.25, execute;dur=1.5\r\nInference-Header-Content-Length: 2\r\n"
    with closing(Caller(serve(lambda number: OK.replace(b"Cont", head + b"Cont") if number == 1 else OK).port)) as caller:
        answer, other = caller.ask(Ask(REQUEST)), caller.ask(Ask(REQUEST))
        assert caller.ask(Ask(REQUEST), keep=False).body is None
    assert (answer.parts, answer.times) == ((b"he", b"llo"), (0.25, 1.5))
    assert (other.parts, other.times) == ((b"hello", b""), (0.0, 0.0))


def test_a_connection_that_the_server_ended_while_it_was_free_is_a_failure_at_once(serve: Callable[[Answer], Server]) -> None:
    """Also where the server still reads what comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        generator = Generator(
            OpenLoop(port=listener.getsockname()[1], ask=Ask(REQUEST, 5), arrivals=[0.1], connections=1, most=1)
        )
        opening = pool.submit(generator.open)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(len(REQUEST), socket.MSG_WAITALL) == REQUEST
            connection.sendall(OK)
            opening.result(30)
            connection.shutdown(socket.SHUT_WR)
            found = generator.run(perf_counter())
    assert [each.split(": ", 1)[1] for each in found.failures] == ["0, the server closed the connection"]


def test_a_request_without_an_answer_is_a_failure_with_the_time_waited(serve: Callable[[Answer], Server]) -> None:
    server = serve(lambda number: OK if number == 1 else b"HTTP/1.1 200 OK\r\n")

    found = seen(open_loop(server, [0.0, 0.0], connections=1, most=1, grace=0.05))

    assert found.samples.status == [0, 0]
    assert min(found.samples.latency) >= 0.05e6


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n"])
def test_a_connection_that_breaks_is_a_failure_and_is_replaced(serve: Callable[[Answer], Server], answer: bytes) -> None:
    server = serve(lambda number: answer if number == 2 else OK)

    found = seen(open_loop(server, [0.0, 0.02, 0.04]))

    assert sorted(found.samples.status) == [0, 200, 200]
    assert found.connections >= 2


def test_an_answer_of_another_size_is_wrong_and_a_closed_connection_is_replaced(
    serve: Callable[[Answer], Server],
) -> None:
    answers = {2: OK.replace(b"5", b"3").replace(b"hello", b"hel"), 3: WORSE}
    server = serve(lambda number: answers.get(number, OK))

    found = seen(open_loop(server, [0.0, 0.02, 0.04], most=1))

    assert found.wrong == 1
    assert found.samples.status == [200, 400, 200]


def test_a_generator_whose_first_request_is_refused_raises(serve: Callable[[Answer], Server]) -> None:
    with pytest.raises(RuntimeError, match="answered with 400"):
        seen(open_loop(serve(lambda _: WORSE), [0.0]))


def test_a_load_process_says_why_its_first_request_was_refused(serve: Callable[[Answer], Server]) -> None:
    """`greenlane prove` shows it, as of a tenant with a limit that a server has which it did not start."""
    with pytest.raises(LoadProcessFailed, match=r"^the first request was answered with 400:"):
        run([open_loop(serve(lambda _: WORSE), [0.0])])


def test_a_generator_whose_first_request_is_not_answered_raises(
    serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openloop, "FIRST", 0.05)
    with pytest.raises(Broken, match=r"no answer within 0\.05 s"):
        seen(open_loop(serve(lambda _: OK[:-1]), [0.0]))


def test_a_flood_keeps_its_connections_and_counts_every_answer(server: Server) -> None:
    tally = closed_loop(closed(server, "flood")).run(perf_counter())

    assert server.connections == 2
    assert 0 <= server.seen - tally.statuses[200] <= 2
    assert tally.answers == tally.statuses[200] > 10
    assert tally.received >= len(OK) * tally.answers


def test_a_flood_goes_on_after_the_server_hung_up(serve: Callable[[Answer], Server]) -> None:
    server = serve(lambda number: (OK, WORSE, b"")[number % 3])

    tally = closed_loop(closed(server, "flood")).run(perf_counter())

    assert set(tally.statuses) == {0, 200, 400}
    assert server.connections > 4


def test_churn_makes_a_connection_for_each_request(server: Server) -> None:
    tally = closed_loop(closed(server, "churn")).run(perf_counter())

    assert tally.statuses[200] > 1
    assert server.connections >= tally.statuses[200]


def test_a_slow_reader_leaves_most_of_an_answer_with_the_server(serve: Callable[[Answer], Server]) -> None:
    body = bytes(1 << 20)
    server = serve(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    tally = closed_loop(closed(server, "slow")).run(perf_counter())

    assert 0 < tally.received < 10_000
    assert tally.statuses == {200: 2}


def test_a_drip_sends_its_requests_byte_by_byte(server: Server) -> None:
    job = replace(closed(server, "drip"), every=0.004, seconds=1.0)

    tally = closed_loop(job).run(perf_counter())

    assert set(tally.statuses) == {200}
    assert tally.opened == tally.statuses[200] + 2
    assert server.seen * len(REQUEST) <= tally.sent <= 500, "one every 2 ms"


def test_a_knock_closes_what_it_opened(server: Server) -> None:
    tally = closed_loop(replace(closed(server, "knock"), every=0.01)).run(perf_counter())

    assert 2 < tally.opened <= 2 * 21
    assert server.seen == 0


def test_a_request_that_is_sent_once_brings_its_answer_back_and_is_waited_for_beyond_the_end(
    serve: Callable[[Answer], Server],
) -> None:
    def late(number: int) -> bytes:
        Event().wait(0.25)  # The server's answer comes after the 0.2 s of the load.
        return OK

    found = closed_loop(closed(serve(late), "once", connections=1)).run(perf_counter())
    assert (found.statuses, found.opened, found.bodies) == ({200: 1}, 1, [b"hello"])


@pytest.mark.parametrize("answer", [b"", b"no HTTP\r\n\r\n"])
def test_a_request_that_is_sent_once_and_never_answered_counts_as_0(serve: Callable[[Answer], Server], answer: bytes) -> None:
    began = perf_counter()
    found = closed_loop(closed(serve(lambda _: answer), "once")).run(began)
    assert (found.statuses, found.bodies) == ({0: 2}, [])
    assert perf_counter() - began < 2


def test_requests_without_an_answer_keep_their_connections(server: Server) -> None:
    job = replace(closed(server, "flood"), asks=(Ask(REQUEST[:-1]),))

    tally = closed_loop(job).run(perf_counter())

    assert (tally.statuses, tally.opened, server.seen) == ({}, 2, 0)


def test_a_load_may_start_later_than_others(server: Server) -> None:
    early, late = (open_loop(server, [0.0]), replace(closed(server, "flood"), ahead=-1.0, seconds=1.2))

    _, (seen, tally) = run([early, late])

    assert isinstance(seen, Seen)
    assert isinstance(tally, Tally)
    assert seen.samples.latency[0] < 1_000_000, "it was not sent before its time"
    assert tally.answers > 0
    assert tally.seconds == pytest.approx(0.2), "what it was answered is divided by how long it asked"


def test_an_open_loop_may_make_a_connection_for_each_request(serve: Callable[[Answer], Server]) -> None:
    server = serve(lambda number: b"" if number == 3 else OK)

    found = seen(open_loop(server, [0.0, 0.0, 0.02, 0.04], most=1, fresh=True))

    assert sorted(found.samples.status) == [0, 200, 200, 200]
    assert found.connections == 1 + 4


def test_processes_start_together_and_their_samples_are_merged(server: Server) -> None:
    _, results = run([open_loop(server, [0.01, 0.03], keep=1), open_loop(server, [0.02]), closed(server, "flood")])
    samples, tallies, late, wrong, bodies = together(results)

    assert samples.due == [0.01, 0.02, 0.03]
    assert samples.status == [200] * 3
    assert [type(tally) for tally in tallies] == [Tally]
    assert late >= 0
    assert wrong == 0
    assert bodies == [b"hello"] * 3


def test_a_load_process_that_fails_says_why() -> None:
    job = OpenLoop(port=1, ask=Ask(REQUEST), arrivals=[], connections=1, most=1)

    with pytest.raises(LoadProcessFailed, match="Broken"):
        run([job])


def test_an_answer_in_pieces_is_reassembled() -> None:
    connection = Connection(0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        connection.socket = ours
        connection.send(REQUEST, keep=True)
        for piece in (OK[:10], OK[10:30], OK[30:-2]):
            theirs.sendall(piece)
            assert connection.receive() is None
        theirs.sendall(OK[-2:])
        answer = connection.receive()
        assert answer is not None
        assert (answer.status, answer.size, answer.body, answer.last) == (200, 5, b"hello", False)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Broken, match="closed the connection"):
            connection.receive()


def test_a_stopped_open_loop_sends_no_more_and_keeps_its_answers(server: Server) -> None:
    arrivals = [number / 100 for number in range(100_000)]

    with begun([open_loop(server, arrivals)]) as (_, (worker,)):
        server.wait_for(5)
        worker.stop()
        seen = worker.result()

    assert isinstance(seen, Seen)
    assert 4 <= len(seen.samples) < 1000
    assert set(seen.samples.status) == {200}


def test_requests_take_turns_and_an_answer_says_which_it_is_of(server: Server) -> None:
    job = open_loop(server, [0.0, 0.01, 0.02, 0.03], others=(Ask(REQUEST, 6),), keep=3)

    _, (seen,) = run([job])

    assert isinstance(seen, Seen)
    assert seen.wrong == 2  # Every other answer was to have six bytes.
    assert seen.asked == [0, 1]


def test_the_first_requests_that_fail_are_described_with_what_the_server_said(serve: Callable[[Answer], Server]) -> None:
    refused = b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 16\r\n\r\n{"error":"no\x1b\xff"}'
    server = serve(lambda number: refused if number == 3 else b"" if number == 4 else OK)

    found = seen(open_loop(server, [0.0, 0.05, 0.1, 0.15]))

    assert len(found.failures) == 2
    assert found.failures[0].endswith(' s: 503, {"error":"no?\ufffd"}'), "nothing that a terminal would obey"
    assert "closed the connection" in found.failures[1]


def test_closed_loops_in_turn_share_a_process_and_each_has_a_tally() -> None:
    server = Server(lambda _: OK)
    try:
        one = ClosedLoop(
            name="a", port=server.port, asks=(Ask(REQUEST),), connections=1, behaviour="flood", seconds=0.05, ahead=0.0
        )
        two = replace(one, name="b", ahead=-0.1, seconds=0.15)
        with begun([InTurn((one, two))]) as (_, (process,)):
            found = process.results()
    finally:
        server.close()
    assert [each.name for each in found] == ["a", "b"]
    assert all(each.answers for each in found)
