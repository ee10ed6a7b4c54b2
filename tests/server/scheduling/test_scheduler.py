import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines import Signature
from server.errors import QueueFull
from server.link.messages import Ticket
from server.scheduling.batching import Batching
from server.scheduling.scheduler import Scheduler, SchedulerStatistics

FOREVER = float("inf")


def ticket(slot: int) -> Ticket:
    return Ticket(slot, 1, "m/1#1", ((1,),), FOREVER, 64)


def filled(scheduler: Scheduler, *slots: int) -> Scheduler:
    """A scheduler with these slots waiting, whatever room there is."""
    for slot in slots:
        scheduler.add(ticket(slot))
    return scheduler


def taken(scheduler: Scheduler) -> list[int]:
    return [ticket.slot for ticket in scheduler.take()]


def test_tickets_go_in_the_order_they_came_as_far_as_the_credits_reach() -> None:
    scheduler = filled(Scheduler(limit=8, in_flight_limit=2), 5, 3, 4)
    assert taken(scheduler) == [5, 3]
    assert taken(scheduler) == []
    assert scheduler.in_flight == {5, 3}


def test_a_ticket_that_ends_makes_room_for_the_next() -> None:
    scheduler = filled(Scheduler(limit=8, in_flight_limit=1), 1, 2)
    assert taken(scheduler) == [1]
    scheduler.finish(1)
    assert taken(scheduler) == [2]


def test_what_is_taken_is_what_was_added() -> None:
    scheduler = Scheduler(limit=1, in_flight_limit=1)
    scheduler.add(Ticket(7, 3, "m/2#3", ((2, 3),), 1.5, 64))
    assert scheduler.take() == [Ticket(7, 3, "m/2#3", ((2, 3),), 1.5, 64)]


def test_the_smallest_priority_goes_first_and_the_default_last() -> None:
    scheduler = Scheduler(limit=8, in_flight_limit=8)
    for slot, priority in enumerate([0, 2, 2**64 - 1, 1, 2, 0]):
        scheduler.add(ticket(slot), priority)
    assert taken(scheduler) == [3, 1, 4, 2, 0, 5]


def test_one_more_than_the_limit_is_refused_and_not_queued() -> None:
    scheduler = filled(Scheduler(limit=2, in_flight_limit=1), 0)
    assert taken(scheduler) == [0]
    filled(scheduler, 1, 2)
    with pytest.raises(QueueFull, match=r"^Exceeds maximum queue size: 2 requests may wait, and as many do \(limit\)$"):
        scheduler.check()
    with pytest.raises(QueueFull):
        scheduler.check()
    assert scheduler.statistics() == SchedulerStatistics(waiting=2, in_flight=1, limit=2, in_flight_limit=1)


def test_a_free_credit_lets_one_more_in_and_only_one() -> None:
    scheduler = filled(Scheduler(limit=1, in_flight_limit=1), 0, 1)
    with pytest.raises(QueueFull):
        scheduler.check()
    assert taken(scheduler) == [0]


def test_a_queue_of_limit_0_still_uses_its_credits() -> None:
    scheduler = filled(Scheduler(limit=0, in_flight_limit=1), 0)
    assert taken(scheduler) == [0]
    with pytest.raises(QueueFull):
        scheduler.check()


def test_a_ticket_withdrawn_never_goes_and_frees_its_place() -> None:
    scheduler = Scheduler(limit=2, in_flight_limit=1)
    filled(scheduler, 0)
    scheduler.take()
    filled(scheduler, 1, 2)
    assert scheduler.withdraw(1)
    assert not scheduler.withdraw(1)
    filled(scheduler, 3)
    scheduler.finish(0)
    assert taken(scheduler) == [2]


def test_a_ticket_in_flight_or_unknown_cannot_be_withdrawn() -> None:
    scheduler = filled(Scheduler(limit=2, in_flight_limit=1), 0)
    scheduler.take()
    assert not scheduler.withdraw(0)
    assert not scheduler.withdraw(9)
    assert scheduler.in_flight == {0}


def test_what_is_not_in_flight_cannot_finish() -> None:
    scheduler = filled(Scheduler(limit=2, in_flight_limit=1), 0)
    with pytest.raises(KeyError):
        scheduler.finish(0)


def test_fewer_credits_than_are_in_flight_launch_nothing_and_lose_nothing() -> None:
    scheduler = ended(Scheduler(limit=8, in_flight_limit=1, horizon=300), *[1] * 50)
    assert taken(filled(scheduler, 0, 1, 2)) == [0, 1, 2]
    filled(scheduler, 3, 4)
    scheduler.finish(0, 300)  # So long a work: nothing is launched ahead of another any more.
    assert taken(scheduler) == []
    scheduler.finish(1)
    assert taken(scheduler) == []
    scheduler.finish(2)
    assert taken(scheduler) == [3]


def ended(scheduler: Scheduler, *took: int | None) -> Scheduler:
    """The scheduler after works that ran one by one, each for these nanoseconds."""
    for duration in took:
        filled(scheduler, 0).take()
        scheduler.finish(0, duration)
    return scheduler


def launched(scheduler: Scheduler) -> int:
    """How many of many are launched at once."""
    return len(filled(scheduler, *range(50)).take())


def test_works_are_launched_ahead_only_as_far_as_the_credits_until_they_proved_short() -> None:
    assert launched(Scheduler(limit=99, in_flight_limit=2, horizon=1000)) == 2
    assert launched(ended(Scheduler(limit=99, in_flight_limit=2, horizon=1000), None, None)) == 2


def test_short_works_are_launched_ahead_as_many_as_end_within_the_horizon() -> None:
    assert launched(ended(Scheduler(limit=99, in_flight_limit=2, horizon=1000), *[100] * 40)) == 10


