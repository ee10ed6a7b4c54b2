"""Too many loads and unloads of one tenant, or clients that disconnect while theirs wait, in every form of the server."""

import select
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from . import repository
from .fixtures import WAYS, served_as
from .harness import PATIENCE, Served
from .processes import Running
from .wire import FOREVER, SMALL, Connection, infer, lane, post, posted, spin, until

UNLOAD_SPIN, UNLOAD = (post(f"/v2/repository/models/{name}/unload") for name in ("spin", "identity"))


@pytest.fixture(params=WAYS[:3])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served | Running]:
    root = tmp_path / "models"
    repository.write(root, "identity", repository.IDENTITY)
    repository.write(root, "spin", repository.SPIN)
    with served_as(request.param, root, tmp_path) as served:
        yield served


def state(http: httpx.Client, name: str) -> str:
    (found,) = [entry["state"] for entry in http.post("/v2/repository/index").json() if entry["name"] == name]
    return str(found)


def first_answered(connections: list[Connection]) -> Connection:
    ready, _, _ = select.select([connection.socket for connection in connections], [], [], PATIENCE)
    return next(connection for connection in connections if connection.socket in ready)


def test_too_many_waiting_loads_are_429_and_those_of_disconnected_clients_are_dropped(
    served: Served | Running, http: httpx.Client
) -> None:
    with ExitStack() as stack:
        spinning, first = (stack.enter_context(Connection(served)) for _ in range(2))
        spinning.send(posted("spin", spin(FOREVER)))
        until(lambda: lane(http)["in_flight"] == 1)
        first.send(UNLOAD_SPIN)  # It waits for the request in flight.
        until(lambda: state(http, "spin") == "UNAVAILABLE")
        waiting = [stack.enter_context(Connection(served)) for _ in range(6)]
        for connection in waiting:
            connection.send(UNLOAD)
        for _ in range(2):
            refused = first_answered(waiting)
            answer = refused.answer()
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            waiting.remove(refused)
        for connection in waiting:
            connection.close()
        spinning.close()
        assert first.answer().status == 200
    assert http.post("/v2/repository/models/spin/load").status_code == 200
    assert (state(http, "spin"), state(http, "identity")) == ("READY", "READY")
    assert infer(http, "identity", SMALL).status_code == 200
