"""When a work goes wide: over all states, and over what a worker can see in a row."""

from hypothesis import given
from hypothesis import strategies as st

from server.workers.stretching import (
    BUSY,
    IN_FLIGHT,
    LENDER_BUSY,
    LENDER_STOPPED,
    LONGEST_RETRY,
    RETRY,
    SETTLED,
    STOPPED,
    TOO_LONG,
    WIDE,
    Times,
    decide,
)

NS = st.integers(1, 10**9)
LIMIT = 1_000_000
SIZES = (2, 8)


def times(home: int = 0, wide: int = 0, retry_at: int = 0) -> Times:
    made = Times()
    made.home, made.wide, made.retry_at = home, wide, retry_at
    return made


def goes_wide(state: Times, now: int, limit: int, home: int, wide: int, in_flight: bool, since: int) -> bool:
    return decide(state, now, limit, home, wide, in_flight, since) == WIDE


STATES = st.builds(times, st.one_of(st.just(0), NS), st.one_of(st.just(0), NS), st.one_of(st.just(0), NS))


@given(STATES, NS, NS, st.integers(1, 64), st.integers(1, 64), st.booleans(), st.integers(STOPPED, 10**9))
def test_nothing_goes_wide_beside_another_work_or_a_lender_or_for_longer_than_is_known_to_be_allowed(
    state: Times, now: int, limit: int, home: int, more: int, in_flight: bool, since: int
) -> None:
    why = decide(state, now, limit, home, home + more, in_flight, since)
    assert (why == IN_FLIGHT) == in_flight
    assert (why == LENDER_BUSY) == (since == BUSY and not in_flight)
    assert (why == LENDER_STOPPED) == (since == STOPPED and not in_flight)
    if why == TOO_LONG:
        assert state.known(now) > limit or state.home * home > limit * (home + more)
    if why == WIDE:
        assert not in_flight
        assert since >= 0
        assert state.known(now) <= limit
        assert state.home > 0
        if not state.known(now):
            assert state.home * home <= limit * (home + more), "all its units could not make it short enough"
            assert state.home <= limit or now - since >= SETTLED


def test_an_unknown_work_is_home_first_and_then_tried() -> None:
    state = times()
    assert not goes_wide(state, SETTLED, LIMIT, *SIZES, False, 0)
    state.learn_home(LIMIT)
    assert goes_wide(state, 0, LIMIT, *SIZES, False, 0)


def test_a_work_that_may_be_too_long_is_tried_only_when_the_lenders_have_rested() -> None:
    state = times(home=4 * LIMIT)
    assert not goes_wide(state, SETTLED - 1, LIMIT, *SIZES, False, 0)
    assert goes_wide(state, SETTLED, LIMIT, *SIZES, False, 0)
    assert not goes_wide(times(home=4 * LIMIT + 1), SETTLED, LIMIT, *SIZES, False, 0)


def test_a_work_that_is_too_long_or_no_faster_is_tried_again_later_and_later() -> None:
    for took in (LIMIT + 1, LIMIT - 10):
        state, now, wait = times(home=LIMIT - 10), 0, RETRY
        for _ in range(8):
            state.learn_wide(took, LIMIT, now)
            assert not goes_wide(state, now + wait - 1, LIMIT, *SIZES, False, 0)
            now += wait
            assert goes_wide(state, now, LIMIT, *SIZES, False, 0)
            wait = min(2 * wait, LONGEST_RETRY)


def test_one_long_work_among_short_ones_is_no_reason_to_stop() -> None:
    state = times(home=LIMIT, wide=LIMIT // 4)
    state.learn_wide(2 * LIMIT, LIMIT, 0)
    assert goes_wide(state, 0, LIMIT, *SIZES, False, 0)
    for _ in range(8):
        state.learn_wide(2 * LIMIT, LIMIT, 0)
    assert not goes_wide(state, 0, LIMIT, *SIZES, False, 0)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40))
def test_an_estimate_lies_between_what_was_seen(took: list[int]) -> None:
    state = times(home=10**13)
    for each in took:
        state.learn_wide(each, 10**13, 0)
    assert max(1, min(took)) <= state.wide <= max(1, *took)