def test_a_long_work_ends_that_at_once() -> None:
    assert launched(ended(Scheduler(limit=99, in_flight_limit=2, horizon=1000), *[100] * 40, 600)) == 2


def test_works_as_long_as_the_horizon_or_a_horizon_of_nothing_leave_the_credits() -> None:
    assert launched(ended(Scheduler(limit=99, in_flight_limit=2, horizon=1000), *[1000] * 40)) == 2
    assert launched(ended(Scheduler(limit=99, in_flight_limit=2), *[1] * 40)) == 2


def test_works_that_take_no_time_at_all_are_launched_ahead_as_far_as_the_queue_reaches() -> None:
    assert launched(ended(Scheduler(limit=99, in_flight_limit=1, horizon=1000), *[0] * 99)) == 50


def joinable(scheduler: Scheduler, *slots: int) -> Scheduler:
    for slot in slots:
        scheduler.add(ticket(slot), 0, Batching(Signature((), (), 3), 3).batchable(ticket(slot), 0.0))
    return scheduler


def test_those_that_go_together_take_one_credit_until_their_work_ends() -> None:
    scheduler = joinable(Scheduler(limit=8, in_flight_limit=1), 0, 1, 2, 3)
    choice = scheduler.choose(0.0)
    assert [each[2].slot for each in choice.members] == [0, 1, 2]
    scheduler.launch(choice.members, 7)
    assert scheduler.in_flight == {7}
    assert (scheduler.batchable, scheduler.statistics().waiting) == (1, 1)
    assert scheduler.choose(0.0).members == ()
    scheduler.finish(7)
    assert [each[2].slot for each in scheduler.choose(0.0).members] == [3]


def held_back(scheduler: Scheduler, running: int) -> bool:
    """Whether a batch that could grow is, behind so many works."""
    filled(scheduler, *range(running))
    assert len(scheduler.take()) == running
    return not joinable(scheduler, 50).choose(0.0).members


def test_a_batch_that_could_grow_is_held_back_once_the_credits_are_used_up() -> None:
    assert not held_back(Scheduler(limit=8, in_flight_limit=3), 2)
    assert held_back(Scheduler(limit=8, in_flight_limit=3), 3)


def test_where_works_are_short_or_on_the_cores_that_answer_it_is_held_back_behind_a_single_one() -> None:
    assert held_back(ended(Scheduler(limit=99, in_flight_limit=3, horizon=1000), *[100] * 40), 1)
    assert not held_back(ended(Scheduler(limit=99, in_flight_limit=3, horizon=1000), *[300] * 40), 1)
    hosted = Scheduler(limit=8, in_flight_limit=3)
    hosted.on_host_cores = True
    assert held_back(hosted, 1)


def test_those_that_are_put_back_take_their_old_places_to_go_alone() -> None:
    scheduler = joinable(Scheduler(limit=2, in_flight_limit=1), 0, 1, 2)
    members = scheduler.choose(0.0).members
    scheduler.launch(members, 7)
    filled(scheduler, 3, 4)
    scheduler.finish(7)
    scheduler.put_back(members)
    assert scheduler.batchable == 0
    order = []
    for _ in range(5):
        (slot,) = taken(scheduler)
        scheduler.finish(slot)
        order.append(slot)
    assert order == [0, 1, 2, 3, 4]
    assert scheduler.idle


def test_one_that_is_withdrawn_joins_nobody() -> None:
    scheduler = joinable(Scheduler(limit=8, in_flight_limit=1), 0, 1)
    assert scheduler.withdraw(0)
    assert not scheduler.idle
    assert [each[2].slot for each in scheduler.choose(0.0).members] == [1]
    assert scheduler.batchable == 1
    assert scheduler.withdraw(1)
    assert scheduler.batchable == 0
    assert scheduler.choose(0.0).members == ()


def test_a_scheduler_shows_what_waits_and_flies() -> None:
    scheduler = filled(Scheduler(limit=4, in_flight_limit=1), 0, 1)
    scheduler.take()
    assert repr(scheduler) == "<Scheduler 1/4 waiting, 1/1 in flight>"


class Model(RuleBasedStateMachine):
    """The same decisions made by sorting a plain list, beside the scheduler's own."""

    @initialize(limit=st.integers(0, 4), in_flight_limit=st.integers(1, 3))
    def begin(self, limit: int, in_flight_limit: int) -> None:
        self.scheduler = Scheduler(limit, in_flight_limit)
        self.waiting: list[tuple[float, int]] = []
        self.flying: set[int] = set()
        self.next_slot = 0
        self.ended: set[int] = set()

    def free(self) -> int:
        return self.scheduler.in_flight_limit - len(self.flying)

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
        self.flying |= set(expected)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.flying)))
        self.scheduler.finish(slot)
        self.flying.remove(slot)
        self.ended.add(slot)

    @rule(slot=st.integers(0, 12))
    def withdraw(self, slot: int) -> None:
        waits = slot in [waiting for _, waiting in self.waiting]
        assert self.scheduler.withdraw(slot) == waits
        self.waiting = [entry for entry in self.waiting if entry[1] != slot]
        self.ended |= {slot} if waits else set()

    @invariant()
    def credits_and_limit_hold(self) -> None:
        scheduler = self.scheduler.statistics()
        assert scheduler.in_flight <= scheduler.in_flight_limit
        assert scheduler.waiting <= scheduler.limit + self.free()

    @invariant()
    def nothing_is_lost_and_nothing_is_twice(self) -> None:
        assert self.scheduler.in_flight == self.flying
        assert self.scheduler.statistics().waiting == len(self.waiting)
        known = [slot for _, slot in self.waiting] + list(self.flying) + list(self.ended)
        assert sorted(known) == list(range(self.next_slot))


TestAgainstAModel = Model.TestCase
