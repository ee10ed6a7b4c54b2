"""HttpConnection on a fake transport, for states that real sockets do not reach reliably."""

import asyncio
import gc
import weakref
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from server.errors import Unauthorized
from server.http import asgi, connection
from server.http.connection import MAX_READ_AHEAD, REQUESTS_PER_TURN, HandOff, HttpConnection
from server.http.connection_limits import Activity, Refusals
from server.http.exchange import Reply
from server.http.infer import Infer
from server.http.strict import HEADER_TIMEOUT, MAX_HEADER_BYTES
from server.http.uvicorn_protocol import JsonHttpToolsProtocol
from tests.passing_time import pass_time

REQUEST = b"POST /v2/repository/index HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
INFER = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"


class Transport(asyncio.Transport):
    """Records the calls."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.closed = False
        self.reading = True
        self.ended = False
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_write_buffer_size(self) -> int:
        return 0


class Answers:
    """An application that answers once `let` is set, and counts cancelled calls; as `Infer` it refuses every request."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.bodies: list[bytes] = []
        self.cancelled = 0
        self.found = 0
        self.ending = False
        self.refusals: Refusals | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def unread(self, _: object) -> None:
        return None

    def resolve(self, *_: object) -> Any:
        self.found += 1
        raise Unauthorized("who is this?")


KEEP_ALIVE = 5


