"""Who steps aside for whom: decided from how often each has something to do, and whether it has now."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from server.workers.gil_priority import OFTEN, RARE, STEPS, GilPriorities, GilPriority

SECOND = 1_000_000_000
SETTLED = 200
"""Inferences after which the average of the gaps is the gap."""


class Bench:
    """Places whose sleeps are counted instead of slept; `news` may be changed while somebody sleeps."""

    def __init__(self) -> None:
        self.sleeps = 0
        self.waiting = False
        self.after = lambda: None
        self.priorities = GilPriorities(self.sleep)

    def sleep(self, _: float) -> None:
        self.sleeps += 1
        self.after()

    def place(self, gap: int, until: int = SECOND) -> GilPriority:
        """One whose inferences came with this gap between them until then, of which the last one is being worked on."""
        place = self.priorities.join(lambda: self.waiting)
        for nth in range(SETTLED):
            place.start_enqueuing(until - (SETTLED - nth) * gap)
        return place

    def slept(self, place: GilPriority, now: int = SECOND) -> int:
        """How often it slept in order to step deferred."""
        before = self.sleeps
        place.yield_gil(now)
        return self.sleeps - before


def test_who_never_rests_steps_aside_for_who_seldom_has_something_to_do_while_it_does() -> None:
    bench = Bench()
    greedy, modest = bench.place(30_000), bench.place(5_000_000)
    assert bench.slept(greedy) == STEPS
    assert bench.slept(modest) == 0
    modest.end_enqueuing()
    assert bench.slept(greedy) == 0


def test_a_ticket_that_was_not_got_yet_is_something_to_do() -> None:
    """The other one's thread may be waiting for the interpreter to get it."""
    bench = Bench()
    greedy, modest = bench.place(30_000), bench.place(5_000_000)
    modest.end_enqueuing()
    bench.waiting = True
    assert bench.slept(greedy) == STEPS


def test_nobody_steps_aside_for_a_worker_that_waits_for_the_device() -> None:
    bench = Bench()
    greedy, modest = bench.place(30_000), bench.place(5_000_000)
    modest.end_enqueuing()
    modest.start_waiting(deaf=True)
    bench.waiting = True
    assert bench.slept(greedy) == 0
    assert "away" in repr(modest)
    modest.start_completing()
    assert bench.slept(greedy) == STEPS


def test_a_worker_that_waits_for_the_device_and_listens_goes_first_when_a_ticket_comes() -> None:
    bench = Bench()
    greedy, modest = bench.place(30_000), bench.place(5_000_000)
    modest.end_enqueuing()
    modest.start_waiting(deaf=False)
    assert bench.slept(greedy) == 0
    assert "resting" in repr(modest)
    bench.waiting = True
    assert bench.slept(greedy) == STEPS


def test_what_one_thread_does_is_told_apart_from_what_the_other_does() -> None:
    bench = Bench()
    greedy, modest = bench.place(30_000), bench.place(5_000_000)
    modest.start_completing()
    modest.end_enqueuing()
    assert bench.slept(greedy) == STEPS
    modest.start_waiting(deaf=False)
    assert bench.slept(greedy) == 0


def test_it_goes_on_as_soon_as_the_other_has_nothing_to_do() -> None:
    bench = Bench()
    greedy, modest = bench.place(30_000), bench.place(5_000_000)
    bench.after = modest.end_enqueuing
    assert bench.slept(greedy) == 1


def test_who_comes_seldom_disturbs_nobody_and_steps_aside_for_nobody() -> None:
    bench = Bench()
    place, _ = bench.place(RARE + 1000), bench.place(OFTEN * RARE * 10)
    assert bench.slept(place) == 0


def test_equals_do_not_step_aside_for_each_other() -> None:
    bench = Bench()
    one, other = bench.place(30_000), bench.place(40_000)
    assert bench.slept(one) == bench.slept(other) == 0


def test_a_long_rest_makes_a_busy_worker_one_that_goes_first_for_a_while() -> None:
    bench = Bench()
    later = SECOND + 20_000_000
    greedy, other = bench.place(30_000, later), bench.place(30_000, SECOND)
    other.start_enqueuing(later)
    assert bench.slept(greedy, later) == STEPS
    for nth in range(SETTLED):
        other.start_enqueuing(later + nth * 30_000)
    assert bench.slept(greedy, later + SETTLED * 30_000) == 0


def test_who_is_gone_precedes_nobody() -> None:
    bench = Bench()
    greedy, modest = bench.place(30_000), bench.place(5_000_000)
    bench.priorities.remove(modest)
    assert bench.slept(greedy) == 0
    assert "1 workers" in repr(bench.priorities)
    assert repr(greedy) == "<GilPriority working, an inference every 0.030 ms>"


@given(st.lists(st.integers(1_000, 10_000_000), min_size=2, max_size=6))
def test_of_two_at_work_at_most_one_steps_aside_and_it_is_the_busier(gaps: list[int]) -> None:
    bench = Bench()
    places = [bench.place(gap) for gap in sorted(gaps)]
    for busier, other in pairwise(places):
        assert not busier.goes_before(other, SECOND)
    assert bench.slept(places[-1]) == 0
    assert all(bench.slept(place) in (0, STEPS) for place in places)
