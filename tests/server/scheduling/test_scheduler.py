import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines import Signature
from server.errors import QueueFull
from server.link.messages import Ticket
from server.scheduling.batching import batchable
from server.scheduling.queue_policy import Batching
from server.scheduling.scheduler import Scheduler, SchedulerStatistics

FOREVER = float("inf")


def ticket(slot: int) -> Ticket:
    return Ticket(slot, 1, "m/1#1", ((1,),), FOREVER, 64)


def filled(scheduler: Scheduler, *slots: int) -> Scheduler:
    """The scheduler, with these slots waiting, whether or not its limit allows them."""
    for slot in slots:
        scheduler.add(ticket(slot))
    return scheduler


def taken(scheduler: Scheduler) -> list[int]:
    return [ticket.slot for ticket in scheduler.take()]


def test_one_more_than_the_limit_is_refused_and_not_queued() -> None:
    scheduler = filled(Scheduler(limit=2, in_flight_limit=1), 0)
    assert taken(scheduler) == [0]
    filled(scheduler, 1, 2)
    with pytest.raises(QueueFull, match=r"^Exceeds maximum queue size: 2 requests may wait, and as many do \(limit\)$"):
        scheduler.check()
    with pytest.raises(QueueFull):
        scheduler.check()
    assert scheduler.statistics() == SchedulerStatistics(waiting=2, in_flight=1, limit=2, in_flight_limit=1)


def test_finish_raises_for_a_slot_that_is_not_in_flight() -> None:
    scheduler = filled(Scheduler(limit=2, in_flight_limit=1), 0)
    with pytest.raises(KeyError):
        scheduler.finish(0, 0, failed=True)


def test_an_in_flight_limit_below_what_is_in_flight_launches_nothing_and_loses_nothing() -> None:
    scheduler = ended(Scheduler(limit=8, in_flight_limit=1, horizon=300), *[1] * 50)
    assert taken(filled(scheduler, 0, 1, 2)) == [0, 1, 2]
    filled(scheduler, 3, 4)
    scheduler.finish(0, 300)  # So long a work that no more are launched ahead.
    assert taken(scheduler) == []
    scheduler.finish(1, 0, failed=True)
    assert taken(scheduler) == []
    scheduler.finish(2, 0, failed=True)
    assert taken(scheduler) == [3]


def ended(scheduler: Scheduler, *took: int | None) -> Scheduler:
    """The scheduler after works that ran one after another, each for so many nanoseconds."""
    for duration in took:
        filled(scheduler, 0).take()
        scheduler.finish(0, duration or 0, failed=duration is None)
    return scheduler


def launched(scheduler: Scheduler) -> int:
    """How many of 50 waiting tickets are launched at once."""
    return len(filled(scheduler, *range(50)).take())


def test_works_of_unknown_duration_are_launched_up_to_the_in_flight_limit() -> None:
    assert launched(Scheduler(limit=99, in_flight_limit=2, horizon=1000)) == 2
    assert launched(ended(Scheduler(limit=99, in_flight_limit=2, horizon=1000), None, None)) == 2


def joinable(scheduler: Scheduler, *slots: int) -> Scheduler:
    for slot in slots:
        scheduler.add(ticket(slot), 0, batchable(Batching(Signature((), (), 3), 3), ticket(slot), 0.0))
    return scheduler


def test_a_batch_counts_as_one_in_flight_until_it_ends() -> None:
    scheduler = joinable(Scheduler(limit=8, in_flight_limit=1), 0, 1, 2, 3)
    choice = scheduler.choose(0.0)
    assert [each[2].slot for each in choice.members] == [0, 1, 2]
    scheduler.launch(choice.members, 7)
    assert scheduler.in_flight == {7}
    assert (scheduler.batchable, scheduler.statistics().waiting) == (1, 1)
    assert scheduler.choose(0.0).members == ()
    scheduler.finish(7, 0, failed=True)
    assert [each[2].slot for each in scheduler.choose(0.0).members] == [3]


def held_back(scheduler: Scheduler, running: int) -> bool:
    """Whether a batch that could grow is held back behind so many works in flight."""
    filled(scheduler, *range(running))
    assert len(scheduler.take()) == running
    return not joinable(scheduler, 50).choose(0.0).members


