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


def test_oldest_receiving_connection_is_closed_first() -> None:
    unfinished = [Activity.RECEIVING] * 2
    found, each = filled(5, Activity.IDLE, Activity.ANSWERING, *unfinished, Activity.IDLE)
    found.add(Connection(Activity.RECEIVING))
    assert [one.gone for one in each] == [False, False, True, False, False]
    assert len(found) == 5
    assert repr(found) == "<Connections 5 of 5>"


def test_oldest_idle_connection_is_closed_next() -> None:
    found, each = filled(3, Activity.ANSWERING, Activity.IDLE, Activity.IDLE)
    found.add(Connection(Activity.ANSWERING))
    assert [one.gone for one in each] == [False, True, False]
    assert each[1] not in found


def test_youngest_connections_are_not_closed() -> None:
    found, each = filled(8, *[Activity.IDLE] * 6, Activity.RECEIVING, Activity.RECEIVING)
    found.add(Connection(Activity.RECEIVING))
    assert [one.gone for one in each] == [True] + [False] * 7


def test_answering_connections_are_never_closed() -> None:
    found, each = filled(2, Activity.ANSWERING, Activity.ANSWERING)
    found.add(Connection(Activity.RECEIVING))
    assert not any(one.gone for one in each)
    assert len(found) == 3


def test_several_connections_are_closed_at_a_time() -> None:
    found, each = filled(64, *[Activity.RECEIVING] * 64)
    found.add(Connection(Activity.RECEIVING))
    assert [one.gone for one in each] == [True] * 4 + [False] * 60


def test_ended_connection_does_not_count() -> None:
    found, each = filled(2, Activity.RECEIVING, Activity.RECEIVING)
    found.discard(each[0])
    found.discard(each[0])
    found.add(Connection(Activity.RECEIVING))
    assert not any(one.gone for one in each)
    assert next(iter(found)) is each[1]


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
