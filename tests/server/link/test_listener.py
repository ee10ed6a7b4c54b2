"""Who reads tickets waits and is woken whatever the other process does to the eventfd that both share, and whenever."""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from threading import Event

import pytest

from server.link import listener, ring
from server.link.messages import Malformed
from server.link.ring import Tickets
from tests.contract import in_a_thread
from tests.memory import MEMORY

SLOTS = 4
PATIENCE = 30
FULL = (1 << 64) - 2
"""The highest count of an eventfd: writing more blocks."""


@pytest.fixture
def tickets() -> Iterator[Tickets]:
    """The reading end of a link between two processes."""
    descriptors = ring.create(SLOTS, MEMORY)
    try:
        found = ring.attach(descriptors).tickets
        found.open()
        yield found
    finally:
        descriptors.close()


def empty(event: int) -> None:
    """As the other process may at any time."""
    os.set_blocking(event, False)
    with suppress(BlockingIOError):
        os.eventfd_read(event)
    os.set_blocking(event, True)


def fill(event: int) -> None:
    """Count as far as the descriptor goes, whatever it counts now."""
    empty(event)
    os.eventfd_write(event, FULL)


def test_waking_writes_nothing_that_the_other_process_can_hold_up(tickets: Tickets, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills the descriptor after each look and before each write of this process."""
    write = os.eventfd_write

    def filled(event: int, count: int) -> None:
        monkeypatch.setattr(os, "eventfd_write", write)
        fill(tickets.event)
        write(event, count)

    monkeypatch.setattr(os, "eventfd_write", filled)
    _, woken = in_a_thread(tickets.wake)
    try:
        woken.result(PATIENCE)
        with pytest.raises(Malformed):
            tickets.add_unread(tickets.listen())
    finally:
        empty(tickets.event)


def test_a_count_that_the_other_process_takes_back_does_not_hold_a_reader(tickets: Tickets) -> None:
    os.eventfd_write(tickets.event, 1)
    os.eventfd_read(tickets.event)
    assert tickets.poll() is None
    _, came = in_a_thread(tickets.listen)
    tickets.wake()
    assert came.result(PATIENCE) == 0


@pytest.mark.parametrize("blocks", [True, False])
def test_a_reader_waits_and_reads_whether_the_descriptor_blocks_or_not(tickets: Tickets, blocks: bool) -> None:
    os.set_blocking(tickets.event, blocks)
    thread, came = in_a_thread(tickets.listen)
    os.eventfd_write(tickets.event, 3)
    assert came.result(PATIENCE) == 3
    thread.join()
    _, came = in_a_thread(tickets.listen)
    assert not came.done()
    tickets.wake()
    assert came.result(PATIENCE) == 0


def test_one_reader_of_two_takes_a_count_and_the_other_goes_on_waiting(tickets: Tickets) -> None:
    first = Event()

    def listen() -> int:
        count = tickets.listen()
        first.set()
        return count

    listening = [in_a_thread(listen)[1] for _ in range(2)]
    os.eventfd_write(tickets.event, 2)
    assert first.wait(PATIENCE)
    tickets.wake()
    assert sorted(each.result(PATIENCE) for each in listening) == [0, 2]


@pytest.mark.parametrize("why", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_on_a_kernel_that_cannot_read_it_without_blocking_it_is_looked_at_first(
    why: int, tickets: Tickets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 5.8."""
    monkeypatch.setattr(listener, "_read", lambda event, count: why)
    assert tickets.poll() is None
    os.eventfd_write(tickets.event, 2)
    assert tickets.listen() == 2


def test_its_own_descriptors_are_closed_with_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    descriptors = ring.create(SLOTS, MEMORY)
    for _ in range(3):
        link = ring.attach(descriptors)
        link.tickets.open()
    descriptors.close()
    del link
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("count", [SLOTS + 1, 1 << 32, FULL])
def test_a_count_that_no_tickets_explain_is_malformed(tickets: Tickets, count: int) -> None:
    """Otherwise a process could have its reader turn without end."""
    os.eventfd_write(tickets.event, count)
    with pytest.raises(Malformed):
        tickets.add_unread(tickets.listen())