def test_a_batch_that_could_grow_is_held_back_at_the_in_flight_limit() -> None:
    assert not held_back(Scheduler(limit=8, in_flight_limit=3), 2)
    assert held_back(Scheduler(limit=8, in_flight_limit=3), 3)


def test_a_batch_is_held_back_behind_one_work_if_works_are_short_or_on_host_cores() -> None:
    assert held_back(ended(Scheduler(limit=99, in_flight_limit=3, horizon=1000), *[100] * 40), 1)
    assert not held_back(ended(Scheduler(limit=99, in_flight_limit=3, horizon=1000), *[300] * 40), 1)
    hosted = Scheduler(limit=8, in_flight_limit=3)
    hosted.on_host_cores = True
    assert held_back(hosted, 1)


def test_requests_put_back_keep_their_places_and_are_launched_alone() -> None:
    scheduler = joinable(Scheduler(limit=2, in_flight_limit=1), 0, 1, 2)
    members = scheduler.choose(0.0).members
    scheduler.launch(members, 7)
    filled(scheduler, 3, 4)
    scheduler.finish(7, 0, failed=True)
    scheduler.put_back(members)
    assert scheduler.batchable == 0
    order = []
    for _ in range(5):
        (slot,) = taken(scheduler)
        scheduler.finish(slot, 0, failed=True)
        order.append(slot)
    assert order == [0, 1, 2, 3, 4]
    assert scheduler.idle


def test_a_withdrawn_request_is_not_batched() -> None:
    scheduler = joinable(Scheduler(limit=8, in_flight_limit=1), 0, 1)
    assert scheduler.withdraw(0)
    assert not scheduler.idle
    assert [each[2].slot for each in scheduler.choose(0.0).members] == [1]
    assert scheduler.batchable == 1
    assert scheduler.withdraw(1)
    assert scheduler.batchable == 0
    assert scheduler.choose(0.0).members == ()


class Model(RuleBasedStateMachine):
    """Compares the scheduler with a model that sorts a plain list."""

    @initialize(limit=st.integers(0, 4), in_flight_limit=st.integers(1, 3))
    def begin(self, limit: int, in_flight_limit: int) -> None:
        self.scheduler = Scheduler(limit, in_flight_limit)
        self.waiting: list[tuple[float, int]] = []
        self.in_flight: set[int] = set()
        self.next_slot = 0
        self.ended: set[int] = set()

    def free(self) -> int:
        return self.scheduler.in_flight_limit - len(self.in_flight)

    @rule(priority=st.sampled_from([0, 0, 1, 2, 2**64 - 1]))
    def add(self, priority: int) -> None:
        if len(self.waiting) >= self.scheduler.limit + self.free():
            with pytest.raises(QueueFull):
                self.scheduler.check()
            return
        self.scheduler.check()
        self.scheduler.add(ticket(self.next_slot), priority)
        self.waiting.append((priority or FOREVER, self.next_slot))  # Slots are numbered as they come.
        self.next_slot += 1

    @rule()
    def take(self) -> None:
        self.waiting.sort()
        expected = [slot for _, slot in self.waiting[: self.free()]]
        assert taken(self.scheduler) == expected
        self.waiting = self.waiting[len(expected) :]
        self.in_flight |= set(expected)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.scheduler.finish(slot, 0, failed=True)
        self.in_flight.remove(slot)
        self.ended.add(slot)

    @rule(slot=st.integers(0, 12))
    def withdraw(self, slot: int) -> None:
        waits = slot in [waiting for _, waiting in self.waiting]
        assert self.scheduler.withdraw(slot) == waits
        self.waiting = [entry for entry in self.waiting if entry[1] != slot]
        self.ended |= {slot} if waits else set()

    @invariant()
    def in_flight_and_queue_limits_hold(self) -> None:
        scheduler = self.scheduler.statistics()
        assert scheduler.in_flight <= scheduler.in_flight_limit
        assert scheduler.waiting <= scheduler.limit + self.free()

    @invariant()
    def no_ticket_is_lost_or_duplicated(self) -> None:
        assert self.scheduler.in_flight == self.in_flight
        assert self.scheduler.statistics().waiting == len(self.waiting)
        known = [slot for _, slot in self.waiting] + list(self.in_flight) + list(self.ended)
        assert sorted(known) == list(range(self.next_slot))


TestAgainstAModel = Model.TestCase
