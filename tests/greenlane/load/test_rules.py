"""Verdicts and the intervals that they rest on: by properties, and by simulated samples, whose truth is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenlane.load.figures import Samples
from greenlane.load.intervals import UNKNOWN, Interval, blocks, growth
from greenlane.load.rules import BUSY, ENOUGH, NO_GROWTH, OTHERS, SOME, SURE, WORDS, Growth, decide, quantile_for, rule, worst

RATE, SECONDS, ROUNDS = 250.0, 0.5, 4
MORE_ALONE = 3
"""The victim is timed alone before every attack, so that there is more of that."""


def phase(
    draw: np.random.Generator, scale: float, seconds: float = SECONDS, stalls: float = 0.0, rate: float = RATE
) -> Samples:
    """Latencies about `scale` microseconds, and stalls of 10 ms, so many a second, which delay all that is due meanwhile."""
    due = np.sort(draw.uniform(0, seconds, draw.poisson(RATE * seconds)))
    latency = scale * draw.lognormal(0, 0.3, len(due))
    for at in draw.uniform(0, seconds, draw.poisson(stalls * seconds)):
        met = (due >= at) & (due < at + 0.01)
        latency[met] += (at + 0.01 - due[met]) * 1e6
    return Samples(due.tolist(), latency.tolist(), [200] * len(due))


def word(seed: int, beside: float, control: float, stalls: float = 0.0, busy: float = 1.0) -> str:
    """The verdict of a simulated experiment in which latency grows by these factors."""
    draw = np.random.default_rng(seed)
    alone = [phase(draw, 1000, MORE_ALONE * SECONDS, stalls) for _ in range(ROUNDS)]
    under, shared = ([phase(draw, 1000 * scale, SECONDS, stalls) for _ in range(ROUNDS)] for scale in (beside, control))
    return rule(alone, under, shared, busy)[0].word


def test_a_leak_of_one_and_a_half_is_found() -> None:
    assert {word(seed, beside=1.5, control=5) for seed in range(8)} == {"leaks"}


def test_no_leak_is_called_isolated_and_never_leaks() -> None:
    words = [word(seed, beside=1, control=5) for seed in range(8)]
    assert set(words) <= {"isolated", "too noisy"}
    assert words.count("isolated") >= 6


def test_noise_is_not_called_a_leak() -> None:
    words = [word(seed, beside=1, control=20, stalls=1.0) for seed in range(8)]
    assert "leaks" not in words
    assert "too noisy" in words


def test_a_control_that_does_not_leak_is_not_exercised() -> None:
    assert {word(seed, beside=1, control=1) for seed in range(4)} == {"not exercised"}


def test_an_aggressor_that_does_little_is_not_exercised_unless_it_leaks() -> None:
    assert word(1, beside=1, control=5, busy=BUSY / 2) == "not exercised"
    assert word(1, beside=2, control=5, busy=BUSY / 2) == "leaks"


@given(st.floats(0.2, 5))
def test_growth_is_the_factor_by_which_all_latencies_grew(factor: float) -> None:
    draw = np.random.default_rng(3)
    before = [phase(draw, 1000) for _ in range(2)]
    after = [Samples(each.due, [one * factor for one in each.latency], each.status) for each in before]
    found = growth(before, after, 0.5)
    assert found.value == pytest.approx(factor)
    assert found.low <= factor * 1.0001
    assert found.high >= factor * 0.9999


def test_rounds_without_requests_on_one_side_are_left_out_and_growth_of_nothing_is_unknown() -> None:
    one = phase(np.random.default_rng(1), 1000)
    assert growth([one], [Samples()], 0.5) is UNKNOWN
    assert growth([one, one], [one, Samples()], 0.5).value == 1
    assert growth([], [], 0.5) is UNKNOWN


def test_blocks_have_every_latency_once() -> None:
    one = phase(np.random.default_rng(1), 1000)
    assert sorted(np.concatenate(blocks(one))) == sorted(one.latency)


@given(*[st.tuples(st.floats(0.5, 5), st.floats(0, 2), st.floats(0, 2))] * 2, st.floats(0, 1), st.integers(0, 2))
def test_isolated_needs_a_control_that_leaks_and_an_interval_below_the_bound(
    held: tuple[float, float, float], shared: tuple[float, float, float], busy: float, failed: int
) -> None:
    def grown(value: float, below: float, above: float) -> Growth:
        each = Interval(value, value - below, value + above)
        return Growth(0.99, each, each)

    found = decide(grown(*held), grown(*shared), (0, failed, 0), busy, 0.0, 1.3).word
    if found == "isolated":
        assert held[0] + held[2] <= 1.3
        assert shared[0] > 1.3
        assert shared[0] - shared[1] > SURE
        assert busy >= BUSY
        assert not failed
    if failed:
        assert found == "leaks"


def test_failures_alone_prove_nothing_and_those_of_the_control_are_its_leak() -> None:
    steady = Growth(0.99, Interval(1, 0.9, 1.1), Interval(1, 0.9, 1.1))
    assert decide(steady, steady, (1, 5, 5), 1.0, 0.0, 1.3).word == "not exercised"
    assert decide(steady, steady, (1, 0, 0), 1.0, 2 * OTHERS, 1.3).word == "too noisy"
    assert decide(steady, steady, (0, 0, 5), 1.0, 0.0, 1.3).word == "isolated"
    assert decide(NO_GROWTH, NO_GROWTH, (0, 0, 0), 1.0, 0.0, 1.3).word == "too noisy"


def test_the_tail_is_one_that_so_many_requests_can_show() -> None:
    assert [quantile_for(count) for count in (ENOUGH, ENOUGH - 1, SOME, SOME - 1)] == [0.99, 0.9, 0.9, None]


@given(st.lists(st.sampled_from(WORDS), min_size=1))
def test_the_worst_of_several_is_one_of_them_and_isolated_only_if_all_are(words: list[str]) -> None:
    found = worst(words)  # type: ignore[arg-type]
    assert found in words
    assert (found == "isolated") == all(each == "isolated" for each in words)
    assert worst([]) == "not exercised"


def test_what_other_programs_may_have_caused_is_not_called_a_leak() -> None:
    slower = Growth(0.99, Interval(2, 1.9, 2.1), Interval(2, 1.9, 2.1))
    for failed in ((0, 3, 0), (0, 0, 0)):
        assert decide(slower, slower, failed, 1.0, OTHERS, 1.3).word == "leaks"
        found = decide(slower, slower, failed, 1.0, 2 * OTHERS, 1.3)
        assert found.word == "too noisy"
        assert "stop them" in found.why


def test_a_leak_that_all_requests_feel_in_every_round_is_one_beside_a_little_of_other_programs() -> None:
    draw = np.random.default_rng(5)
    alone, control = ([phase(draw, 1000 * scale) for _ in range(ROUNDS)] for scale in (1, 5))
    all_slow, one_calm = ([phase(draw, 1000 * scale) for scale in scales] for scales in ((6, 6, 6, 6), (6, 6, 1, 6)))
    few = [
        Samples(one.due, [took * (8 if n % 10 == 0 else 1) for n, took in enumerate(one.latency)], one.status) for one in alone
    ]

    def found(beside: list[Samples], others: float) -> str:
        return rule(alone, beside, control, 1.0, others)[0].word

    assert found(all_slow, 2 * OTHERS) == "leaks"
    assert found(all_slow, 0.5) == "too noisy"  # They may be what all requests waited for.
    assert found(one_calm, 2 * OTHERS) == "too noisy"
    assert found(few, 2 * OTHERS) == "too noisy"
