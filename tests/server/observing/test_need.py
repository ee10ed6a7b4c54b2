"""What a tenant needs, from the counters of two reports."""

import pytest

from server.link.messages import Done
from server.observing.need import Counted, History, Need, below, counted, need, quantile
from server.scheduling.lane_statistics import LaneStatistics, SlotStatistics
from server.tenants.frontend import ModelReport, Report
from server.tenants.statistics import BOUNDS, ModelStatistics

MS = 1_000_000


def answered(statistics: ModelStatistics, count: int, queued: int, ran: int) -> None:
    """Count requests that waited and ran for so many milliseconds."""
    for _ in range(count):
        done = Done(0, (), None, queued * MS, (queued + ran) * MS)
        statistics.succeeded(0, 0, done, (queued + ran) * MS, 1)


def report(*models: tuple[str, ModelStatistics], rejected: int = 0, expired: int = 0, limited: int = 0, ran: int = 0) -> Report:
    lane = LaneStatistics(0, 0, 0, rejected, expired, limited=(limited, limited, 0, 0), ran=ran * MS)
    served = [ModelReport(name, "1", statistics, 0) for name, statistics in models]
    return Report(served, [], lane, SlotStatistics(0, 0, 0))


def test_a_need_is_of_the_requests_between_two_reports() -> None:
    one, other = ModelStatistics(), ModelStatistics()
    answered(one, 50, queued=1, ran=500)
    before = counted(report(("one", one), ("other", other), rejected=3, ran=25_000), 10.0)
    answered(one, 99, queued=2, ran=2)
    answered(other, 1, queued=100, ran=300)
    found = need(before, counted(report(("one", one), ("other", other), rejected=4, expired=2, ran=25_600), 12.0))
    assert (found.seconds, found.requests, found.turned_away) == (2.0, 100, 3)
    assert found.busy == pytest.approx(0.6 / 2), "0.1 s of it without an answer"
    assert found.queue == pytest.approx((99 * 0.002 + 0.1) / 100)
    assert found.p99 == pytest.approx(0.005, rel=0.01)


def test_a_model_that_was_loaded_again_counts_from_zero() -> None:
    old, new = ModelStatistics(), ModelStatistics()
    answered(old, 50, queued=0, ran=1)
    answered(new, 20, queued=0, ran=1)
    found = need(counted(report(("one", old)), 0.0), counted(report(("one", new)), 1.0))
    assert (found.requests, found.queue) == (20, 0.0)


def test_works_that_answered_no_request_kept_the_partition_busy() -> None:
    found = need(counted(report(ran=700), 0.0), counted(report(ran=1500), 1.0))
    assert (found.requests, found.busy) == (0, pytest.approx(0.8))
    assert need(counted(report(ran=700), 0.0), counted(report(ran=300), 1.0)).busy == pytest.approx(0.3), "a new process"


def test_what_a_limit_refuses_is_no_need_of_a_larger_share() -> None:
    found = need(counted(report(limited=1), 0.0), counted(report(limited=4), 5.0))
    assert (found.limited, found.turned_away) == (6, 0)
    assert need(Counted(0.0, {}, 0, 7), Counted(1.0, {}, 0, 2)).limited == 2


def test_quantiles_are_interpolated_in_their_bucket() -> None:
    buckets = [0] * (len(BOUNDS) + 1)
    assert quantile(buckets, 0.99) is None
    buckets[3] = 100  # 0.5 to 1 ms
    assert (below(buckets, 0.00075), below(buckets, 0.0001)) == (50.0, 0.0)
    assert quantile(buckets, 0.5) == pytest.approx(0.00075)
    buckets[-1] = 100
    assert quantile(buckets, 0.99) == pytest.approx(19.8)


def test_a_history_has_needs_of_whole_windows_only() -> None:
    history = History(15.0)
    for at in (0.0, 5.0, 10.0):
        history.add("acme", Counted(at, {}, int(at)))
        assert history.needs() == {}
    for at in (15.0, 20.0):
        history.add("acme", Counted(at, {}, int(at)))
        assert history.needs()["acme"].seconds == 15.0
    history.add("globex", Counted(20.0, {}, 0))
    assert set(history.needs()) == {"acme"}
    history.forget("acme")
    assert history.needs() == {}


@pytest.mark.parametrize(
    ("requests", "late", "misses"), [(10, 1, False), (10, 2, True), (30, 2, False), (1000, 15, False), (1000, 20, True)]
)
def test_a_target_is_missed_if_more_are_late_than_chance_explains(requests: int, late: int, misses: bool) -> None:
    buckets = [0] * (len(BOUNDS) + 1)
    buckets[2], buckets[6] = requests - late, late
    assert Need(15.0, 0.5, 0.0, tuple(buckets)).misses(0.005) == misses
