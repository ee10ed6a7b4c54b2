"""More connections than the limit, over real sockets: those without a complete request are closed."""

import select
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from server.http import connection_limits

from .fixtures import server_with
from .harness import Served, configuration, serving
from .processes import Running, tenant
from .wire import Connection, busy, chunked, client, get, post, until

MOST = 20
LIVE = get("/v2/health/live")
UNFINISHED = {
    "headers": b"POST /v2/models/identity/infer HTTP/1.1\r\n",
    "an inference": post("/v2/models/identity/infer", b"{", length=10),
    "anything else": post("/v2/repository/index", b"{", length=10),
    "what was answered already": post("/v2/health/live", b"{", length=10),
    "in chunks": chunked(b"{", path="/v2/repository/index", end=b""),
}


@pytest.fixture(scope="module", params=[False, True], ids=["asgi", "direct"])
def served(standard: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server with a low connection limit, with and without ASGI."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_limits, "descriptor_limit", lambda: MOST)
        with serving(configuration(standard), direct=request.param) as served:
            yield served


def hung_up(connection: Connection, answered: bool = True) -> bool:
    """Whether the server has closed the connection; it may not have `answered` before if that is False.

    A request that never becomes complete is answered 408 after 30 s, and its connection closed for that.
    """
    while select.select([connection.socket], [], [], 0)[0]:
        try:
            data = connection.socket.recv(1 << 16)
        except ConnectionResetError:
            return True
        if not data:
            return True
        assert answered, f"it was to be closed for the others, and was answered {data[:40]!r}"
    return False


@pytest.mark.parametrize("kind", UNFINISHED)
def test_unfinished_requests_do_not_lock_other_clients_out(served: Served, kind: str) -> None:
    data = UNFINISHED[kind]
    with ExitStack() as stack, client(served) as http:
        kept = stack.enter_context(Connection(served))
        kept.send(LIVE)
        assert kept.answer().status == 200
        with busy(served, http):
            others = [stack.enter_context(Connection(served)) for _ in range(3 * MOST)]
            for each in others:
                each.send(data)
            until(lambda: hung_up(others[0], answered=kind == "what was answered already"))
            with Connection(served) as new:
                new.send(LIVE)
                assert new.answer().status == 200
                new.send(LIVE.replace(b"health/live", b"models/identity"))
                assert new.answer().status == 200
            kept.send(LIVE)
            assert kept.answer().status == 200, "it finishes its requests"
        until(lambda: sum(not hung_up(each) for each in others) <= MOST)


server = server_with(tenant())


@pytest.mark.parametrize(
    ("data", "answered"),
    [
        (b"PUT" + post("/admin/partitions", b"{", length=10)[4:], False),
        (post("/v2/nothing", b"{", "X-Tenant: none", length=10), True),
    ],
    ids=["shared", "unauthenticated"],
)
def test_many_connections_do_not_make_health_and_metrics_unreachable(server: Running, data: bytes, answered: bool) -> None:
    with ExitStack() as stack:
        others = [stack.enter_context(Connection(server)) for _ in range(connection_limits.MAX_SHARED_CONNECTIONS + 100)]
        for each in others:
            each.send(data)
        until(lambda: hung_up(others[0], answered))
        with client(server) as http:
            assert http.get("/v2/health/ready").status_code == 200
            assert http.get("/metrics").status_code == 200
            assert http.get("/admin/tenants").status_code == 200
