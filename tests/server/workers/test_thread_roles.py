"""`ThreadRoles` without a worker: which of two threads listens, waits for the device, or is parked."""

from collections.abc import Iterator
from threading import Semaphore

import pytest

from server.workers.session import ThreadRoles
from tests.contract import in_a_thread

PATIENCE = 30


class Wakes:
    """Counts how often a listening thread was woken."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def wakes() -> Wakes:
    return Wakes()


@pytest.fixture
def parking() -> Semaphore:
    """Where the second thread is parked."""
    return Semaphore(0)


@pytest.fixture
def roles(parking: Semaphore, wakes: Wakes) -> Iterator[ThreadRoles]:
    """Roles of two threads, of which the test is the first."""
    roles = ThreadRoles(parking, wakes)
    yield roles
    roles.stop()


def parked(roles: ThreadRoles) -> bool:
    return "one is parked" in repr(roles)


def test_one_thread_waits_at_a_time(roles: ThreadRoles) -> None:
    assert roles.waits()
    assert not roles.waits()
    assert "one waits" in repr(roles)
    roles.done()
    assert roles.waits()


def test_the_second_thread_is_parked_until_works_take_long(roles: ThreadRoles, parking: Semaphore) -> None:
    _, entered = in_a_thread(parking.acquire)
    assert parked(roles)
    assert roles.alone
    roles.expect(False)
    assert not entered.done()
    roles.expect(True)
    entered.result(PATIENCE)
    assert not roles.alone
    assert not parked(roles)


def test_both_threads_listen_while_works_take_long(roles: ThreadRoles) -> None:
    roles.expect(True)
    assert roles.listens()
    assert roles.listens()
    assert not parked(roles)


def test_once_works_are_short_one_idle_thread_is_parked_and_the_other_listens(roles: ThreadRoles, parking: Semaphore) -> None:
    roles.expect(True)
    parking.acquire()
    assert roles.waits()
    roles.expect(False)
    assert not roles.alone  # The other may be listening yet: this one must not look for tickets.
    _, listens = in_a_thread(roles.listens)
    while not parked(roles):
        pass
    assert roles.alone
    assert roles.listens()
    roles.expect(True)
    assert listens.result(PATIENCE)


def test_a_thread_that_listens_for_a_time_only_is_not_parked(roles: ThreadRoles, parking: Semaphore) -> None:
    """The other may listen for a ticket that has come already."""
    roles.expect(True)
    parking.acquire()
    roles.expect(False)
    assert roles.listens(timed=True)
    assert not parked(roles)


def test_stop_wakes_a_listening_thread_and_ends_listening(roles: ThreadRoles, wakes: Wakes) -> None:
    roles.stop()
    assert wakes.count == 1
    assert not roles.listens()
    assert "stopped" in repr(roles)


def test_end_wakes_the_other_thread_and_returns_true_for_the_last(roles: ThreadRoles, wakes: Wakes) -> None:
    roles.expect(True)
    roles.stop()
    assert not roles.end()
    assert wakes.count == 2
    assert roles.end()
    assert wakes.count == 2


@pytest.mark.parametrize("parked_before", [False, True])
def test_a_thread_that_is_parked_when_all_are_to_end_is_not_waited_for(
    roles: ThreadRoles, parking: Semaphore, wakes: Wakes, parked_before: bool
) -> None:
    if parked_before:
        roles.expect(True)
        parking.acquire()
        roles.expect(False)
        _, listens = in_a_thread(roles.listens)
        while not parked(roles):
            pass
    roles.stop()
    roles.expect(True)
    assert not parking.acquire(blocking=False)
    assert roles.end()
    assert wakes.count == 1
    if parked_before:
        assert not listens.done()
        parking.release()
        assert not listens.result(PATIENCE)
        assert not roles.end()
        assert wakes.count == 1


def test_a_single_thread_is_never_parked(wakes: Wakes) -> None:
    roles = ThreadRoles(None, wakes)
    for long in (True, False, True):
        roles.expect(long)
        assert roles.alone
        assert roles.listens()
    roles.stop()
    assert not roles.listens()
    assert roles.end()
    assert wakes.count == 1
