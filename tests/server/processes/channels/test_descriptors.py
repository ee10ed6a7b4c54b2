"""Descriptors that go from one process to another, beside messages that name them."""

import gc
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from server.errors import Unavailable
from server.processes.channels import descriptors
from server.processes.channels.descriptors import MOST, DescriptorReceiver, DescriptorSender

Ends = tuple[DescriptorSender, DescriptorReceiver]


@pytest.fixture(scope="module", autouse=True)
def collected() -> None:
    """No object of another module's tests has a descriptor."""
    gc.collect()


def opened() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def ends() -> Iterator[Ends]:
    before = opened()
    sender, end = descriptors.pair()
    receiver = DescriptorReceiver(end)
    yield sender, receiver
    sender.close()
    receiver.close()
    assert opened() == before, "none is left open"


def send(sender: DescriptorSender, *contents: bytes) -> int:
    """Send a memory file for each of these contents."""
    made = [os.memfd_create("test") for _ in contents]
    for descriptor, content in zip(made, contents, strict=True):
        os.write(descriptor, content)
    try:
        return sender.send(made)
    finally:
        for descriptor in made:
            os.close(descriptor)


def take(receiver: DescriptorReceiver, number: int, count: int) -> list[bytes]:
    """The contents of what arrives."""
    found = []
    for descriptor in receiver.take(number, count):
        assert not os.get_inheritable(descriptor)
        found.append(os.pread(descriptor, 99, 0))
        os.close(descriptor)
    return found


def test_descriptors_arrive_in_order_by_their_numbers(ends: Ends) -> None:
    sender, receiver = ends
    first, second = send(sender, b"a", b"b"), send(sender, b"c")
    assert first != second
    assert take(receiver, first, 2) == [b"a", b"b"]
    assert take(receiver, second, 1) == [b"c"]


def test_descriptors_whose_message_never_came_are_closed(ends: Ends) -> None:
    sender, receiver = ends
    send(sender, b"lost", b"lost")
    before = opened()
    assert take(receiver, send(sender, b"found"), 1) == [b"found"]
    assert opened() == before


def test_descriptors_that_are_never_taken_end_with_the_sockets() -> None:
    before = opened()
    sender, theirs = descriptors.pair()
    reading, writing = os.pipe()
    sender.send([writing])
    os.close(writing)
    sender.close()
    theirs.close()
    assert os.read(reading, 1) == b"", "the last copy of the other end is closed"
    os.close(reading)
    assert opened() == before


@pytest.mark.parametrize("expected", [1, 3])
def test_another_count_than_expected_is_refused_and_closed(ends: Ends, expected: int) -> None:
    sender, receiver = ends
    before = opened()
    number = send(sender, b"a", b"b")
    with pytest.raises(OSError, match=f"2 descriptors came with number {number}; expected {expected} with {number}"):
        receiver.take(number, expected)
    assert opened() == before


def test_a_number_that_was_passed_is_refused(ends: Ends) -> None:
    sender, receiver = ends
    first, second = send(sender, b"a"), send(sender, b"b")
    assert take(receiver, second, 1) == [b"b"]
    with pytest.raises(BlockingIOError):
        receiver.take(first, 1)
    third = send(sender, b"c")
    with pytest.raises(OSError, match=f"number {third}; expected 1 with {second}"):
        receiver.take(second, 1)


def test_a_process_without_room_for_descriptors_gets_an_error_and_keeps_none(ends: Ends) -> None:
    sender, receiver = ends
    number = send(sender, b"a", b"b", b"c")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    before = opened()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
    try:
        with pytest.raises(OSError, match="expected 3"):
            receiver.take(number, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert opened() == before


@pytest.mark.parametrize("data", [b"", b"short", b"a longer text than a number"])
def test_what_has_no_number_is_refused_and_closed(data: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver = DescriptorReceiver(theirs)
    before = opened()
    if data:
        socket.send_fds(ours, [data], [0, 1])
    else:
        ours.close()
        before -= 1
    with pytest.raises(OSError, match=r"a number of \d bytes|descriptors came with number"):
        receiver.take(1, 2)
    assert opened() == before
    receiver.close()
    ours.close()


def test_the_receiving_process_can_send_nothing() -> None:
    sender, end = descriptors.pair()
    with closing(sender), end:
        with pytest.raises(BrokenPipeError):
            end.send(b"hello")
        with pytest.raises(BrokenPipeError):
            socket.send_fds(end, [b"hello"], [0])


def test_sending_to_a_process_that_is_gone_or_takes_nothing_is_unavailable(ends: Ends) -> None:
    sender, receiver = ends
    with pytest.raises(Unavailable, match="the other process takes no descriptors"):
        list(map(sender.send, [[0]] * 100_000))
    receiver.close()
    with pytest.raises(Unavailable, match="the other process takes no descriptors"):
        sender.send([0])


@pytest.mark.parametrize("count", [0, MOST + 1])
def test_none_and_too_many_cannot_be_sent(ends: Ends, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} descriptors; from 1 to {MOST}"):
        ends[0].send([0] * count)


def test_as_many_as_can_be_sent_arrive(ends: Ends) -> None:
    sender, receiver = ends
    contents = [bytes([number]) for number in range(MOST)]
    assert take(receiver, send(sender, *contents), MOST) == contents
