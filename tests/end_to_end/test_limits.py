"""Limits of a tenant over sockets, in each form: who is refused, before its body, with what, and that others are not."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from greenlane.load.server_process import free_port

from .harness import cores
from .processes import Running, configure, running, running_device, running_plain, tenant
from .test_metrics import scrape, value
from .wire import SMALL, Answer, Connection, client, infer, post, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

FORMS: dict[str, tuple[Any, dict[str, int]]] = {
    "uvicorn": (running_plain, {}),
    "processes": (running, {"max_connections": 8}),
    "device process": (running_device, {"max_connections": 8, "http_processes": 3}),
}
GLOBEX = "X-Tenant: globex"


@pytest.fixture(scope="module")
def own_port() -> int:
    return free_port()


@pytest.fixture(scope="module", params=FORMS)
def server(
    standard: Path, own_port: int, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Running]:
    start, more = FORMS[request.param]
    more |= {"port": own_port} if more else {}
    tenants = tenant("acme", "identity", requests_per_second=1, burst_requests=6, **more)
    tenants += tenant("globex", "identity", bytes_per_second=1000, max_large_bodies=1)
    with start(configure(tmp_path_factory.mktemp("limits") / "greenlane.toml", standard, tenants)) as server:
        with client(server, "acme") as http:
            until(lambda: http.get("/v2/health/ready").status_code == 200)
        yield server


def limited(server: Running, tenant: str, limit: str) -> float:
    """How many requests were refused for this."""
    with client(server) as http:
        return value(scrape(http), "greenlane_limited_requests_total", tenant=tenant, limit=limit)


def head(nbytes: int) -> bytes:
    """An inference request of globex with a binary tensor, whose body is still to come."""
    return post("/v2/models/identity/infer", b"", GLOBEX, "Inference-Header-Content-Length: 2", length=nbytes)


def test_a_tenant_over_its_rate_is_429_until_retry_after_and_others_are_served(server: Running) -> None:
    """Over all of its processes together: each connection may be another one's."""
    with ExitStack() as stack, client(server, "globex") as globex:
        each = [stack.enter_context(client(server, "acme")) for _ in range(6)]
        answers = [infer(http, "identity", SMALL) for http in each for _ in range(2)]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 3 <= len(refused) <= 6, "a burst of 6, and 3 s for all of this"
        assert {answer.status_code for answer in refused} == {429}
        assert {answer.headers["retry-after"] for answer in refused} == {"1"}
        assert "tenants.acme.requests_per_second allows 1 request a second, and 6 at once" in refused[-1].json()["error"]
        assert all(infer(globex, "identity", SMALL).status_code == 200 for _ in range(12))
        assert limited(server, "acme", "requests_per_second") == len(refused)
        until(lambda: infer(each[0], "identity", SMALL).status_code == 200)


def test_a_large_body_beside_another_is_refused_until_that_has_arrived(server: Running) -> None:
    with Connection(server) as one:
        one.send(head(2 << 20) + b" ")
        until(lambda: _refused(server, 2 << 20, "tenants.globex.max_large_bodies: a body of 2097152 bytes, but 1 of more than"))
        one.close()
        until(lambda: _announced(server, 2 << 20) is None)
        assert limited(server, "globex", "max_large_bodies") >= 1


def test_bytes_are_charged_when_they_are_announced_and_a_body_that_never_fits_is_413(server: Running) -> None:
    until(lambda: _refused(server, 40 << 20, "tenants.globex.bytes_per_second allows 1000 bytes of request bodies a second"))
    assert limited(server, "globex", "bytes_per_second") >= 1
    answer = _announced(server, (64 << 20) + 1)
    assert answer
    assert answer.status == 413
    assert "which it never admits" in answer.json["error"]


def _refused(server: Running, nbytes: int, why: str) -> bool:
    """Announce a body; whether it is refused now, before anything of it was sent."""
    answer = _announced(server, nbytes)
    return (
        answer is not None and answer.status == 429 and why in answer.json["error"] and int(answer.headers["retry-after"]) > 0
    )


