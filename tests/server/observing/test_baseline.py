"""A tenant's quiet latency: learned by rate, compared with now, and forgotten."""

import pytest

from server.observing.need import Need
from server.observing.overview import ENOUGH, Baseline
from server.tenants.statistics import BOUNDS

FAST, SLOW = 3, 5
"""Buckets: up to 1 ms, and up to 5 ms."""


def measured(fast: int, slow: int = 0, seconds: float = 10.0) -> Need:
    """Requests of so many seconds, by the bucket that their time is in."""
    buckets = [0] * (len(BOUNDS) + 1)
    buckets[FAST], buckets[SLOW] = fast, slow
    return Need(seconds, 0.1, 0.0, tuple(buckets))


def test_it_is_not_known_before_there_are_enough_quiet_requests() -> None:
    baseline = Baseline()
    baseline.learn(measured(ENOUGH - 1))
    found = baseline.compare(measured(ENOUGH))
    assert (found.ratio, found.slower, found.quiet_requests) == (None, False, ENOUGH - 1)
    assert found.why.startswith(f"not known yet: {ENOUGH - 1} of {ENOUGH} requests")
    baseline.learn(measured(1, seconds=1 / 50))
    assert baseline.compare(measured(ENOUGH)).ratio == pytest.approx(1.0)


def test_slower_than_while_the_neighbours_rested() -> None:
    baseline = Baseline()
    baseline.learn(measured(1000))
    slower = baseline.compare(measured(900, 100))
    assert slower.slower
    assert slower.ratio == pytest.approx((slower.quiet_p99_ms and 4.7 / slower.quiet_p99_ms), rel=0.1)
    chance = baseline.compare(measured(997, 3))
    assert not chance.slower


def test_requests_at_another_rate_are_not_compared() -> None:
    """At a higher one they wait for each other more, whatever neighbours do."""
    baseline = Baseline()
    baseline.learn(measured(1000))
    assert baseline.compare(measured(1900)).ratio is not None
    assert baseline.compare(measured(520)).ratio is not None
    assert baseline.compare(measured(6000)).ratio is None


def test_clients_that_wait_for_late_answers_are_compared_with_when_they_sent_more() -> None:
    baseline = Baseline()
    baseline.learn(measured(1000))
    baseline.learn(measured(0, 1000, seconds=1.0))
    found = baseline.compare(measured(0, 150))
    assert found.slower
    assert found.quiet_requests == 1000  # The nearest are enough.


def test_old_requests_count_less_and_less() -> None:
    baseline = Baseline()
    for _ in range(150):
        baseline.learn(measured(0, 1000))
    for _ in range(1500):
        baseline.learn(measured(1000))
    found = baseline.compare(measured(1000))
    assert found.ratio == pytest.approx(1.0, rel=0.01)
    assert found.quiet_requests <= 100_000


def test_what_is_forgotten_is_not_known() -> None:
    baseline = Baseline()
    baseline.learn(measured(ENOUGH))
    baseline.forget()
    assert baseline.compare(measured(ENOUGH)).ratio is None
