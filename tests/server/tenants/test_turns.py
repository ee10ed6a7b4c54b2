"""Requests are shared out by weights: exactly, evenly, and always in the same order."""

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from server.tenants.catalog import Turns

WEIGHTS = st.dictionaries(
    st.sampled_from("12345"), st.one_of(st.integers(0, 20), st.sampled_from([0.1, 0.25, 0.5, 0.9, 1.5])), min_size=1
).filter(lambda weights: any(weights.values()))


@given(WEIGHTS, st.integers(1, 300))
def test_no_name_is_ever_a_turn_above_its_share_and_after_each_period_all_have_theirs(
    weights: dict[str, float], turns: int
) -> None:
    found, whole = Turns(weights), sum(Fraction(repr(weight)) for weight in weights.values())
    counts: Counter[str] = Counter()
    for turn in range(1, turns + 1):
        counts[found.next()] += 1
        for name, weight in weights.items():
            ahead = counts[name] - turn * Fraction(repr(weight)) / whole
            assert ahead < 1
            if turn % found.period == 0:
                assert ahead == 0
