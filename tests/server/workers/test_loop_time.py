"""Which models may run on the event loop, decided from how long they took, without a clock."""

import re

from hypothesis import given
from hypothesis import strategies as st

from server.workers.loop_runs import BOUND, BUDGET, LoopTime

KEY = ("m/1#1", ((1, 4),))
SHORT = 10_000
NOW = 1_000_000_000


def proven(runs: int = 20, cores: int = 2) -> LoopTime:
    """A model has run so often on the thread, and was short each time."""
    spent = LoopTime(cores)
    for _ in range(runs):
        spent.learn(KEY, SHORT)
    return spent


def run(spent: LoopTime, now: int, duration: int = SHORT) -> int:
    """It runs on the event loop from `now` on; returns when it ends."""
    spent.took(KEY, now + duration, duration)
    return now + duration


def test_a_model_may_run_after_several_short_runs_and_not_before() -> None:
    spent, runs = LoopTime(2), 0
    while not spent.allows(KEY, NOW):
        spent.learn(KEY, SHORT)
        runs += 1
    assert 4 <= runs <= 10
    assert repr(spent) == "<LoopTime 1 of 1 models and shapes are short>"


def test_a_model_is_judged_for_its_shapes() -> None:
    spent = proven()
    assert not spent.allows(("m/1#1", ((8, 4),)), NOW)
    assert not spent.allows(("m/1#2", KEY[1]), NOW)


def test_a_slow_run_sends_a_model_away_at_once_and_for_longer_the_slower_it_was() -> None:
    back = []
    for slow in (2 * BOUND, 20 * BOUND, 200 * BOUND):
        spent, runs = proven(), 0
        run(spent, NOW, slow)
        while not spent.allows(KEY, 2 * NOW):
            spent.learn(KEY, SHORT)
            runs += 1
        back.append(runs)
    assert 4 <= back[0] < back[1] < back[2] < 50


def test_a_model_that_is_slow_now_and_then_does_not_come_back_after_its_mean() -> None:
    spent = proven()
    for _ in range(20):
        spent.learn(KEY, 50 * BOUND)
        for _ in range(9):
            spent.learn(KEY, SHORT)
        assert not spent.allows(KEY, NOW)


def test_a_burst_is_limited_and_half_of_the_time_that_passes_is_given_back() -> None:
    spent, now, runs = proven(), NOW, 0
    while spent.allows(KEY, now):
        now = run(spent, now)
        runs += 1
    assert BUDGET <= runs * SHORT <= 3 * BUDGET
    assert not spent.allows(KEY, now + SHORT // 2)
    assert spent.allows(KEY, now + 2 * SHORT)


@given(
    st.sampled_from([(1, 4 / 5), (2, 1 / 3), (8, 1 / 3)]),
    st.lists(st.tuples(st.integers(0, 3 * BUDGET), st.integers(1, BOUND)), max_size=200),
)
def test_over_any_stretch_models_take_at_most_their_share_and_the_budget(
    share: tuple[int, float], runs: list[tuple[int, int]]
) -> None:
    cores, most = share
    spent, now, taken = proven(60, cores), NOW, 0
    for pause, duration in runs:
        now += pause
        if spent.allows(KEY, now):
            now = run(spent, now, duration)
            taken += duration
        assert taken <= (now - NOW) * most + BUDGET + 2 * BOUND


def test_on_one_core_models_may_take_most_of_the_time_of_the_event_loop() -> None:
    """The thread would have no other core to run them on; with one, they are left to it."""
    allowed = []
    for cores in (1, 2):
        spent, now = proven(cores=cores), NOW
        ran = 0
        for _ in range(1000):
            if spent.allows(KEY, now):
                now = run(spent, now)
                ran += 1
            now += SHORT
        allowed.append(ran)
    assert allowed[0] == 1000
    assert 500 < allowed[1] < 700


def test_what_is_known_of_shapes_is_bounded() -> None:
    spent = LoopTime(2)
    for size in range(10_000):
        spent.learn(("m/1#1", ((size,),)), SHORT)
    assert re.fullmatch(r"<LoopTime \d+ of \d{3} models and shapes are short>", repr(spent))
