"""A tenant's limits: token buckets grant what they say and no more, and say when the next token is there."""

import os
import time
import timeit
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import LimitExceeded, TooLarge, answer
from server.link import occupancy
from server.link.occupancy import LEAD, Occupancy
from server.scheduling.limits import RateLimits, SharedRateLimits, TokenBucket

SECOND = 1_000_000
rates = st.integers(1, 10**12)
arrivals = st.lists(st.tuples(st.integers(0, 3 * SECOND), st.integers(1, 50)), max_size=60)


@given(rates, st.integers(50, 1000), arrivals)
def test_never_more_than_the_burst_and_the_rate_are_granted(rate: int, burst: int, arrivals: list[tuple[int, int]]) -> None:
    """In any stretch of time, exactly: in integers, nothing is rounded."""
    bucket, now = TokenBucket(rate, burst), 10**12
    granted: list[tuple[int, int]] = []
    for pause, count in arrivals:
        now += pause
        if not bucket.wait(count, now):
            bucket.take(count)
            granted.append((now, count))
    for first, (begin, _) in enumerate(granted):
        total = 0
        for at, count in granted[first:]:
            total += count
            assert total * SECOND <= burst * SECOND + rate * (at - begin)


@given(rates, st.integers(50, 1000), arrivals)
def test_what_is_refused_is_granted_after_the_wait_and_not_before(
    rate: int, burst: int, arrivals: list[tuple[int, int]]
) -> None:
    bucket, now = TokenBucket(rate, burst), 10**12
    for pause, count in arrivals:
        now += pause
        wait = bucket.wait(count, now)
        if wait > 1:
            assert bucket.wait(count, now + wait - 1) == 1
        now += wait
        assert bucket.wait(count, now) == 0
        bucket.take(count)


