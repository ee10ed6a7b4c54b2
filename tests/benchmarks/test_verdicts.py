"""From figures to verdicts of the published experiment."""

import math

import pytest

from benchmarks.verdicts import ALONE, CONTROL, CONTROL_ALONE, KINDS, UNDER, Combination, Phase, decide, judge, medians, ratio
from greenlane.load.figures import Figures, Samples


def flat(p99: float, failed: int = 0) -> Figures:
    return Figures(100, failed, p99 / 2, p99, p99 * 2, p99 * 2)


def phase(kind: str, *latencies: float, turn: int = 0, wrong: int = 0) -> Phase:
    return Phase(kind, turn, 0.0, Samples([0.0] * len(latencies), list(latencies), [200] * len(latencies)), wrong=wrong)


@pytest.mark.parametrize(
    ("held", "control", "failed", "wrong", "word"),
    [
        (1.1, 4.0, 0, 0, "isolated"),
        (1.3, 1.2, 0, 0, "isolated"),
        (1.1, 1.1, 0, 0, "not exercised"),
        (2.0, 1.0, 0, 0, "leaks"),
        (2.0, 9.0, 0, 0, "leaks"),
        (math.nan, 9.0, 0, 0, "leaks"),
        (1.0, math.nan, 0, 0, "no control"),
        (1.0, 9.0, 1, 0, "FAILED"),
        (1.0, 9.0, 1, 1, "WRONG"),
    ],
)
def test_verdicts_follow_from_the_ratios(held: float, control: float, failed: int, wrong: int, word: str) -> None:
    found, why = decide(held, control, failed, wrong, bound=1.3)
    assert found == word
    assert why


def test_the_control_is_compared_with_itself_alone() -> None:
    rounds = {ALONE: [flat(10)], UNDER: [flat(12)], CONTROL_ALONE: [flat(5)], CONTROL: [flat(20)]}
    verdict = judge("mlp", "small", rounds, wrong=0, bound=1.3)
    assert verdict.ratios["p99"] == pytest.approx(1.2)
    assert verdict.control_ratio == pytest.approx(4)
    assert verdict.word == "isolated"


@pytest.mark.parametrize(("under", "word"), [([flat(11), flat(91)], "too noisy"), ([flat(120), flat(140)], "leaks")])
def test_with_an_unsteady_baseline_only_ratios_beyond_it_are_a_leak(under: list[Figures], word: str) -> None:
    rounds = {ALONE: [flat(10), flat(90)], UNDER: under, CONTROL_ALONE: [flat(5)] * 2, CONTROL: [flat(20)] * 2}
    verdict = judge("mlp", "small", rounds, wrong=0, bound=1.3)
    assert (verdict.word, verdict.spread) == (word, 5)


def test_a_wrong_answer_in_any_phase_spoils_the_verdict() -> None:
    phases = tuple(phase(kind, 1, wrong=int(kind == CONTROL)) for kind in KINDS)
    assert Combination("mlp", "small", phases, bound=1.3).verdict().word == "WRONG"


def test_medians_are_over_rounds_and_counts_are_sums() -> None:
    assert medians([flat(10), flat(1000, failed=1), flat(30)]) == Figures(300, 1, 15, 30, 60, 60)


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_not_the_ratio_of_medians() -> None:
    assert ratio([flat(10), flat(60), flat(90)], [flat(10), flat(20), flat(90)], "p99") == 1
    assert math.isnan(ratio([], [], "p99"))
