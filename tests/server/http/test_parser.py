"""Requests that offer an upgrade, parsed as any other."""

import gc
import weakref

import httptools
import pytest

from server.http.uvicorn_protocol import Parser

OFFER = b"Upgrade: h2c\r\nConnection: Upgrade\r\n"
SIZED = b"POST /a HTTP/1.1\r\nHost: x\r\n" + OFFER + b"Content-Length: 7\r\n\r\nGET / H"
CHUNKED = b"POST /b HTTP/1.1\r\nHost: x\r\n" + OFFER + b"Transfer-Encoding: chunked\r\n\r\n3\r\nGET\r\n0\r\n\r\n"
BARE = b"GET /c HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n"
PLAIN = b"POST /d HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok"


class Recorder:
    """Records the path and body of each complete request."""

    def __init__(self) -> None:
        self.complete: list[tuple[bytes, bytes]] = []
        self.headers: list[bytes] = []
        self.parser = Parser(self)

    def on_message_begin(self) -> None:
        self.path = self.body = b""

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append(name)

    def on_headers_complete(self) -> None:
        assert self.parser.get_http_version() == "1.1"
        assert self.parser.should_keep_alive()
        assert not self.parser.should_upgrade()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete.append((self.path, self.body))


@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
def test_requests_parse_the_same_in_chunks_of_any_size(size: int) -> None:
    recorder, data = Recorder(), (SIZED + CHUNKED + BARE + PLAIN) * 2
    for at in range(0, len(data), size):
        recorder.parser.feed_data(data[at : at + size])
    assert recorder.complete == [(b"/a", b"GET / H"), (b"/b", b"GET"), (b"/c", b""), (b"/d", b"ok")] * 2
    assert recorder.headers.count(b"Upgrade") == 6


@pytest.mark.parametrize(
    "framing",
    [b"Content-Length: 1\r\nContent-Length: 2", b"Content-Length: 1\r\nTransfer-Encoding: chunked", b"Content-Length: -1"],
)
def test_upgrade_offer_does_not_hide_invalid_framing(framing: bytes) -> None:
    recorder = Recorder()
    with pytest.raises(httptools.HttpParserError):
        recorder.parser.feed_data(b"POST /a HTTP/1.1\r\nHost: x\r\n" + OFFER + framing + b"\r\n\r\nGET")
    assert recorder.complete == []


def test_broken_chunk_after_an_upgrade_offer_is_refused() -> None:
    recorder = Recorder()
    with pytest.raises(httptools.HttpParserError):
        recorder.parser.feed_data(CHUNKED.replace(b"3\r\nGET", b"zz\r\nGET"))
    assert recorder.complete == []


def test_closed_parser_is_freed_without_garbage_collection() -> None:
    gc.disable()
    try:
        recorder = Recorder()
        parser = weakref.ref(recorder.parser)
        recorder.parser.feed_data(SIZED)
        recorder.parser.close()
        del recorder.parser
        assert parser() is None
    finally:
        gc.enable()
