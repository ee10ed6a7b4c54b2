from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitions import DoesNotFit, PartitionError
from partitions.plan import Granules, assign, choose, choose_lent, movers, orders, rung

NAMES = st.sampled_from("abcdefgh")


@st.composite
def plans(draw: st.DrawFn, total: int) -> dict[str, int]:
    """Counts that fit into `total` granules, for some of eight tenants."""
    counts: dict[str, int] = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=total)):
        left = total - sum(counts.values())
        if left:
            counts[name] = draw(st.integers(1, left))
    return counts


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[dict[str, int]]]:
    total = draw(st.integers(1, 24))
    return total, draw(st.lists(plans(total), min_size=1, max_size=8))


def _steps(total: int, counts: list[dict[str, int]]) -> "list[tuple[dict[str, Granules], dict[str, Granules]]]":
    """What each holder held before and after each plan."""
    held: list[dict[str, Granules]] = [{}]
    for each in counts:
        held.append(assign(total, held[-1], each))
    return list(pairwise(held))


@given(histories())
def test_assigned_granules_never_overlap(history: tuple[int, list[dict[str, int]]]) -> None:
    total, counts = history
    for wanted, (_, after) in zip(counts, _steps(total, counts), strict=True):
        granules = [granule for held in after.values() for granule in held]
        assert len(set(granules)) == len(granules)
        assert set(granules) <= set(range(total))
        assert {name: len(held) for name, held in after.items()} == wanted


@given(histories())
def test_a_holder_whose_count_does_not_change_keeps_exactly_its_granules(
    history: tuple[int, list[dict[str, int]]],
) -> None:
    for before, after in _steps(*history):
        for name in before.keys() & after.keys():
            if len(before[name]) == len(after[name]):
                assert before[name] == after[name]


@given(histories())
def test_a_shrinking_holder_keeps_some_of_its_granules_and_a_growing_one_all(
    history: tuple[int, list[dict[str, int]]],
) -> None:
    for before, after in _steps(*history):
        for name in before.keys() & after.keys():
            smaller, larger = sorted((before[name], after[name]), key=len)
            assert set(smaller) <= set(larger)


@given(histories())
def test_exactly_the_holders_whose_count_changes_move(history: tuple[int, list[dict[str, int]]]) -> None:
    for before, after in _steps(*history):
        changed = [name for name in {*before, *after} if len(before.get(name, ())) != len(after.get(name, ()))]
        assert movers(before, after) == tuple(sorted(changed))


def test_granules_given_up_are_available_to_others_in_the_same_plan() -> None:
    before = assign(4, {}, {"acme": 3, "globex": 1})
    assert assign(4, before, {"acme": 1, "globex": 3}) == {"acme": (0,), "globex": (1, 2, 3)}


def test_a_plan_that_does_not_fit_is_refused_with_the_sum() -> None:
    with pytest.raises(DoesNotFit) as caught:
        assign(15, {}, {"acme": 9, "globex": 7, "initech": 1})
    assert str(caught.value) == "acme 9 + globex 7 + initech 1 = 17 granules, but the device has 15: 2 too many"
    with pytest.raises(DoesNotFit, match=r"^acme 3 granules, but the device has 2: 1 too many$"):
        assign(2, {}, {"acme": 3})


@given(st.integers(1, 30), st.dictionaries(NAMES, st.integers(1, 30), min_size=1))
def test_a_plan_is_refused_exactly_when_its_sum_exceeds_the_device(total: int, counts: dict[str, int]) -> None:
    wanted = sum(counts.values())
    if wanted <= total:
        assert sum(map(len, assign(total, {}, counts).values())) == wanted
    else:
        with pytest.raises(DoesNotFit, match=f"{wanted} granules, but the device has {total}: {wanted - total} too many"):
            assign(total, {}, counts)


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_one_is_refused_with_its_holder_s_name(count: int) -> None:
    with pytest.raises(ValueError, match=f"globex: {count} granules; every tenant needs at least 1"):
        assign(4, {}, {"acme": 1, "globex": count})


@pytest.mark.parametrize(
    ("granules", "count", "text"),
    [
        ([], 4, "no granules were named; the device has 4, from 0 to 3"),
        ([4], 4, "granule 4 of [4] is not there; the device has 4, from 0 to 3"),
        ([0, -1, 9], 4, "granules -1, 9 of [0, -1, 9] are not there; the device has 4, from 0 to 3"),
        ([2, 0, 2], 4, "granule 2 of [2, 0, 2] is named more than once; expected each once"),
        ([1, 0, 1, 0], 4, "granules 0, 1 of [1, 0, 1, 0] are named more than once; expected each once"),
        ([1], 1, "granule 1 of [1] is not there; the device has 1, number 0"),
    ],
)
def test_granules_that_cannot_be_had_are_named_with_what_there_is(granules: list[int], count: int, text: str) -> None:
    with pytest.raises(PartitionError) as caught:
        choose(granules, count)
    assert str(caught.value) == text


