"""JsonHttpToolsProtocol, over real sockets and on a fake transport."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from server.http.strict import HEADER_TIMEOUT
from server.http.uvicorn_protocol import MAX_HEADER_BYTES, JsonHttpToolsProtocol
from tests.passing_time import pass_time


async def application(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a server with this protocol and a default header."""
    config, state = uvicorn.Config(application, log_config=None), ServerState()
    config.load()
    state.default_headers = [(b"x-default", b"1")]
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: JsonHttpToolsProtocol(config, state, {}), "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def answers(port: int, data: bytes) -> bytes:
    """Everything the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
LINE = b"X: " + b"a" * 1000 + b"\r\n"


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /", b"a" * 1000),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"a" * 1000),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", LINE),
        (CHUNKED + b"1;", b"a" * 1000),
        (CHUNKED + b"0\r\n", LINE),
    ],
    ids=["path", "header", "headers", "chunk extension", "trailers"],
)
async def test_endless_headers_are_refused_at_the_limit(port: int, start: bytes, more: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start)
    sent, answer = 0, asyncio.ensure_future(reader.read())
    while not answer.done() and sent < 100 * MAX_HEADER_BYTES:
        writer.write(more)
        await writer.drain()
        await asyncio.sleep(0)
        sent += len(more)
    assert MAX_HEADER_BYTES < sent < 100 * MAX_HEADER_BYTES
    assert (await answer).startswith(b"HTTP/1.1 431 ")
    writer.close()


class Transport(asyncio.Transport):
    """Records what is written."""

    written = b""

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.written += b"<closed>"

    def write_eof(self) -> None:
        self.written += b"<closed>"

    def can_write_eof(self) -> bool:
        return True

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.written.endswith(b"<closed>")


async def test_too_long_headers_are_refused_in_json() -> None:
    protocol, transport = silent()
    start = b"GET / HTTP/1.1\r\nHost: a\r\nX: "
    for part in (start, b"a" * (MAX_HEADER_BYTES - len(start))):
        protocol.data_received(part)
        assert transport.written == b""
    for _ in range(2):  # Bytes that arrive after the close have no effect.
        protocol.data_received(b"a")
        head, body = transport.written.removesuffix(b"<closed>").split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert json.loads(body) == {"error": "more than 65536 bytes of headers, which is the limit"}


async def test_bodies_and_complete_headers_do_not_count_towards_the_header_limit(port: int) -> None:
    chunk = b"400\r\n" + b"a" * 1024 + b"\r\n"
    many = b"GET / HTTP/1.1\r\nHost: a\r\n" + LINE + b"\r\n"
    data = CHUNKED + chunk * 200 + b"0\r\n\r\n" + many * 100 + b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert (await answers(port, data)).count(b"HTTP/1.1 200 OK\r\n") == 102


async def test_valid_http_is_answered_as_by_uvicorn(port: int) -> None:
    answer = await answers(port, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nok")


def silent(app: Any = application) -> tuple[JsonHttpToolsProtocol, Transport]:
    """A protocol whose connection was just made."""
    config, transport = uvicorn.Config(app, log_config=None), Transport({"peername": ("127.0.0.1", 1)})
    config.load()
    protocol = JsonHttpToolsProtocol(config, ServerState(), {})
    protocol.connection_made(transport)
    return protocol, transport


async def test_header_timeout_answers_408_only_if_a_request_began() -> None:
    (begun, answered), (_, closed) = silent(), silent()
    begun.data_received(b"GET / HTTP/1.1\r\n")
    await pass_time(HEADER_TIMEOUT - 1)
    assert answered.written == closed.written == b""
    await pass_time(1)
    assert answered.written.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert answered.written.endswith(b'{"error":"the headers did not come within 30 s"}<closed>')
    assert closed.written == b"<closed>"


async def test_header_timeout_applies_to_later_requests_but_not_while_one_is_answered() -> None:
    let = asyncio.Event()

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await let.wait()
        await application(scope, receive, send)

    protocol, transport = silent(late)
    protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    await pass_time(HEADER_TIMEOUT)
    protocol.data_received(b"GET ")
    await pass_time(HEADER_TIMEOUT)
    assert transport.written == b"", "the first one is still being answered"
    let.set()
    while not transport.written.endswith(b"ok"):
        await asyncio.sleep(0)
    await pass_time(HEADER_TIMEOUT)
    assert b"HTTP/1.1 408 Request Timeout\r\n" in transport.written


async def test_header_timeout_begins_again_with_each_request() -> None:
    protocol, transport = silent()
    await pass_time(HEADER_TIMEOUT - 1)
    protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    while not transport.written.endswith(b"ok"):
        await asyncio.sleep(0)
    protocol.data_received(b"GET ")
    await pass_time(HEADER_TIMEOUT - 1)
    assert transport.written.endswith(b"ok")
    await pass_time(1)
    assert b"HTTP/1.1 408 Request Timeout\r\n" in transport.written
