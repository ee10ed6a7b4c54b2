"""Clients that do not read their answers, over real sockets."""

import json
import socket
from contextlib import ExitStack, suppress

import httpx
import pytest

from server.config.tenant import TenantConfig
from server.tenants import unread

from . import repository
from .fixtures import served_with
from .harness import Served
from .wire import Connection, chunked, infer, posted, request, tensor, until

MIB = 1 << 20
NBYTES = 12_000_000
DOCUMENT = request(
    tensor("x", "FP32", [1000], [1.5] * 1000), tensor("times", "INT64", [1], [3000]), parameters={"binary_data_output": True}
)
LARGE = posted("tile", DOCUMENT)
CHUNKED = chunked(json.dumps(DOCUMENT).encode(), path="/v2/models/tile/infer")
"""With chunks `HttpConnection` passes its connection on to uvicorn's protocol."""


served = served_with(
    TenantConfig(name="acme", granules=1, models=("*",), memory=40 * MIB),
    fill=lambda root: repository.write(root, "tile", repository.TILE),
    write_timeout=0.05,
)
"""A tenant of 40 MiB, whose answers have 12 MB: more than sockets buffer."""


def closed(served: Served) -> int:
    """How many connections were closed because their clients did not read."""
    return served.service.tenants["acme"].lane.statistics().unread


def waiting(served: Served) -> int:
    return served.service.tenants["acme"].unread.connections


def ask(served: Served, data: bytes = LARGE) -> Connection:
    """A connection whose client asks and reads nothing."""
    connection = Connection(served)
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
    connection.send(data)
    return connection


def received(connection: Connection) -> int:
    """How many bytes come before the server closes the connection, or until nothing more comes."""
    connection.patience(0.5)
    total = 0
    with suppress(TimeoutError, ConnectionResetError):
        while data := connection.socket.recv(MIB):
            total += len(data)
    return total


@pytest.mark.parametrize("data", [LARGE, CHUNKED], ids=["plain", "chunked"])
def test_a_client_that_does_not_read_its_answer_is_closed_and_counted(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(unread, "CHECK_INTERVAL", 0.02)
    before = closed(served)
    with ask(served, data) as connection:
        until(lambda: closed(served) == before + 1)
        assert waiting(served) == 0
        assert received(connection) < NBYTES
    assert f'greenlane_unread_answers_total{{tenant="acme"}} {before + 1}' in http.get("/metrics").text
    answer = infer(http, "tile", DOCUMENT)
    assert answer.status_code == 200, answer.text[:300]


def test_bytes_that_are_unread_count_against_the_tenants_memory(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.service.tenants["acme"].unread, "seconds", 0.0)
    before = closed(served)
    with ask(served) as oldest, ExitStack() as stack:
        until(lambda: waiting(served) == 1)
        newest = oldest
        while closed(served) == before:
            last = waiting(served)
            newest = stack.enter_context(ask(served))
            until(lambda: waiting(served) > last or closed(served) > before)  # noqa: B023 - Called at once.
        assert infer(http, "tile", DOCUMENT).status_code == 200, "one that reads is served"
        assert received(newest) > NBYTES
        assert received(oldest) < NBYTES
    until(lambda: waiting(served) == 0)