@pytest.mark.parametrize("granules", [0, None, 1.5, "0", [0.0], ["0"], [None]])
def test_arguments_other_than_lists_of_numbers_are_a_type_error_with_an_example(granules: Any) -> None:
    with pytest.raises(TypeError) as caught:
        choose(granules, 4)
    assert str(caught.value) == f"granules are named by a list of their numbers, such as [0, 1]; got {granules!r}"


@st.composite
def pairs(draw: st.DrawFn) -> tuple[int, int, int]:
    total = draw(st.integers(2, 24))
    first = draw(st.integers(1, total - 1))
    return total, first, draw(st.integers(1, total - first))


@given(pairs(), st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), max_size=8))
def test_two_holders_have_the_same_granules_whenever_they_have_the_same_number(
    pair: tuple[int, int, int], history: list[tuple[int, int]]
) -> None:
    total, *counts = pair
    names = ("a", "b")
    held = assign(total, {}, dict(zip(names, counts, strict=True)))
    order = orders(total, held)
    for wanted in history:
        if sum(wanted) <= total:
            before, held = held, assign(total, held, dict(zip(names, wanted, strict=True)), order)
            for name, count in zip(names, wanted, strict=True):
                assert held[name] == tuple(sorted(order[name][:count])) == rung(before[name], order[name], count)


@given(histories())
def test_orders_break_none_of_the_other_rules(history: tuple[int, list[dict[str, int]]]) -> None:
    total, plans = history
    held: dict[str, Granules] = assign(total, {}, plans[0])
    order = orders(total, held)
    for counts in plans:
        before, held = held, assign(total, held, counts, order)
        granules = [granule for each in held.values() for granule in each]
        assert len(set(granules)) == len(granules)
        assert {name: len(each) for name, each in held.items()} == counts
        for name in held.keys() & before.keys():
            assert set(held[name]) <= set(before[name]) or set(before[name]) <= set(held[name])


@given(histories(), st.integers(1, 24), st.integers(1, 24))
def test_the_rungs_of_a_ladder_are_nested(history: tuple[int, list[dict[str, int]]], one: int, other: int) -> None:
    total, plans = history
    own = assign(total, {}, plans[0])
    narrow, wide = sorted((min(one, total), min(other, total)))
    for name, order in orders(total, own).items():
        assert set(order) == set(range(total))
        held = assign(total, own, plans[-1], orders(total, own)).get(name, own[name])
        assert set(rung(held, order, narrow)) <= set(rung(held, order, wide))
        assert len(rung(held, order, wide)) == wide
        assert rung(held, order, len(held)) == held


def test_random_changes_give_a_holder_few_different_sets_of_granules() -> None:
    """A GPU keeps a context of 4 MiB for each set that a partition ever had, until its process ends."""
    random, names = Random(1), [f"tenant {number}" for number in range(8)]
    held = assign(16, {}, dict.fromkeys(names, 2))
    order, seen = orders(16, held), {name: {granules} for name, granules in held.items()}
    for _ in range(10_000):
        some = random.sample(names, random.randint(2, len(names)))
        counts = {name: 1 if name in some else len(granules) for name, granules in held.items()}
        for _ in range(random.randint(0, 16 - sum(counts.values()))):
            counts[random.choice(some)] += 1
        held = assign(16, held, counts, order)
        for name, granules in held.items():
            seen[name].add(granules)
    assert max(map(len, seen.values())) <= 150


def test_a_holder_grows_into_free_granules_and_then_into_the_last_of_the_largest() -> None:
    own = {"a": (0, 1), "b": (2, 3), "c": (4, 5, 6)}
    assert orders(9, own)["c"] == (4, 5, 6, 7, 8, 1, 0, 3, 2)
    assert orders(9, own)["a"] == (0, 1, 8, 7, 6, 5, 4, 3, 2)


def test_lent_granules_are_in_the_partition_once_and_never_all_of_it() -> None:
    assert choose_lent([5, 3], [2, 3, 5]) == (3, 5)
    for lent, error in (
        ([2, 3, 5], r"all granules of \[2, 3, 5\] are lent; expected at least one that is the holder's own"),
        ([4], "lent granule 4 of .* is not in the partition"),
        ([3, 3], "lent granule 3 of .* is named more than once"),
    ):
        with pytest.raises(PartitionError, match=error):
            choose_lent(lent, [2, 3, 5])