def _announced(server: Running, nbytes: int) -> Answer | None:
    """The answer to a request whose body was only announced; None if the body is waited for."""
    with Connection(server) as connection:
        connection.send(head(nbytes))
        connection.patience(0.3)
        try:
            return connection.answer()
        except TimeoutError:
            return None


def test_connections_beyond_the_limit_are_429_and_closed_and_the_others_stay(
    server: Running, request: pytest.FixtureRequest
) -> None:
    """In one process connections belong to no tenant, and the log says so at the start."""
    if "uvicorn" in request.node.name:
        return
    ask = b"GET /v2/models/identity/ready HTTP/1.1\r\nHost: a\r\nX-Tenant: acme\r\n\r\n"
    with ExitStack() as stack:

        def opened() -> tuple[Connection, Answer]:
            connection = stack.enter_context(Connection(server))
            connection.send(ask)
            return connection, connection.answer()

        def fill() -> bool:
            connection, answer = opened()
            if answer.status == 200:
                kept.append(connection)
            else:  # Those of the tests before are not all closed yet.
                connection.close()
            return len(kept) == 8

        kept: list[Connection] = []
        until(fill)
        surplus, answer = opened()
        assert (answer.status, answer.headers["connection"]) == (429, "close")
        assert answer.json["error"].startswith("tenants.acme.max_connections: 8 connections may be open, and as many are. Send")
        assert surplus.ended()
        for connection in kept:
            connection.send(ask)
            assert connection.answer().status == 200
        kept.pop().close()
        until(lambda: opened()[1].status == 200)
    assert limited(server, "acme", "max_connections") >= 1


BEGINNINGS = {
    "patch": (b"PA", b"TCH /v2/models/identity HTTP/1.1\r\nHost: a\r\nX-Tenant: acme\r\n\r\n"),
    "head": (b"H", b"EAD /v2/models/identity/ready HTTP/1.1\r\nHost: a\r\nX-Tenant: acme\r\n\r\n"),
    "other": (b"PROP", b"FIND /v2/models/identity HTTP/1.1\r\nHost: a\r\nX-Tenant: acme\r\n\r\n"),
    "nothing": (b"\r", b"\n\r\nGET /v2/models/identity HTTP/1.1\r\nHost: a\r\nX-Tenant: acme\r\n\r\n"),
    "not http": (b"\x16", b"\x03\x01"),
    "chunked": (
        b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: a\r\nX-Tenant: acme\r\nTransfer-Encoding: chu",
        b"nked\r\n\r\n1\r\n{\r\n",
    ),
    "expect": (post("/v2/models/identity/infer", b"", "X-Tenant: acme", "Expect: 100-continue", length=9), b""),
    "1.0": (b"GET /v2/models/identity HTTP/1.0\r\nX-Tenant: acme\r\nConnection: keep-alive\r\n", b"\r\n"),
}


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_the_limit_on_connections_holds_whatever_their_first_bytes_are(
    server: Running, kind: str, own_port: int, request: pytest.FixtureRequest
) -> None:
    """On the tenant's own port, where its process reads all bytes itself."""
    if "uvicorn" in request.node.name:
        return
    first, rest = BEGINNINGS[kind]
    ask = b"GET /v2/models/identity/ready HTTP/1.1\r\nHost: a\r\nX-Tenant: acme\r\n\r\n"
    port = SimpleNamespace(port=own_port)
    with ExitStack() as stack:
        kept: list[Connection] = []

        def fill() -> bool:
            connection = stack.enter_context(Connection(port))
            connection.send(ask)
            if connection.answer().status == 200:
                kept.append(connection)
            else:
                connection.close()
            return len(kept) == 8

        until(fill)
        with Connection(port) as connection:
            connection.send(first)
            with suppress(OSError):
                connection.send(rest)
            answer = connection.answer(bare=kind == "head")
            assert answer.status == 429, answer.body
            assert connection.ended()
