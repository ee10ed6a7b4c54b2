"""Which connections give way when there are too many."""

import resource

from uvicorn.server import ServerState

from server.http.connection_limits import Connections, Standing, allowed, connections


class Connection:
    """One of this standing."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self.gone = False

    def standing(self) -> Standing:
        return self._standing

    def give_way(self) -> None:
        self.gone = True


def filled(most: int, *standings: Standing) -> tuple[Connections, list[Connection]]:
    """So many may be, and these are, in this order."""
    found, each = Connections(most), [Connection(standing) for standing in standings]
    for one in each:
        found.add(one)
    return found, each


def test_the_oldest_that_is_unfinished_gives_way() -> None:
    unfinished = [Standing.UNFINISHED] * 2
    found, each = filled(5, Standing.IDLE, Standing.ANSWERED, *unfinished, Standing.IDLE)
    found.add(Connection(Standing.UNFINISHED))
    assert [one.gone for one in each] == [False, False, True, False, False]
    assert len(found) == 5
    assert repr(found) == "<Connections 5 of 5>"


def test_then_the_oldest_that_waits_for_another_request() -> None:
    found, each = filled(3, Standing.ANSWERED, Standing.IDLE, Standing.IDLE)
    found.add(Connection(Standing.ANSWERED))
    assert [one.gone for one in each] == [False, True, False]
    assert each[1] not in found


def test_what_came_last_stays_before_it_was_read_though_others_wait_for_another_request() -> None:
    found, each = filled(8, *[Standing.IDLE] * 6, Standing.UNFINISHED, Standing.UNFINISHED)
    found.add(Connection(Standing.UNFINISHED))
    assert [one.gone for one in each] == [True] + [False] * 7


def test_what_is_being_answered_stays_though_there_are_more() -> None:
    found, each = filled(2, Standing.ANSWERED, Standing.ANSWERED)
    found.add(Connection(Standing.UNFINISHED))
    assert not any(one.gone for one in each)
    assert len(found) == 3


def test_several_of_many_give_way_at_once() -> None:
    found, each = filled(64, *[Standing.UNFINISHED] * 64)
    found.add(Connection(Standing.UNFINISHED))
    assert [one.gone for one in each] == [True] * 4 + [False] * 60


def test_a_connection_that_ended_is_none() -> None:
    found, each = filled(2, Standing.UNFINISHED, Standing.UNFINISHED)
    found.discard(each[0])
    found.discard(each[0])
    found.add(Connection(Standing.UNFINISHED))
    assert not any(one.gone for one in each)
    assert next(iter(found)) is each[1]


def test_a_server_has_as_many_as_its_descriptors_are_for() -> None:
    state = ServerState()
    assert connections(state) is connections(state) is state.connections
    assert allowed() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
    assert repr(connections(state)) == f"<Connections 0 of {allowed()}>"
