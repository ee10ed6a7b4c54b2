"""When a tenant stops lending, and when it goes on. Time passes as the tests say."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.scheduling.lender import CHANCE, ENOUGH, FIRST_PAUSE, LONGEST_PAUSE, MEASURING, STALE, Guard, critical

MS = 1_000_000
LIMIT = 1 * MS


class Lender:
    """A tenant whose requests come one at a time, a millisecond apart."""

    def __init__(self) -> None:
        self.guard = Guard(LIMIT)
        self.now = 0

    def answer(self, count: int, latency: int, met: bool, model: str = "m/1#1") -> None:
        for _ in range(count):
            self.now += MS
            self.guard.learn(model, latency, met, self.now)

    def sleep(self, ns: int) -> None:
        self.now += ns
        self.guard.look(self.now)


@pytest.fixture
def lender() -> Lender:
    return Lender()


def test_it_measures_what_it_does_not_know_and_lends_again(lender: Lender) -> None:
    lender.answer(ENOUGH, 5 * MS, met=True)
    assert not lender.guard.lends
    lender.answer(ENOUGH, 4 * MS, met=False)
    assert lender.guard.lends
    assert lender.guard.stops == 0


def test_measuring_ends_also_if_nothing_comes(lender: Lender) -> None:
    lender.answer(ENOUGH, 5 * MS, met=True)
    lender.sleep(MEASURING - 1)
    assert not lender.guard.lends
    lender.sleep(1)
    assert lender.guard.lends


@pytest.mark.parametrize(
    ("alone", "met", "lends"),
    [
        (4 * MS, 5 * MS, True),  # The limit later.
        (4 * MS, 5 * MS + 1, False),
        (20 * MS, 23 * MS, True),  # 15 % later.
        (20 * MS, 23 * MS + 1, False),
        (4 * MS, 3 * MS, True),
    ],
)
def test_it_stops_where_requests_that_met_a_borrower_miss_the_others(lender: Lender, alone: int, met: int, lends: bool) -> None:
    lender.answer(ENOUGH, alone, met=False)
    lender.answer(ENOUGH, met, met=True)
    assert (lender.guard.lends, lender.guard.stops) == (lends, 0 if lends else 1)


def test_what_it_says_when_it_stops(lender: Lender) -> None:
    lender.answer(ENOUGH, 4 * MS, met=False)
    lender.answer(ENOUGH, 9 * MS, met=True)
    assert lender.guard.reason == (
        "requests of m/1 that met a borrower took 9.00 ms, and others 4.00 ms (medians); nothing is lent for 1 s"
    )


def test_each_further_stop_lasts_twice_as_long_up_to_a_limit_and_a_good_phase_forgets_that(lender: Lender) -> None:
    pause = FIRST_PAUSE
    for _ in range(12):
        lender.answer(ENOUGH, 4 * MS, met=False)
        lender.answer(ENOUGH, 9 * MS, met=True)
        assert not lender.guard.lends
        lender.sleep(pause - 1)
        assert not lender.guard.lends
        lender.sleep(1)
        assert lender.guard.lends
        pause = min(2 * pause, LONGEST_PAUSE)
    assert pause == LONGEST_PAUSE
    lender.sleep(LONGEST_PAUSE + 1)
    lender.answer(ENOUGH, 4 * MS, met=False)
    lender.answer(ENOUGH, 4 * MS, met=True)
    lender.answer(ENOUGH, 9 * MS, met=True)
    stopped = lender.now
    assert lender.guard.until == stopped + FIRST_PAUSE


def test_what_is_long_ago_is_measured_again(lender: Lender) -> None:
    lender.answer(ENOUGH, 4 * MS, met=False)
    lender.sleep(STALE)
    lender.answer(ENOUGH, 9 * MS, met=True)
    assert (lender.guard.lends, lender.guard.stops) == (False, 0)
    lender.answer(ENOUGH, 9 * MS, met=False)
    lender.answer(ENOUGH, 9 * MS, met=True)
    assert (lender.guard.lends, lender.guard.stops) == (True, 0)


def test_it_stops_where_lending_costs_some_requests_much(lender: Lender) -> None:
    lender.answer(256, 4 * MS, met=False)
    for _ in range(8):
        lender.answer(13, 4 * MS, met=True)
        lender.answer(3, 40 * MS, met=True)  # The median is as before.
        if not lender.guard.lends:
            break
    assert lender.guard.stops == 1
    assert "that met a borrower took more than 5.00 ms in " in lender.guard.reason
    assert lender.guard.reason.endswith("cases, and 2 of 256 others 4.00 ms or more; nothing is lent for 1 s")


def test_it_stops_where_lending_costs_one_request_in_twenty_much(lender: Lender) -> None:
    """The slowest twentieth of the others is as slow; the p99 is ten times as long."""
    for index in range(1024):
        lender.answer(1, 40 * MS if index % 100 == 0 else 4 * MS, met=False)
    for index in range(1024):
        lender.answer(1, 90 * MS if index % 20 == 0 else 4 * MS, met=True)
        if not lender.guard.lends:
            break
    assert lender.guard.stops == 1
    assert lender.guard.reason.endswith("cases, and 10 of 1024 others 40.00 ms or more; nothing is lent for 1 s")


def test_a_tail_that_is_later_by_what_a_borrower_may_cost_is_none(lender: Lender) -> None:
    for _ in range(16):
        lender.answer(ENOUGH, 4 * MS, met=False)
        lender.answer(8, 4 * MS, met=True)
        lender.answer(8, 5 * MS, met=True)
    assert lender.guard.stops == 0


@given(st.integers(0, 2**32), st.sampled_from([0.1, 0.5, 1.5]))
@settings(max_examples=30, deadline=None)
def test_requests_that_are_all_alike_hardly_ever_stop_it_for_their_tail(seed: int, spread: float) -> None:
    draw, lender, reasons = random.Random(seed), Lender(), list[str]()
    lender.guard = Guard(1)
    for index in range(2000):
        lender.answer(1, int(draw.lognormvariate(0, spread) * 20 * MS), met=index % 2 == 1)
        if lender.guard.stops > len(reasons):
            reasons.append(lender.guard.reason)
    late = [reason for reason in reasons if "(medians)" not in reason]
    assert len(late) <= 1, "the medians of sixteen may differ, but not the tails"


@given(st.integers(16, 40), st.integers(1, 3), st.integers(1, 40))
def test_as_many_are_too_many_as_the_exact_distribution_says(earlier: int, rank: int, new: int) -> None:
    """Compared with a count of all orders: x of the new ones are above the rank-th largest earlier one."""
    ways = [math.comb(x + rank - 1, x) * math.comb(new - x + earlier - rank, new - x) for x in range(new + 1)]
    assert sum(ways) == math.comb(new + earlier, new)
    found = critical(earlier, rank, new, CHANCE)
    assert sum(ways[found:]) < CHANCE * sum(ways) * (1 + 1e-6)
    assert sum(ways[found - 1 :]) >= CHANCE * sum(ways) * (1 - 1e-6)
