"""What is put deferred, by itself: in which order it goes on, and what it tells."""

from concurrent.futures import Future

import pytest

from server.link.messages import Ticket
from server.workers.deferred import DeferredTickets


class Bench:
    """What is deferred, and what was told of it."""

    def __init__(self, *left: Ticket) -> None:
        self.told: list[int] = []
        self.wakes = 0
        self.deferred = DeferredTickets(left, self.told.append, self.wake)

    def wake(self) -> None:
        self.wakes += 1


def ticket(serial: int, *shape: int, model: str = "m") -> Ticket:
    return Ticket(serial, serial, model, (shape,), float("inf"), 64)


def test_a_ticket_follows_those_of_its_model_and_shapes_only() -> None:
    bench, prepared = Bench(), Future[None]()
    assert not bench.deferred.follow(ticket(1, 2))
    bench.deferred.put(ticket(1, 2), prepared)
    assert bench.deferred.follow(ticket(2, 2))
    assert not bench.deferred.follow(ticket(3, 3))
    assert not bench.deferred.follow(ticket(4, 2, model="n"))
    assert bench.told == [1, 2]
    assert repr(bench.deferred) == "<DeferredTickets 2 tickets of 1 shapes, 0 of them ready>"


def test_those_that_are_ready_go_on_in_their_order_and_what_comes_meanwhile_follows() -> None:
    bench, prepared = Bench(), Future[None]()
    bench.deferred.put(ticket(1, 2), prepared)
    bench.deferred.follow(ticket(2, 2))
    prepared.set_result(None)
    assert bench.wakes == 1
    assert bench.deferred.collect() == []
    assert bench.deferred.follow(ticket(3, 2))
    assert [bench.deferred.take().serial for _ in range(3)] == [1, 2, 3]
    assert bench.told == [1, 2, 3, 2, 1, 0]


def test_one_that_was_ready_and_has_to_wait_again_is_followed_by_the_others() -> None:
    """The executor may have forgotten its shapes meanwhile."""
    bench, again = Bench(ticket(1, 2), ticket(2, 2)), Future[None]()
    first = bench.deferred.take()
    assert not bench.deferred.follow(first, again=True)
    bench.deferred.put(first, again)
    assert bench.deferred.follow(bench.deferred.take(), again=True)
    again.set_result(None)
    bench.deferred.collect()
    assert [bench.deferred.take().serial for _ in range(2)] == [1, 2]


def test_what_another_worker_left_is_ready_and_counted_already() -> None:
    bench = Bench(ticket(1, 2), ticket(2, 3))
    assert (bench.deferred.count, bench.told) == (2, [])
    assert bench.deferred.take().serial == 1
    assert bench.told == [1]


@pytest.mark.parametrize("cancel", [False, True])
def test_those_that_cannot_be_prepared_are_returned_with_the_reason(cancel: bool) -> None:
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


def test_what_is_dropped_is_gone_wherever_it_was() -> None:
    bench, prepared = Bench(ticket(1, 3), ticket(2, 3)), Future[None]()
    bench.deferred.put(ticket(3, 2), prepared)
    bench.deferred.follow(ticket(4, 2))
    dropped = bench.deferred.drop(lambda each: each.serial in (2, 3))
    assert [each.serial for each in dropped] == [2, 3]
    prepared.set_result(None)
    bench.deferred.collect()
    assert [bench.deferred.take().serial for _ in range(2)] == [1, 4]
    assert bench.told[-1] == 0


def test_shapes_of_which_all_were_dropped_begin_anew() -> None:
    bench, first, second = Bench(), Future[None](), Future[None]()
    bench.deferred.put(ticket(1, 2), first)
    bench.deferred.drop(lambda _: True)
    assert not bench.deferred.follow(ticket(2, 2))
    bench.deferred.put(ticket(2, 2), second)
    second.set_result(None)
    bench.deferred.collect()
    assert bench.deferred.take().serial == 2


def test_after_closing_nobody_is_woken_and_all_are_returned_as_they_came() -> None:
    bench, prepared = Bench(ticket(3, 3)), Future[None]()
    bench.deferred.put(ticket(1, 2), prepared)
    bench.deferred.follow(ticket(2, 2))
    assert [each.serial for each in bench.deferred.close()] == [1, 2, 3]
    prepared.set_result(None)
    bench.deferred.wake()
    assert bench.wakes == 0
    assert bench.told == [2, 3]