def test_a_refused_request_takes_nothing_of_either_bucket() -> None:
    limits = RateLimits("acme", TokenBucket(10, 10), TokenBucket(100, 100))
    limits.charge(1, 90, SECOND)
    with pytest.raises(LimitExceeded, match=r"tenants.acme.bytes_per_second allows 100 bytes .* this body has 20") as refused:
        limits.charge(1, 20, SECOND)
    assert (refused.value.limit, refused.value.retry_after) == ("bytes_per_second", 0.1)
    limits.charge(9, 10, SECOND)
    with pytest.raises(LimitExceeded, match=r"allows 10 requests a second, and 10 at once .* in 0.1 s, or send fewer"):
        limits.charge(1, 0, SECOND)
    limits.charge(1, 0, SECOND + SECOND // 10)


def test_a_body_that_never_fits_is_413_and_takes_nothing() -> None:
    limits = RateLimits("acme", None, TokenBucket(100, 200))
    with pytest.raises(TooLarge, match=r"200 at once .burst_bytes.; this body has 201, which it never admits"):
        limits.charge(1, 201, 0)
    limits.charge(1, 200, 0)


def test_retry_after_is_in_whole_seconds_and_not_too_early() -> None:
    limits = RateLimits("acme", TokenBucket(1, 3), None)
    limits.charge(3, 0, 0)
    with pytest.raises(LimitExceeded, match="allows 1 request a second, and 3 at once") as refused:
        limits.check(SECOND // 2)
    assert answer(refused.value, "").headers == {"retry-after": "1"}
    with pytest.raises(LimitExceeded) as refused:
        limits.charge(3, 0, SECOND // 2)
    assert answer(refused.value, "").headers == {"retry-after": "3"}


def test_new_limits_go_on_with_what_was_left() -> None:
    before, after = RateLimits("acme", TokenBucket(1, 100), None), RateLimits("acme", TokenBucket(1, 10), None)
    before.charge(95, 0, SECOND)
    after.take_over(before)
    after.charge(5, 0, SECOND)
    with pytest.raises(LimitExceeded):
        after.check(SECOND)


def test_new_limits_of_bytes_go_on_with_what_was_left_too() -> None:
    before, after = RateLimits("acme", None, TokenBucket(1, 100)), RateLimits("acme", None, TokenBucket(1, 100))
    before.charge(0, 95, SECOND)
    after.take_over(before)
    after.charge(0, 5, SECOND)
    with pytest.raises(LimitExceeded, match="bytes_per_second"):
        after.charge(0, 1, SECOND)


@pytest.fixture
def page() -> Iterator[int]:
    page = occupancy.create(1 << 20)
    yield page
    os.close(page)


def test_processes_of_a_tenant_share_one_bucket(page: int) -> None:
    lead, helper = (
        SharedRateLimits("acme", TokenBucket(1, 2), TokenBucket(10, 10), Occupancy(page, number)) for number in (LEAD, 2)
    )
    lead.charge(1, 4, 1000 * SECOND)
    helper.charge(1, 4, 1000 * SECOND)
    for each in (lead, helper):
        with pytest.raises(LimitExceeded, match="requests_per_second"):
            each.charge(1, 0, 1000 * SECOND)
        with pytest.raises(LimitExceeded, match="bytes_per_second"):
            each.charge(0, 3, 1000 * SECOND)
    lead.charge(1, 7, 1001 * SECOND)
    with pytest.raises(LimitExceeded):
        helper.check(1001 * SECOND)


@given(
    st.one_of(rates, st.integers(100, 2000)),
    st.integers(1, 4000),
    st.lists(st.tuples(st.integers(0, 3 * SECOND), st.integers(0, 2), st.integers(1, 50)), max_size=60),
)
def test_processes_with_lots_grant_no_more_than_one_bucket_and_little_less(
    rate: int, burst: int, arrivals: list[tuple[int, int, int]]
) -> None:
    """Never what one bucket would refuse; what it would grant only where little more than the lots is left in it."""
    page = occupancy.create(1 << 20)
    try:
        shared = [SharedRateLimits("acme", TokenBucket(rate, burst), None, Occupancy(page, n)) for n in (LEAD, 2, 3)]
        one, now = TokenBucket(rate, burst), 10**12
        lots = 2 * len(shared) * min(rate * SECOND // 100, burst * SECOND // 128)
        for pause, process, count in arrivals:
            now += pause
            try:
                shared[process].charge(count, 0, now)
            except LimitExceeded:
                one.wait(count, now)
                assert one.level < count * SECOND + lots
            else:
                assert one.wait(count, now) == 0
                one.take(count)
    finally:
        os.close(page)


class Counted(Occupancy):
    """Counts how often the lock was taken."""

    locked = 0

    def lock(self) -> bool:
        self.locked += 1
        return super().lock()


def test_what_others_may_take_back_is_not_used_without_the_lock(page: int) -> None:
    """They take it back after a second. Without the lock both would grant it."""
    view = Counted(page, LEAD)
    limits = SharedRateLimits("acme", TokenBucket(1000, 1280), None, view)
    for pause, locked in ((0, 1), (SECOND // 100, 1), (SECOND // 2, 2), (SECOND - 1, 3)):
        limits.charge(1, 0, 1000 * SECOND + pause)
        assert view.locked == locked


def test_most_requests_of_several_processes_take_no_lock(page: int) -> None:
    view = Counted(page, 2)
    limits = SharedRateLimits("acme", TokenBucket(10_000, 100_000), TokenBucket(10**9, 10**9), view)
    for request in range(1000):
        limits.charge(1, 1000, 1000 * SECOND + request)
    assert view.locked == 1000 // (10_000 // 100 + 1) + 1


def test_what_a_process_held_when_it_ended_comes_back_and_its_successor_has_none_of_it(page: int) -> None:
    lead, ended, successor = (
        SharedRateLimits("acme", TokenBucket(1000, 1280), None, Occupancy(page, number)) for number in (LEAD, 2, 2)
    )
    ended.charge(1, 0, 1000 * SECOND)
    assert list(Occupancy(page, 2).held_tokens(0)) == [10 * SECOND]
    Occupancy(page, LEAD).free_all_of(2)
    assert list(Occupancy(page, 2).held_tokens(0)) == [0]
    with pytest.raises(LimitExceeded):
        successor.charge(1270, 0, 1000 * SECOND)
    lead.charge(1270, 0, 1001 * SECOND)
    lead.charge(1280, 0, 1003 * SECOND)
    with pytest.raises(LimitExceeded):
        successor.check(1003 * SECOND)


def test_what_idle_processes_hold_does_not_keep_a_body_of_the_whole_burst_out(page: int) -> None:
    idle, other = (SharedRateLimits("acme", None, TokenBucket(1000, 1280), Occupancy(page, number)) for number in (LEAD, 2))
    idle.charge(0, 1, 1000 * SECOND)
    with pytest.raises(LimitExceeded):
        other.charge(0, 1280, 1000 * SECOND + SECOND // 2)
    other.charge(0, 1280, 1002 * SECOND)
    with pytest.raises(LimitExceeded):
        idle.charge(0, 1, 1002 * SECOND)


def test_a_reload_gives_up_what_a_process_held(page: int) -> None:
    before = SharedRateLimits("acme", TokenBucket(1000, 1280), None, Occupancy(page, LEAD))
    before.charge(1, 0, 1000 * SECOND)
    after = SharedRateLimits("acme", TokenBucket(1, 2), None, Occupancy(page, LEAD))
    after.take_over(before)
    after.charge(2, 0, 1010 * SECOND)
    with pytest.raises(LimitExceeded):
        after.charge(1, 0, 1010 * SECOND)


def test_a_check_costs_little() -> None:
    """Compared with hashing a key on the same machine, which every request that names another head pays. Coverage slows it."""
    from server.tenants.auth import digest

    limits, times = RateLimits("acme", TokenBucket(10**9, 10**9), TokenBucket(10**12, 10**12)), iter(range(10**9))
    charge = min(timeit.repeat(lambda: limits.charge(1, 1000, next(times)), timer=time.thread_time, number=2000, repeat=5))
    hashed = timeit.repeat(lambda: digest("a key of thirty-two characters.."), timer=time.thread_time, number=2000, repeat=5)
    assert charge < 10 * min(hashed)
