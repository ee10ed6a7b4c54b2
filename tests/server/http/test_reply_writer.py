"""Replies as bytes, and what becomes of large tensors when the socket does not take all of them."""

import socket
from itertools import product
from typing import Any

import pytest
from uvicorn.server import ServerState

from server.http.exchange import Reply
from server.http.inference import Success, success
from server.http.reply_writer import ReplyWriter
from server.protocol.response import InferResponse

from .test_connection import Transport

TIMING = b"queue;dur=0.100, execute;dur=0.200"
DOCUMENT = b'{"outputs":[]}'
LARGE = bytes(range(256)) * 400


def outcome(*tensors: bytes | memoryview, document: bytes = DOCUMENT, binary: bool = True) -> Success:
    return InferResponse(document, tensors, len(document) if binary else None), TIMING


def writer() -> tuple[ReplyWriter, Transport, ServerState]:
    state, transport = ServerState(), Transport()
    made = ReplyWriter(state)
    made.open(transport)
    return made, transport, state


OUTCOMES = {
    "small": outcome(b"tensor"),
    "two": outcome(b"tensor", b"another"),
    "the same JSON, other sizes": outcome(b"tensors"),
    "large": outcome(memoryview(LARGE)),
    "many": outcome(*[b"abc"] * 2000),
    "no bytes": outcome(b""),
    "JSON": outcome(binary=False),
    "other JSON": outcome(b"tensor", document=b'{"outputs":[{}]}'),
}


@pytest.mark.parametrize(("closing", "is_http_1_0"), [*product([False, True], repeat=2)])
def test_success_has_the_same_bytes_as_any_reply(closing: bool, is_http_1_0: bool) -> None:
    quick, transport, state = writer()
    for headers, each in product([[], [(b"date", b"today")], [(b"date", b"tomorrow")]], [*OUTCOMES.values()] * 2):
        state.default_headers = headers
        usual, expected, its_state = writer()
        its_state.default_headers = headers
        usual.write(success(each), closing, is_http_1_0)
        transport.written = b""
        quick.write_success(each, closing, is_http_1_0)
        assert transport.written == expected.written
        assert transport.written.endswith(each[0].body)
        assert b"\r\ncontent-length: %d\r\n" % len(each[0].body) in transport.written


class Connected(Transport):
    """A transport with a real socket, and `unsent` bytes that were written before."""

    def __init__(self, to: socket.socket, unsent: int = 0) -> None:
        super().__init__()
        self._to = to
        self._unsent = unsent

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._to if name == "socket" else super().get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._unsent


@pytest.mark.parametrize("taken", [0, 1, 150, 50_000, 10**6])
@pytest.mark.parametrize("unsent", [0, 1])
def test_rest_that_the_socket_does_not_take_is_copied(taken: int, unsent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bytearray(LARGE)
    ours, theirs = socket.socketpair()
    transport, made = Connected(ours, unsent), ReplyWriter(ServerState())
    made.open(transport)
    sent: list[bytes] = []

    def writev(descriptor: int, pieces: list[bytes]) -> int:
        assert (descriptor, unsent) == (ours.fileno(), 0), "bytes written before come first"
        if not taken:
            raise BlockingIOError
        sent.append(b"".join(pieces)[:taken])
        return len(sent[-1])

    monkeypatch.setattr("os.writev", writev)
    made.write(Reply(200, [], DOCUMENT, [memoryview(memory)[:60_000], memoryview(memory)[60_000:]]), False, False)
    memory[:] = bytes(len(memory))
    assert (b"".join(sent) + transport.written).endswith(b"\r\n\r\n" + DOCUMENT + LARGE)
    assert (transport.written == b"") == (taken == 10**6 and not unsent), "the rest, and only that, goes to the transport"
    ours.close()
    theirs.close()
