"""Connections through a socket, from one process to another."""

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from server.processes import handoff
from server.processes.handoff import Passed


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = handoff.pair()
    with one, other:
        yield one, other


def test_a_connection_arrives_with_its_name_and_what_was_read_of_it(ends: tuple[socket.socket, socket.socket]) -> None:
    data = os.urandom(1 << 20)
    ours, theirs = socket.socketpair()
    with theirs:
        passed = Passed("acme", ours, handoff.write_down(data))
        handoff.give(ends[0], passed)
        passed.close()
        taken = handoff.take(ends[1])
        assert taken
        assert (taken.name, taken.data()) == ("acme", data)
        assert not taken.connection.get_inheritable()
        theirs.sendall(b"more")
        assert taken.connection.recv(9) == b"more"
        taken.close()
        assert theirs.recv(1) == b""


def test_most_connections_come_with_nothing_read(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handoff.give(ends[0], Passed("acme", ours))
        taken = handoff.take(ends[1])
        assert taken
        assert (taken.ahead, taken.data()) == (None, b"")
        taken.close()


def test_nothing_there_is_told_from_nobody_there(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(BlockingIOError):
        handoff.take(ends[1])
    ends[0].close()
    assert handoff.take(ends[1]) is None


def test_an_end_that_left_with_connections_unread_is_nobody(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handoff.give(ends[0], Passed("acme", ours))
        ends[1].close()
        assert handoff.take(ends[0]) is None
        with pytest.raises(BrokenPipeError):
            handoff.give(ends[0], Passed("acme", ours))


def test_a_full_door_says_so(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        given = sum(1 for _ in iter(lambda: fits(ends[0], Passed("acme", ours)), False))
        assert 10 < given < 10_000
        for _ in range(given):
            taken = handoff.take(ends[1])
            assert taken
            taken.close()
        assert fits(ends[0], Passed("acme", ours))


def fits(end: socket.socket, passed: Passed) -> bool:
    try:
        handoff.give(end, passed)
    except BlockingIOError:
        return False
    return True


def test_without_descriptors_left_a_connection_is_hung_up_on_and_the_door_stays_open(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = socket.socketpair()
    ahead = handoff.write_down(b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with theirs:
        handoff.give(ends[0], Passed("acme", ours, ahead))
        handoff.give(ends[0], Passed("globex", ours))
        ours.close()
        os.close(ahead)
        most = os.dup(0)
        os.close(most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, hard))  # Room for one of the two.
        try:
            taken = handoff.take(ends[1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert taken
        assert taken.name == "globex"
        taken.close()
        assert theirs.recv(1) == b""
