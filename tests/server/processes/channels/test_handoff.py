"""Connections through a socket, from one process to another."""

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from server.processes.channels import handoff
from server.processes.channels.handoff import Handoff


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = handoff.pair()
    with one, other:
        yield one, other


def test_a_connection_arrives_with_its_name_and_the_bytes_read_ahead(ends: tuple[socket.socket, socket.socket]) -> None:
    data = os.urandom(1 << 20)
    ours, theirs = socket.socketpair()
    with theirs:
        sent = Handoff("acme", ours, handoff.memory_file(data))
        handoff.send(ends[0], sent)
        sent.close()
        received = handoff.receive(ends[1])
        assert received
        assert (received.name, received.data()) == ("acme", data)
        assert not received.connection.get_inheritable()
        theirs.sendall(b"more")
        assert received.connection.recv(9) == b"more"
        received.close()
        assert theirs.recv(1) == b""


def test_a_connection_without_bytes_read_ahead(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handoff.send(ends[0], Handoff("acme", ours))
        received = handoff.receive(ends[1])
        assert received
        assert (received.read_ahead, received.data()) == (None, b"")
        received.close()


def test_an_empty_socket_blocks_and_a_closed_one_returns_none(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(BlockingIOError):
        handoff.receive(ends[1])
    ends[0].close()
    assert handoff.receive(ends[1]) is None


def test_a_peer_that_closed_with_handoffs_unread_counts_as_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handoff.send(ends[0], Handoff("acme", ours))
        ends[1].close()
        assert handoff.receive(ends[0]) is None
        with pytest.raises(BrokenPipeError):
            handoff.send(ends[0], Handoff("acme", ours))


def test_a_full_socket_raises_blocking_io_error(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        given = sum(1 for _ in iter(lambda: fits(ends[0], Handoff("acme", ours)), False))
        assert 10 < given < 10_000
        for _ in range(given):
            received = handoff.receive(ends[1])
            assert received
            received.close()
        assert fits(ends[0], Handoff("acme", ours))


def fits(end: socket.socket, sent: Handoff) -> bool:
    try:
        handoff.send(end, sent)
    except BlockingIOError:
        return False
    return True


def test_without_descriptors_left_a_connection_is_closed_and_the_next_received(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = socket.socketpair()
    read_ahead = handoff.memory_file(b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with theirs:
        handoff.send(ends[0], Handoff("acme", ours, read_ahead))
        handoff.send(ends[0], Handoff("globex", ours))
        ours.close()
        os.close(read_ahead)
        most = os.dup(0)
        os.close(most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, hard))  # Room for one of the two.
        try:
            received = handoff.receive(ends[1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert received
        assert received.name == "globex"
        received.close()
        assert theirs.recv(1) == b""


def test_what_is_no_socket_is_closed_and_the_next_received(ends: tuple[socket.socket, socket.socket]) -> None:
    """A process that is not to be trusted may send any descriptor."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull, "rb") as file:
        opened = len(os.listdir("/proc/self/fd"))
        socket.send_fds(ends[0], [b"acme"], [file.fileno()])
        handoff.send(ends[0], Handoff("globex", ours))
        received = handoff.receive(ends[1])
        assert received
        assert received.name == "globex"
        received.close()
        assert len(os.listdir("/proc/self/fd")) == opened


def test_settings_that_another_process_made_have_no_effect(ends: tuple[socket.socket, socket.socket]) -> None:
    """It neither waits, nor takes the numbers of credentials for descriptors."""
    ours, theirs = socket.socketpair()
    ends[1].setblocking(True)
    with pytest.raises(BlockingIOError):
        handoff.receive(ends[1])
    with ours, theirs:
        opened = len(os.listdir("/proc/self/fd"))
        ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        handoff.send(ends[0], Handoff("acme", ours))
        with pytest.raises(BlockingIOError):
            handoff.receive(ends[1])
        assert len(os.listdir("/proc/self/fd")) == opened
