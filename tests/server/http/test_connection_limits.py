"""Which connections are closed at the limit."""

import resource

import pytest
from uvicorn.server import ServerState

from server.http.connection_limits import Activity, Connections, connections, descriptor_limit


class Connection:
    """A connection with this activity."""

    def __init__(self, standing: Activity) -> None:
        self._activity = standing
        self.gone = False

    def activity(self) -> Activity:
        return self._activity

    def abort(self) -> None:
        self.gone = True


def filled(most: int, *standings: Activity) -> tuple[Connections, list[Connection]]:
    """Connections with this limit, added in this order."""
    found, each = Connections(most), [Connection(standing) for standing in standings]
    for one in each:
        found.add(one)
    return found, each


IDLE, ANSWERING, RECEIVING = Activity.IDLE, Activity.ANSWERING, Activity.RECEIVING


@pytest.mark.parametrize(
    ("standings", "closed"),
    [
        pytest.param([IDLE, ANSWERING, RECEIVING, RECEIVING, IDLE], {2}, id="the oldest that is received"),
        pytest.param([ANSWERING, IDLE, IDLE], {1}, id="the oldest idle one next"),
        pytest.param([IDLE] * 6 + [RECEIVING] * 2, {0}, id="not the youngest"),
        pytest.param([ANSWERING] * 2, set(), id="none that is answered"),
        pytest.param([RECEIVING] * 64, {0, 1, 2, 3}, id="several at a time"),
    ],
)
def test_a_connection_beyond_the_limit_closes(standings: list[Activity], closed: set[int]) -> None:
    found, each = filled(len(standings), *standings)
    found.add(Connection(RECEIVING))
    assert {place for place, one in enumerate(each) if one.gone} == closed
    assert len(found) == len(standings) + 1 - len(closed)
    assert repr(found) == f"<Connections {len(found)} of {len(standings)}>"


def test_connection_limit_follows_the_descriptor_limit() -> None:
    state = ServerState()
    assert connections(state) is connections(state) is state.connections
    assert descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
    assert repr(connections(state)) == f"<Connections 0 of {descriptor_limit()}>"


def test_closed_connections_are_logged_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    found = Connections(1, lambda: now)
    for _ in range(3):
        found.add(Connection(Activity.IDLE))
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["1 connections were closed"]
    now += 10
    found.add(Connection(Activity.IDLE))
    assert [record.getMessage().partition(",")[0] for record in caplog.records[1:]] == ["2 connections were closed"]
