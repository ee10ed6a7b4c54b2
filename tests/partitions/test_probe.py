from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitions import Misplaced, Partition, probe
from partitions.base import Held
from tests.fakes import FakeDevice, FakePartition


def _partitions() -> tuple[FakeDevice, dict[str, Partition]]:
    device = FakeDevice((2, 2, 4))
    return device, {name: device.carve([granule]) for granule, name in enumerate(("acme", "globex", "initech"))}


def _check(device: FakeDevice, partitions: dict[str, Partition], lie: dict[int, set[int]]) -> None:
    def answer(partition: FakePartition) -> frozenset[int]:
        return frozenset(lie.get(partition.granules[0], partition.units))

    device.lie = answer
    probe.check(partitions, probe.locate(partitions))


def test_an_overlap_is_named_with_both_partitions_and_the_units() -> None:
    with pytest.raises(Misplaced, match=r"^acme and initech both ran on 0, 1$"):
        _check(*_partitions(), lie={2: {1, 0, 4}})


def test_a_partition_outside_its_units_is_named_with_what_it_was_granted() -> None:
    with pytest.raises(Misplaced, match=r"^globex ran on 3 units \(2, 3, 9\), but was granted 2$"):
        _check(*_partitions(), lie={1: {2, 3, 9}})


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(Misplaced) as caught:
        _check(*_partitions(), lie={1: {3, 4, 5}})
    assert str(caught.value) == ("globex ran on 3 units (3, 4, 5), but was granted 2; globex and initech both ran on 4, 5")


def test_overlaps_are_listed_by_pair_in_the_order_of_their_names() -> None:
    placements = {"c": frozenset({1, 2}), "a": frozenset({1}), "b": frozenset({2, 3}), "d": frozenset({9})}
    assert probe.overlaps(placements) == [("a", "c", frozenset({1})), ("b", "c", frozenset({2}))]


@given(st.dictionaries(st.sampled_from("abcd"), st.frozensets(st.integers(0, 5))), st.sets(st.sampled_from("abcde")))
def test_all_overlaps_are_found_but_those_of_two_that_were_apart_before(
    placements: dict[str, frozenset[int]], apart: set[str]
) -> None:
    found = probe.overlaps(placements)
    assert found == [
        (a, b, placements[a] & placements[b]) for a, b in combinations(sorted(placements), 2) if placements[a] & placements[b]
    ]
    assert probe.overlaps(placements, apart=apart) == [each for each in found if not {*each[:2]} <= apart]


def test_those_that_were_held_and_had_no_time_with_all_units_are_scattered() -> None:
    held = {"a": Held(8, 100, 300), "b": Held(8, 300, 300), "c": Held(8, 300, 100)}
    assert probe.scattered({**held, "d": frozenset({1}), "e": frozenset()}) == {"b", "c"}


def test_partitions_that_had_all_their_units_at_the_same_time_are_apart() -> None:
    assert probe.overlaps({"a": Held(8, 100, 300), "b": Held(8, 200, 400), "c": Held(20, 250, 260)}) == []


@pytest.mark.parametrize("late", [Held(8, 300, 400), Held(8, 500, 900), Held(8, 250, 250), Held(8, 260, 240)])
def test_a_partition_that_had_its_units_at_another_time_may_share_some(late: Held) -> None:
    held = {"a": Held(8, 100, 300), "b": late}
    assert probe.overlaps(held) == [("a", "b", frozenset())]
    with pytest.raises(Misplaced, match=r"^a and b did not have all their units at the same time, so they share some, or"):
        probe.check(dict.fromkeys(held, FakeDevice((8,)).carve([0])), held)


def test_partitions_are_apart_that_had_all_their_units_at_the_same_time_in_one_of_some_looks() -> None:
    first = {"a": Held(8, 100, 300), "b": Held(8, 300, 500), "c": Held(8, 300, 500), "d": Held(8, 900, 990)}
    second = {"a": Held(8, 2100, 2300), "b": Held(8, 2200, 2400)}
    assert probe.overlaps(first, second) == [(a, b, frozenset()) for a, b in ("ac", "ad", "bd", "cd")]
    assert probe.overlaps() == []


def test_units_and_times_are_not_compared() -> None:
    with pytest.raises(TypeError, match="locate all, or hold all"):
        probe.overlaps({"a": Held(8, 100, 300), "b": frozenset({1})})
