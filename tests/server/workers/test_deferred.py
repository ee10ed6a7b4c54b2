"""`DeferredTickets` without a worker: the order in which tickets are resumed, and the counts that are reported."""

from concurrent.futures import Future

import pytest

from server.link.messages import Ticket
from server.workers.deferred import DeferredTickets


class Bench:
    """Deferred tickets, with the counts that were reported and how often the worker was woken."""

    def __init__(self, *left: Ticket) -> None:
        self.reported: list[int] = []
        self.wakes = 0
        self.deferred = DeferredTickets(self.reported.append, self.wake)
        self.deferred.go_on(left)

    def wake(self) -> None:
        self.wakes += 1


def ticket(serial: int, *shape: int, model: str = "m") -> Ticket:
    return Ticket(serial, serial, model, (shape,), float("inf"), 64)


def test_a_ticket_is_deferred_behind_those_of_its_model_and_shapes_only() -> None:
    bench, prepared = Bench(), Future[None]()
    assert not bench.deferred.follow(ticket(1, 2))
    bench.deferred.put(ticket(1, 2), prepared)
    assert bench.deferred.follow(ticket(2, 2))
    assert not bench.deferred.follow(ticket(3, 3))
    assert not bench.deferred.follow(ticket(4, 2, model="n"))
    assert bench.reported == [1, 2]


def test_ready_tickets_are_resumed_in_order_and_later_ones_follow() -> None:
    bench, prepared = Bench(), Future[None]()
    bench.deferred.put(ticket(1, 2), prepared)
    bench.deferred.follow(ticket(2, 2))
    prepared.set_result(None)
    assert bench.wakes == 1
    assert bench.deferred.collect() == []
    assert bench.deferred.follow(ticket(3, 2))
    assert [bench.deferred.take().serial for _ in range(3)] == [1, 2, 3]
    assert bench.reported == [1, 2, 3, 2, 1, 0]


def test_a_ready_ticket_deferred_again_keeps_its_place_before_the_others() -> None:
    """The executor may have forgotten its shapes meanwhile."""
    bench, again = Bench(ticket(1, 2), ticket(2, 2)), Future[None]()
    first = bench.deferred.take()
    assert not bench.deferred.follow(first, again=True)
    bench.deferred.put(first, again)
    assert bench.deferred.follow(bench.deferred.take(), again=True)
    again.set_result(None)
    bench.deferred.collect()
    assert [bench.deferred.take().serial for _ in range(2)] == [1, 2]


def test_tickets_left_by_another_worker_are_ready_and_already_counted() -> None:
    bench = Bench(ticket(1, 2), ticket(2, 3))
    assert (bench.deferred.count, bench.reported) == (2, [])
    assert bench.deferred.take().serial == 1
    assert bench.reported == [1]


@pytest.mark.parametrize("cancel", [False, True])
def test_tickets_whose_preparation_failed_are_returned_with_the_error(cancel: bool) -> None:
    bench, prepared = Bench(), Future[None]()
    bench.deferred.put(ticket(1, 2), prepared)
    bench.deferred.put(ticket(2, 3), Future())
    if cancel:
        prepared.cancel()
    else:
        prepared.set_exception(ValueError("no"))
    ((failed, error),) = bench.deferred.collect()
    assert failed.serial == 1
    assert cancel or str(error) == "no"
    assert bench.deferred.count == 1


def test_drop_removes_ready_and_waiting_tickets() -> None:
    bench, prepared = Bench(ticket(1, 3), ticket(2, 3)), Future[None]()
    bench.deferred.put(ticket(3, 2), prepared)
    bench.deferred.follow(ticket(4, 2))
    dropped = bench.deferred.drop(lambda each: each.serial in (2, 3))
    assert [each.serial for each in dropped] == [2, 3]
    prepared.set_result(None)
    bench.deferred.collect()
    assert [bench.deferred.take().serial for _ in range(2)] == [1, 4]
    assert bench.reported[-1] == 0


def test_shapes_whose_tickets_were_all_dropped_are_prepared_again() -> None:
    bench, first, second = Bench(), Future[None](), Future[None]()
    bench.deferred.put(ticket(1, 2), first)
    bench.deferred.drop(lambda _: True)
    assert not bench.deferred.follow(ticket(2, 2))
    bench.deferred.put(ticket(2, 2), second)
    second.set_result(None)
    bench.deferred.collect()
    assert bench.deferred.take().serial == 2


def test_close_returns_all_tickets_in_order_and_wakes_no_worker_afterwards() -> None:
    bench, prepared = Bench(ticket(3, 3)), Future[None]()
    bench.deferred.put(ticket(1, 2), prepared)
    bench.deferred.follow(ticket(2, 2))
    assert [each.serial for each in bench.deferred.close()] == [1, 2, 3]
    prepared.set_result(None)
    bench.deferred.wake()
    assert bench.wakes == 0
    assert bench.reported == [2, 3]
