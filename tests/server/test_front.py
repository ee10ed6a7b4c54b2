"""The front on a transport that the test plays: what it does at the edges that real sockets do not reach on purpose."""

import asyncio
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from server.errors import ClientGone
from server.front import MOST_AHEAD, MOST_HEADERS, Front
from server.infer import Call, Infer, Reply

REQUEST = b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"


class Transport(asyncio.Transport):
    """Remembers what was done to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.closed = False
        self.reading = True
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol


class Answers:
    """In the place of `Infer`: answers once it is let, and counts calls that were cancelled."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.bodies: list[bytes] = []
        self.cancelled = 0

    async def answer(self, call: Call) -> Reply | None:
        try:
            self.bodies.append(await call.body(100))
        except ClientGone:
            return None
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Reply(200, [(b"content-type", b"text/plain")], b"ok")


class Bench:
    """A front, its transport, and who answers."""

    def __init__(self, keep_alive: int = 5) -> None:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            raise NotImplementedError

        config = uvicorn.Config(application, timeout_keep_alive=keep_alive, log_config=None)
        config.load()
        self.answers, self.transport, self.state = Answers(), Transport(), ServerState()
        self.front = Front(cast(Infer, self.answers), config, self.state, {})
        self.front.connection_made(self.transport)

    async def settle(self) -> None:
        """Let everything happen that can."""
        for _ in range(10):
            await asyncio.sleep(0)


async def test_a_request_is_answered_in_one_write_and_the_connection_kept() -> None:
    bench = Bench()
    bench.answers.let.set()
    for _ in range(2):
        bench.front.data_received(REQUEST)
        await bench.settle()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"
    assert bench.transport.written == answer * 2
    assert bench.answers.bodies == [b"{}", b"{}"]
    assert not bench.transport.closed
    assert repr(bench.front) == "<Front idle, 0 bytes ahead>"


async def test_what_is_sent_ahead_waits_and_too_much_of_it_is_not_read() -> None:
    bench = Bench()
    bench.front.data_received(REQUEST)
    await bench.settle()
    bench.front.data_received(REQUEST * (MOST_AHEAD // len(REQUEST) + 1))
    assert not bench.transport.reading
    assert "answering" in repr(bench.front)
    bench.answers.let.set()
    await bench.settle()
    assert bench.transport.reading
    assert bench.answers.bodies[:2] == [b"{}", b"{}"]


async def test_a_slow_reader_is_answered_no_more_until_it_reads() -> None:
    bench = Bench()
    bench.answers.let.set()
    bench.front.pause_writing()
    bench.front.data_received(REQUEST)
    await bench.settle()
    assert bench.answers.bodies == []
    bench.front.resume_writing()
    await bench.settle()
    assert bench.answers.bodies == [b"{}"]


async def test_a_client_that_leaves_cancels_what_is_answered() -> None:
    bench = Bench()
    bench.front.data_received(REQUEST)
    await bench.settle()
    bench.front.connection_lost(None)
    await bench.settle()
    assert bench.answers.cancelled == 1
    assert bench.state.connections == set()


async def test_a_client_that_leaves_in_the_middle_of_a_body_is_gone() -> None:
    bench = Bench()
    bench.front.data_received(REQUEST[:-1])
    await bench.settle()
    bench.front.connection_lost(ConnectionResetError())
    await bench.settle()
    assert bench.answers.bodies == []


async def test_a_server_that_stops_closes_idle_connections_at_once_and_others_after_their_answer() -> None:
    idle, busy = Bench(), Bench()
    busy.front.data_received(REQUEST)
    await busy.settle()
    idle.front.shutdown()
    busy.front.shutdown()
    assert (idle.transport.closed, busy.transport.closed) == (True, False)
    busy.answers.let.set()
    await busy.settle()
    assert b"connection: close\r\n" in busy.transport.written
    assert busy.transport.closed


async def test_a_connection_that_says_nothing_for_long_is_closed_and_one_that_does_is_not() -> None:
    bench = Bench()
    bench.front._close_if_idle()
    assert not bench.transport.closed, "it was opened since the last look"
    bench.front.data_received(REQUEST)
    await bench.settle()
    bench.front._close_if_idle()
    bench.front._close_if_idle()
    assert not bench.transport.closed, "it is waiting for its answer"
    bench.answers.let.set()
    await bench.settle()
    bench.front._close_if_idle()
    assert bench.transport.closed


@pytest.mark.parametrize(
    "data",
    [
        b"GET /v2 HTTP/1.1\r\n",
        b"POST /v2/models/m/infer HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v2/models/m/infer HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v2/models/m/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n",
        b"POST /v2/models/m/infer HTTP/1.1\r\nnonsense\r\n\r\n",
        b"POST /v2/models/m/infer HTTP/1.1\r\nA: " + b"a" * MOST_HEADERS,
        b"POST /v2/repository/index HTTP/1.1\r\n",
    ],
)
async def test_every_other_request_goes_to_uvicorn_with_all_its_bytes(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, received = Bench(), []

    class Rest(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            received.append(data)

    monkeypatch.setattr(bench.front, "_make_rest", Rest)
    bench.front.data_received(data)
    assert isinstance(bench.transport.protocol, Rest)
    assert received == [data]
    bench.front._close_if_idle()
    assert not bench.transport.closed, "it is not ours to close any more"