class Bench:
    """A connection, its transport, and the application behind it."""

    def __init__(self, hand_off: HandOff | None = None, application: Any = None) -> None:
        self.answers, self.transport, self.state = Answers(), Transport(), ServerState()
        application = application or self.answers
        config = uvicorn.Config(application, timeout_keep_alive=KEEP_ALIVE, log_config=None)
        config.load()
        self.connection = HttpConnection(cast(Infer, self.answers), application, hand_off, config, self.state, {})
        self.connection.connection_made(self.transport)

    async def settle(self) -> None:
        """Run the event loop until nothing more happens."""
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_pipelined_requests_wait_and_reading_pauses_at_the_limit(bench: Bench) -> None:
    bench.connection.data_received(REQUEST)
    await bench.settle()
    bench.connection.data_received(REQUEST * (MAX_READ_AHEAD // len(REQUEST) + 1))
    assert not bench.transport.reading
    assert "answering" in repr(bench.connection)
    bench.answers.let.set()
    await bench.settle()
    assert bench.transport.reading
    assert bench.answers.bodies[:2] == [b"{}", b"{}"]


async def test_disconnect_cancels_the_request_being_answered(bench: Bench) -> None:
    bench.connection.data_received(REQUEST)
    await bench.settle()
    bench.connection.connection_lost(None)
    await bench.settle()
    assert bench.answers.cancelled == 1
    assert bench.state.connections == set()


async def test_shutdown_closes_idle_connections_at_once_and_busy_ones_after_the_answer() -> None:
    idle, busy = Bench(), Bench()
    busy.connection.data_received(REQUEST)
    await busy.settle()
    idle.connection.shutdown()
    busy.connection.shutdown()
    assert (idle.transport.closed, busy.transport.closed) == (True, False)
    busy.answers.let.set()
    await busy.settle()
    assert b"connection: close\r\n" in busy.transport.written
    assert busy.transport.ended


async def test_while_the_server_drains_requests_that_have_arrived_are_all_answered(bench: Bench) -> None:
    bench.answers.let.set()
    bench.answers.ending = True
    bench.connection.data_received(REQUEST * 3)
    for _ in range(3):
        await bench.settle()
    assert bench.transport.written.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert bench.transport.written.count(b"connection: close\r\n") == 1
    assert bench.transport.ended


async def test_shutdown_does_not_wait_for_the_rest_of_a_body(bench: Bench) -> None:
    bench.connection.data_received(REQUEST[:-1])
    await bench.settle()
    bench.connection.shutdown()
    assert bench.transport.written.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert bench.transport.written.endswith(b'{"error":"the server is stopping"}')
    assert bench.transport.written.count(b"connection: close\r\n") == 1
    assert bench.transport.ended
    assert not bench.transport.closed, "the client may still be sending"
    assert bench.state.connections == {bench.transport.protocol}
    await bench.settle()
    assert bench.answers.bodies == []
    bench.transport.protocol.data_received(b"}")
    assert not bench.transport.closed, "nor does it close before it is read"


async def test_idle_connection_is_closed_after_keep_alive(bench: Bench) -> None:
    await pass_time(KEEP_ALIVE)
    assert not bench.transport.closed, "it was opened since the last look"
    bench.connection.data_received(REQUEST)
    for _ in range(2):
        await pass_time(KEEP_ALIVE)
    assert not bench.transport.closed, "it is waiting for its answer"
    bench.answers.let.set()
    await bench.settle()
    await pass_time(KEEP_ALIVE)
    assert bench.transport.closed


CHUNKS = b"1\r\n{\r\n1;a=b\r\n}\r\n0\r\nX-Tenant: b\r\n\r\n"
IN_CHUNKS = REQUEST.replace(b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n") + CHUNKS


@pytest.mark.parametrize("data", [b"\r\n\r\n" + REQUEST + b"\r\n", REQUEST.replace(b"POST", b"PROPFIND")])
async def test_a_request_in_pieces_leaves_its_connection_as_it_was(data: bytes) -> None:
    for cut in range(1, len(data)):
        bench = Bench()
        bench.answers.let.set()
        for piece in (data[:cut], data[cut:], REQUEST):
            bench.connection.data_received(piece)
            await bench.settle()
        assert bench.answers.bodies == [b"{}", b"{}"], cut
        assert bench.transport.protocol is None, cut


async def test_a_body_in_chunks_arrives_whole_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for cut in range(1, len(IN_CHUNKS)):
        bench = Bench()
        bench.answers.let.set()
        bench.connection.data_received(IN_CHUNKS[:cut])
        await bench.settle()
        bench.connection.data_received(IN_CHUNKS[cut:] + REQUEST)
        await bench.settle()
        await bench.settle()
        assert bench.answers.bodies == [b"{}", b"{}"], cut


@pytest.mark.parametrize(
    ("chunks", "status"),
    [
        (b"2 \r\n{}\r\n0\r\n\r\n", 400),
        (b"0x2\r\n{}\r\n0\r\n\r\n", 400),
        (b"2\n{}\n0\n\n", 400),
        (b"2\r\n{}}\r\n0\r\n\r\n", 400),
        (b"2\r\n{}0\r\n\r\n", 400),
        (b"2;\r\n{}\r\n0\r\n\r\n", 400),
        (b"2;a\nb\r\n{}\r\n0\r\n\r\n", 400),
        (b"2\r\n{}\r\n0\r\nA: b\n\r\n", 400),
        (b"2\r\n{}\r\n0\r\nContent-Length: 5\r\n\r\n", 400),
        (b"f" * 17 + b"\r\n", 400),
        (b"\r\n2\r\n", 400),
        (b"-2\r\n", 400),
        (b"2;" + b"a" * MAX_HEADER_BYTES, 431),
        (b"0\r\nA: " + b"a" * MAX_HEADER_BYTES, 431),
    ],
)
async def test_damaged_chunks_end_the_connection(chunks: bytes, status: int) -> None:
    """What is behind them is not read as a request."""
    for cut in (0, len(chunks)):
        bench = Bench()
        bench.answers.let.set()
        head = IN_CHUNKS.removesuffix(CHUNKS)
        bench.connection.data_received(head + chunks[:cut])
        await bench.settle()
        if not bench.transport.ended:
            bench.connection.data_received(chunks[cut:] + REQUEST * 2 * (status == 400))
            await bench.settle()
        assert bench.transport.written.startswith(b"HTTP/1.1 %d " % status)
        assert bench.transport.written.count(b"HTTP/1.1 ") == 1
        assert b"connection: close\r\n" in bench.transport.written
        assert bench.transport.ended
        assert bench.answers.bodies == []


async def test_reading_pauses_until_a_body_is_wanted() -> None:
    bench, wanted = Bench(), asyncio.Event()
    bodies: list[int] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await wanted.wait()
        more = True
        while more:
            message = await receive()
            bodies.append(len(message["body"]))
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    bench = Bench(application=application)
    length = 3 * MAX_READ_AHEAD
    bench.connection.data_received(REQUEST.replace(b": 2\r\n\r\n{}", b": %d\r\n\r\n" % length) + b"x" * (length // 2))
    await bench.settle()
    assert not bench.transport.reading
    wanted.set()
    await bench.settle()
    assert bench.transport.reading
    bench.connection.data_received(b"x" * (length // 2) + REQUEST[:9])
    await bench.settle()
    assert (sum(bodies), bench.transport.reading) == (length, True)
    assert bench.transport.written.startswith(b"HTTP/1.1 200 OK")


async def in_parts(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers in two parts."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    await send({"type": "http.response.body", "body": b"two"})


async def test_an_answer_in_parts_is_written_as_they_come() -> None:
    bench = Bench(application=in_parts)
    bench.connection.data_received(REQUEST)
    await bench.settle()
    answer = b"HTTP/1.1 200 OK\r\na: b\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    assert bench.transport.written == answer
    bench.connection.data_received(REQUEST)
    await bench.settle()
    assert bench.transport.written == answer * 2


async def test_an_answer_in_parts_ends_an_http_1_0_connection() -> None:
    bench = Bench(application=in_parts)
    bench.connection.data_received(REQUEST.replace(b"HTTP/1.1\r\nHost: a", b"HTTP/1.0\r\nConnection: keep-alive"))
    await bench.settle()
    assert bench.transport.written.endswith(b"connection: close\r\n\r\nonetwo")
    assert bench.transport.ended


async def test_a_part_waits_until_the_client_has_taken_those_before() -> None:
    bench = Bench(application=in_parts)
    bench.connection.data_received(REQUEST)
    bench.connection.pause_writing()
    await bench.settle()
    assert bench.transport.written.endswith(b"chunked\r\n\r\n")
    bench.connection.resume_writing()
    await bench.settle()
    assert bench.transport.written.endswith(b"two\r\n0\r\n\r\n")


@pytest.mark.parametrize("sent", [False, True])
async def test_an_application_that_fails_is_answered_500_or_cut_off(sent: bool) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        if sent:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
        raise ValueError("broken")

    bench = Bench(application=application)
    bench.connection.data_received(REQUEST)
    await bench.settle()
    assert bench.transport.written.startswith(b"HTTP/1.1 200 OK" if sent else b"HTTP/1.1 500 Internal Server Error")
    assert bench.transport.closed is sent


async def test_a_connection_waits_to_be_handed_off_until_its_answers_are_sent() -> None:
    offers: list[bool | None] = [False, None, None, True]
    bench = Bench(lambda *_: offers.pop(0))
    bench.answers.let.set()
    bench.connection.data_received(REQUEST + REQUEST)
    await bench.settle()
    assert bench.transport.written.count(b"HTTP/1.1 200 OK") == 1
    async with asyncio.timeout(30):
        while offers:
            await asyncio.sleep(0)
    assert (bench.transport.closed, bench.transport.written.count(b"HTTP/1.1 ")) == (True, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01",
        b"GET v2",
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nA: b\r\n c\r\n\r\n",
        b"POST http://a/v2/models/m/infer#b HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v2/models/m/infer HTTP/1.1\r\nnonsense\r\n\r\n",
        b"POST /v2/models/m/infer HTTP/1.1\r\nA: " + b"a" * MAX_HEADER_BYTES,
    ],
)
async def test_what_is_not_http_is_passed_to_uvicorn_with_all_bytes(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []

    class Fallback(JsonHttpToolsProtocol):
        def data_received(self, data: bytes) -> None:
            received.append(data)

    monkeypatch.setattr(connection, "JsonHttpToolsProtocol", Fallback)
    bench = Bench()
    bench.connection.data_received(data)
    assert isinstance(bench.transport.protocol, Fallback)
    assert received == [data]
    await pass_time(2 * KEEP_ALIVE)
    assert not bench.transport.closed, "uvicorn closes it now"


async def test_head_and_body_may_arrive_byte_by_byte(bench: Bench) -> None:
    bench.answers.let.set()
    for index in range(len(REQUEST)):
        bench.connection.data_received(REQUEST[index : index + 1])
    await bench.settle()
    assert bench.answers.bodies == [b"{}"]


async def test_a_head_as_long_as_the_last_one_is_not_taken_for_it() -> None:
    """Most connections repeat theirs, which is read once."""
    shown: list[bytes] = []
    bench = Bench(lambda head, *_: bool(shown.append(head.path)))  # type: ignore[func-returns-value]
    bench.connection.data_received(INFER + INFER.replace(b"/m/", b"/n/") + INFER)
    assert shown == [b"/v2/models/m/infer", b"/v2/models/n/infer", b"/v2/models/m/infer"]


async def test_invalid_http_is_not_offered_for_handoff() -> None:
    def hand_off(*_: object) -> bool:
        raise AssertionError("it was shown")

    bench = Bench(hand_off)
    bench.connection.data_received(b"POST /v2/models/m/infer HTTP/1.1\r\nnonsense\r\n\r\n")
    assert bench.transport.written.startswith(b"HTTP/1.1 400 ")


async def test_no_request_is_answered_on_a_broken_connection(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []

    def resolve(*_: object) -> Any:
        asked.append(None)
        assert len(asked) < 10, "it never stops"
        bench.transport.closed = True  # As a write that fails does, some time before `connection_lost` is called.
        raise Unauthorized("who is this?")

    monkeypatch.setattr(bench.answers, "resolve", resolve)
    bench.connection.data_received(INFER * 20)
    assert len(asked) == 1


async def test_pipelined_requests_are_limited_per_event_loop_iteration(bench: Bench) -> None:
    bench.connection.data_received(INFER * (2 * REQUESTS_PER_TURN + 1))
    assert bench.answers.found == REQUESTS_PER_TURN
    await asyncio.sleep(0)
    assert bench.answers.found == 2 * REQUESTS_PER_TURN
    await asyncio.sleep(0)
    assert bench.answers.found == 2 * REQUESTS_PER_TURN + 1
    assert bench.transport.written.count(b"HTTP/1.1 401") == 2 * REQUESTS_PER_TURN + 1
    assert not bench.transport.closed


def paced() -> Bench:
    """Where the next 401 has to wait."""
    bench = Bench()
    refusals = bench.answers.refusals = Refusals(lambda: 0.0)
    while not refusals.wait():
        pass
    return bench


async def answered(bench: Bench, count: int) -> None:
    """Wait until so many answers are written."""
    async with asyncio.timeout(30):
        while bench.transport.written.count(b"HTTP/1.1 ") < count:
            await asyncio.sleep(0)


async def test_a_refusal_beyond_the_pace_waits_while_nothing_is_read() -> None:
    bench = paced()
    bench.connection.data_received(INFER * 2)
    assert (bench.transport.written, bench.transport.reading, bench.answers.found) == (b"", False, 1)
    assert bench.connection.activity() is Activity.RECEIVING, "it can be closed to make room"
    bench.connection.pause_writing()
    bench.connection.resume_writing()
    assert not bench.transport.reading
    await answered(bench, 2)
    assert bench.answers.found == 2
    assert (bench.transport.reading, bench.transport.closed) == (True, False)


async def test_the_body_of_a_refusal_that_waited_is_dropped_and_the_connection_kept() -> None:
    bench = paced()
    bench.connection.data_received(INFER[:-1])
    await answered(bench, 1)
    assert bench.transport.reading
    bench.connection.data_received(INFER[-1:] + INFER)
    await answered(bench, 2)
    assert bench.transport.written.count(b"HTTP/1.1 401") == 2


async def test_a_refusal_by_the_application_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = paced()

    async def respond(*_: object) -> Reply:
        return Reply(401, [], b"")

    monkeypatch.setattr(asgi, "respond", respond)
    bench.connection.data_received(REQUEST)
    await bench.settle()
    assert (bench.transport.written, bench.transport.reading) == (b"", False)
    await answered(bench, 1)
    assert bench.transport.written.startswith(b"HTTP/1.1 401")


async def test_a_client_that_leaves_while_its_refusal_waits_leaves_nothing_behind() -> None:
    bench = paced()
    bench.connection.data_received(INFER)
    left = weakref.ref(bench.connection)
    bench.transport.closed = True
    bench.connection.connection_lost(None)
    del bench.connection
    gc.collect()
    assert left() is None


async def test_a_stop_of_the_server_answers_in_place_of_a_refusal_that_waits() -> None:
    bench = paced()
    bench.connection.data_received(INFER[:-1])
    bench.connection.shutdown()
    assert bench.transport.written.startswith(b"HTTP/1.1 503")
    assert bench.transport.reading
    await bench.settle()
    assert bench.transport.written.count(b"HTTP/1.1") == 1


async def test_read_ahead_is_limited_while_writing_is_paused(bench: Bench) -> None:
    bench.connection.pause_writing()
    bench.connection.data_received(INFER * (MAX_READ_AHEAD // len(INFER) + 1))
    assert (bench.transport.reading, bench.answers.found) == (False, 0)
    bench.connection.resume_writing()
    assert (bench.transport.reading, bench.answers.found) == (True, REQUESTS_PER_TURN)


async def test_pause_writing_while_yielding_stops_answers(bench: Bench) -> None:
    bench.connection.data_received(INFER * (REQUESTS_PER_TURN + 1))
    bench.connection.pause_writing()
    await bench.settle()
    assert bench.answers.found == REQUESTS_PER_TURN
    bench.connection.resume_writing()
    assert bench.answers.found == REQUESTS_PER_TURN + 1


async def test_shutdown_while_yielding_answers_nothing_more(bench: Bench) -> None:
    bench.connection.data_received(INFER * (REQUESTS_PER_TURN + 1))
    bench.connection.shutdown()
    await bench.settle()
    assert (bench.transport.ended, bench.answers.found) == (True, REQUESTS_PER_TURN)


async def test_header_timeout_applies_only_to_incomplete_headers() -> None:
    slow, quick = Bench(), Bench()
    for bench in (slow, quick):
        bench.answers.let.set()
        bench.connection.data_received(REQUEST + REQUEST[:-30])
        await bench.settle()
    await pass_time(HEADER_TIMEOUT - 1)
    quick.connection.data_received(REQUEST[-30:] + REQUEST[:-30])
    await quick.settle()
    assert slow.transport.written.count(b"HTTP/1.1") == 1
    await pass_time(1)
    assert quick.transport.written.count(b"HTTP/1.1") == 2, "its third request has just begun"
    head, body = slow.transport.written.split(b"\r\n\r\n")[-2:]
    assert head.startswith(b"okHTTP/1.1 408 Request Timeout\r\n")
    assert b"connection: close" in head
    assert body == b'{"error":"the headers did not come within 30 s"}'
    assert slow.transport.ended, "it must linger: more may arrive"


async def test_half_close_keeps_the_connection_for_a_cheap_answer_but_not_for_inference() -> None:
    asked, inferred = Bench(), Bench()
    asked.connection.data_received(REQUEST * 2)
    await asked.settle()
    assert asked.connection.eof_received()
    asked.answers.let.set()
    await asked.settle()
    assert asked.transport.written.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert asked.transport.closed
    inferred.connection.data_received(INFER[:-1])
    assert not inferred.connection.eof_received()


@pytest.mark.parametrize("change", ["load", "unload"])
async def test_half_close_during_a_model_change_is_a_disconnect(bench: Bench, change: str) -> None:
    bench.connection.data_received(
        f"POST /v2/repository/models/m/{change} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n".encode()
    )
    await bench.settle()
    assert not bench.connection.eof_received()


@pytest.mark.parametrize("leave", ["lost", "handed over", "closed"])
async def test_a_connection_that_has_ended_is_not_kept_in_memory_as_long_as_an_idle_one(leave: str) -> None:
    """Each would take some KB for `keep_alive`, 75 s: much, where refused clients connect again and again."""
    bench = Bench()
    if leave == "closed":
        bench.connection.data_received(REQUEST.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        bench.answers.let.set()
        await bench.settle()
        assert bench.transport.ended
    else:
        bench.connection.data_received(REQUEST[:30])
        if leave == "lost":
            bench.connection.connection_lost(None)
        else:
            bench.connection.data_received(b"\n")
            assert bench.transport.protocol is not None
    ended = weakref.ref(bench.connection)
    del bench
    gc.collect()
    assert ended() is None
