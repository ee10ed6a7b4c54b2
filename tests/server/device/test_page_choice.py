"""Which models are paged out: properties over any residents."""

from hypothesis import given
from hypothesis import strategies as st

from server.device.pager import Resident, choose

RESIDENT = st.builds(Resident, st.uuids().map(str), st.integers(0, 50), st.integers(0, 5))
RESIDENTS = st.lists(RESIDENT, max_size=12, unique_by=lambda each: each.model)


@given(RESIDENTS, st.integers(-10, 200))
def test_what_is_chosen_is_enough_and_nothing_of_it_is_superfluous(residents: list[Resident], missing: int) -> None:
    chosen = choose(residents, missing)
    total = sum(each.nbytes for each in residents)
    assert (chosen is None) == (total < missing)
    if chosen is not None:
        freed = sum(each.nbytes for each in chosen)
        assert freed >= missing
        assert all(freed - each.nbytes < missing for each in chosen)
        assert set(chosen) <= set(residents)


@given(RESIDENTS, st.integers(1, 200))
def test_a_model_that_stays_was_used_later_or_would_not_have_been_enough_instead(
    residents: list[Resident], missing: int
) -> None:
    """The least recently used go first: one that stays is not older than all that go, unless it is too small to matter."""
    chosen = choose(residents, missing)
    if chosen:
        newest = max(each.used for each in chosen)
        for each in set(residents) - set(chosen):
            if each.used < newest:
                others = sum(other.nbytes for other in chosen if other.used <= newest) - max(
                    other.nbytes for other in chosen if other.used == newest
                )
                assert others + each.nbytes < missing or each.nbytes == 0


def test_models_that_were_never_used_go_in_the_order_given() -> None:
    residents = [Resident(name, 10, 0) for name in "abc"]
    assert [each.model for each in choose(residents, 15) or ()] == ["a", "b"]


def test_a_small_old_model_stays_if_a_large_one_has_to_go_anyway() -> None:
    residents = [Resident("small", 1, 0), Resident("large", 100, 5), Resident("last", 100, 9)]
    assert [each.model for each in choose(residents, 90) or ()] == ["large"]
