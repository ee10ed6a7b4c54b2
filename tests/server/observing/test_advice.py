"""Advice on a tenant's share, from what it needed."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from server.observing.advice import LEAST, Share, advise, p99_between
from server.observing.autopilot import FULL, KEEPS
from server.observing.need import Need
from server.tenants.statistics import BOUNDS


def need(busy: float, p99_ms: float, requests: int = 1000, turned_away: int = 0) -> Need:
    """Requests of ten seconds that all were answered in the bucket of this time."""
    buckets = [0] * (len(BOUNDS) + 1)
    buckets[sum(bound < p99_ms * 1e6 for bound in BOUNDS)] = requests
    return Need(10.0, busy, 0.0, tuple(buckets), turned_away)


FOUR = Share(4, 8, 1, "core")
counts = st.one_of(st.integers(0, 5000), st.sampled_from([0, LEAST]))
needs = st.builds(need, st.floats(0.001, 1.0), st.floats(0.1, 9000.0), counts, st.sampled_from([0, 0, 0, 3]))
shares = st.integers(1, 32).flatmap(
    lambda total: st.builds(Share, st.integers(1, total), st.just(total), st.sampled_from([1, 8]), st.just("SM"))
)
targets = st.floats(1e-4, 10.0)


WHOLE = Share(4, 4, 8, "SM")
INSTEAD = "a faster model or less load"
ALL = f"it has the whole device, so it takes {INSTEAD}"


@pytest.mark.parametrize(
    ("found", "share", "target", "advice", "said"),
    [
        (need(0.12, 0.9), FOUR, 0.005, ("fewer", 2, "high"), "p99 is 995 us, target 5 ms: 2 cores would do"),
        (need(0.6, 3), FOUR, 0.007, ("keep", 4, "high"), "60 % of 4 cores; its p99 is 4.97 ms, target 7 ms: keep 4 cores"),
        (need(0.6, 3), FOUR, 0.00498, ("keep", 4, "low"), "60 % of 4 cores; its p99 is 4.97 ms, target 4.98 ms: keep 4 cores"),
        (need(0.8, 8), FOUR, 0.005, ("more", 6, "low"), "target 5 ms: needs 6 cores, or more"),
        (need(0.8, 8), FOUR, 0.0025, ("more", 8, "low"), "target 2.5 ms: needs 8 cores, or more"),
        (need(1.0, 900), FOUR, 0.001, ("more", None, "low"), f"all 8 cores would hardly do, so it also takes {INSTEAD}"),
        (need(0.9, 8), WHOLE, 0.005, ("more", None, "high"), f"90 % of 32 SMs; its p99 is 9.95 ms, target 5 ms: {ALL}"),
        (need(0.3, 1.5, turned_away=7), FOUR, 0.005, ("more", 5, "low"), "refused or too late): needs 5 cores, or more"),
        (need(0.3, 1.5, 0, turned_away=7), FOUR, 0.005, ("more", 5, "low"), "needs 5 cores, or more"),
        (need(0.1, 1.5, 100), FOUR, 0.005, ("unknown", None, "none"), "100 requests are too few for a p99, 500 take 50 s"),
        (need(0.1, 1.5), FOUR, None, ("unknown", None, "none"), "p99 is 1.99 ms: no target_p99 to compare it with"),
        (need(0.0, 1.0, 0), FOUR, 0.005, ("unknown", None, "none"), "0 % of 4 cores: no requests in 10 s"),
    ],
)  # fmt: skip
def test_advice_is_a_sentence_with_its_numbers(
    found: Need, share: Share, target: float | None, advice: tuple[object, ...], said: str
) -> None:
    given = advise("acme", found, share, target)
    assert (given.verdict, given.granules, given.certainty) == advice
    assert given.text.startswith("acme uses ")
    assert given.text.endswith(said)


@given(needs, shares, targets)
def test_fewer_is_fewer_and_more_is_more_and_both_are_on_the_device(found: Need, share: Share, target: float) -> None:
    advice = advise("acme", found, share, target)
    match advice.verdict:
        case "fewer":
            assert advice.granules is not None
            assert share.least <= advice.granules < share.granules
        case "keep":
            assert advice.granules == share.granules
        case "more":
            assert advice.granules is None or share.granules < advice.granules <= share.total
        case "unknown":
            assert advice.granules is None
            assert found.requests < LEAST
    assert (advice.certainty == "none") == (advice.verdict == "unknown")


@given(needs, shares, targets)
def test_what_is_advised_keeps_the_target_by_the_estimate(found: Need, share: Share, target: float) -> None:
    advice = advise("acme", found, share, target)
    assume(advice.verdict in ("fewer", "more") and advice.granules is not None)
    assert advice.granules
    busy, p99 = found.with_share(advice.granules / share.granules)
    assert busy <= FULL
    assert p99 <= KEEPS * target


@given(needs, shares, targets, st.floats(1.0, 20.0))
def test_a_laxer_target_never_takes_more(found: Need, share: Share, target: float, times: float) -> None:
    strict, lax = advise("acme", found, share, target), advise("acme", found, share, target * times)
    assume("unknown" not in (strict.verdict, lax.verdict))
    assert (lax.granules or share.total + 1) <= (strict.granules or share.total + 1)


@given(st.floats(0.01, 0.9), st.floats(0.5, 100.0), targets, st.integers(1, 4))
def test_no_less_than_the_minimum_is_advised(busy: float, p99_ms: float, target: float, least: int) -> None:
    advice = advise("acme", need(busy, p99_ms), Share(4, 8, 1, "core", least), target)
    assert advice.granules is None or advice.granules >= least


@pytest.mark.parametrize(("target", "certainty"), [(0.01, "low"), (0.0113, "high")])
def test_fewer_is_less_certain_where_the_p99_may_be_at_the_end_of_its_bucket(target: float, certainty: str) -> None:
    """It is from 2 to 5 ms, 3.5 by the estimate; with half of the granules that is 7.9, and 5 would be 11.25."""
    buckets = dict.fromkeys((*BOUNDS, None), 0) | {10**6: 980, 5 * 10**6: 20}
    advice = advise("acme", Need(10.0, 0.1, 0.0, tuple(buckets.values())), FOUR, target)
    assert advice[:3] == ("fewer", 2, certainty)


@given(st.lists(st.integers(0, 50), min_size=len(BOUNDS) + 1, max_size=len(BOUNDS) + 1))
def test_the_p99_is_between_its_bounds(buckets: list[int]) -> None:
    found = Need(10.0, 0.5, 0.0, tuple(buckets))
    low, high = p99_between(found)
    if found.p99 is None:
        assert (low, high) == (0.0, None)
        return
    assert low <= found.p99
    within = [sum(buckets[: sum(bound <= end * 1e9 for bound in BOUNDS)]) for end in (low, high or low)]
    assert within[0] < 0.99 * found.requests
    assert high is None or within[1] >= 0.99 * found.requests
    assert (high is None) == (sum(buckets[:-1]) < 0.99 * found.requests)
