"""`ThreadRoles` without a worker: which of two threads listens, waits for the device, or is parked."""

from collections.abc import Iterator

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
def roles(wakes: Wakes) -> Iterator[ThreadRoles]:
    """Roles of two threads, of which the test is the first."""
    roles = ThreadRoles(2, wakes)
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


def test_the_second_thread_is_parked_until_works_take_long(roles: ThreadRoles) -> None:
    _, entered = in_a_thread(roles.enter)
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


def test_once_works_are_short_one_idle_thread_is_parked_and_the_other_listens(roles: ThreadRoles) -> None:
    roles.expect(True)
    roles.enter()
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


def test_a_thread_that_listens_for_a_time_only_is_not_parked(roles: ThreadRoles) -> None:
    """The other may listen for a ticket that has come already."""
    roles.expect(True)
    roles.enter()
    roles.expect(False)
    assert roles.listens(timed=True)
    assert not parked(roles)


def test_stop_wakes_listening_and_parked_threads_and_ends_listening(roles: ThreadRoles, wakes: Wakes) -> None:
    _, entered = in_a_thread(roles.enter)
    roles.stop()
    entered.result(PATIENCE)
    assert wakes.count == 1
    assert not roles.listens()
    assert "stopped" in repr(roles)


def test_end_wakes_the_other_thread_and_returns_true_for_the_last(roles: ThreadRoles, wakes: Wakes) -> None:
    roles.stop()
    assert not roles.end()
    assert wakes.count == 2
    assert roles.end()
    assert wakes.count == 2


def test_the_second_thread_serves_alone_if_the_first_could_not_start(roles: ThreadRoles) -> None:
    _, entered = in_a_thread(roles.enter)
    assert not roles.end()  # The first could not be attached to its partition.
    entered.result(PATIENCE)
    assert roles.alone
    assert roles.listens()


def test_a_single_thread_is_never_parked(wakes: Wakes) -> None:
    roles = ThreadRoles(1, wakes)
    for long in (True, False, True):
        roles.expect(long)
        assert roles.alone
        assert roles.listens()
    roles.stop()
    assert not roles.listens()
    assert roles.end()
    assert wakes.count == 1
