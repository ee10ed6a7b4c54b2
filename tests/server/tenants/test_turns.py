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


def test_the_order_is_even_and_always_the_same() -> None:
    turns = [Turns({"1": 0.75, "2": 0.25, "3": 0}) for _ in range(2)]
    orders = ["".join(each.next() for _ in range(8)) for each in turns]
    assert orders == ["11211121"] * 2
    one = Turns({"1": 5, "2": 1, "3": 1})
    assert (one.period, "".join(one.next() for _ in range(7))) == (7, "1121311")


def test_a_tenth_is_a_tenth() -> None:
    """In binary 0.9 and 0.1 are neither, so shares of those would not come out even."""
    turns = Turns({"1": 0.9, "2": 0.1})
    assert (turns.period, Counter(turns.next() for _ in range(10))) == (10, {"1": 9, "2": 1})
