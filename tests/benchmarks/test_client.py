"""The client that stands in for wrk: where an answer ends."""

import socketserver
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from benchmarks.cases import Request
from benchmarks.client import Load, drive

BODY = bytes(300_000)
HEAD = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 158\r\nContent-Length: %d\r\n\r\n" % len(BODY)


class Answering(socketserver.BaseRequestHandler):
    """Answers every request of an empty body in binary, whose head names two lengths."""

    def handle(self) -> None:
        self.server.seen.append(0)
        while self.request.recv(1 << 16):
            self.server.seen[-1] += 1  # Before the client can have it.
            self.request.sendall(HEAD + BODY)


@pytest.fixture
def server() -> Iterator[Any]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answering) as server:
        server.seen = []
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_answer_ends_with_its_body_and_not_with_its_json(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the built-in client, which is for where wrk is not on PATH."""
    monkeypatch.setenv("PATH", "")
    load: Load = drive(server.server_address[1], Request("/", {}, b""), 2, 0.1)
    assert 0 < load.requests <= sum(server.seen)
