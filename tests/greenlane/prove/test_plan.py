"""What is measured in the time there is, and where its clients run."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenlane.prove.attacks import KINDS
from greenlane.prove.confinement import Located
from greenlane.prove.measure import Places, place
from greenlane.prove.plan import AHEAD, FEWEST, GAP, LEAST, PHASES, Pair, needed, pairs, plan, steps
from partitions.strain import STRAINS

TENANTS = st.integers(2, 8).map(lambda count: {f"t{number}": "0" for number in range(count)})


@given(TENANTS, st.floats(1, 300))
def test_every_pair_is_either_measured_or_said_to_be_left_out_and_the_time_is_kept(
    tenants: dict[str, str], seconds: float
) -> None:
    wanted = pairs(tenants)
    found = plan(wanted, dict.fromkeys(tenants, KINDS), seconds)
    assert [*found.pairs, *found.left_out] == wanted
    assert len(found.pairs) == 1 or found.seconds <= seconds
    assert found.rounds >= (LEAST if len(found.pairs) == 1 else FEWEST)
    assert all(kinds for kinds in found.kinds.values())


@given(TENANTS)
def test_as_many_seconds_as_are_needed_are_enough_for_every_pair(tenants: dict[str, str]) -> None:
    wanted = pairs(tenants)
    assert not plan(wanted, dict.fromkeys(tenants, KINDS), needed(wanted) + 0.01).left_out


@given(TENANTS)
def test_the_first_pairs_have_every_tenant_once_as_the_victim(tenants: dict[str, str]) -> None:
    wanted = pairs(tenants)
    assert [pair.victim for pair in wanted[: len(tenants)]] == list(tenants)
    assert len(set(wanted)) == len(tenants) * (len(tenants) - 1)
    assert all(pair.victim != pair.aggressor for pair in wanted)


def test_a_minute_has_time_for_three_kinds_beside_each_of_two_tenants() -> None:
    two = {"a": "0", "b": "0"}
    found = plan(pairs(two), dict.fromkeys(two, KINDS), 56)
    assert not found.left_out
    assert {len(kinds) for kinds in found.kinds.values()} == {3}


def test_a_third_of_a_minute_has_time_for_four_strains_of_the_first_pair() -> None:
    (first, *_) = pairs({"a": "0", "b": "0"})
    found = plan([first], {"b": STRAINS}, 20.0, LEAST)
    assert (found.kinds[first], found.rounds) == (STRAINS[:4], 2)
    assert found.seconds <= 20


def test_neighbours_of_the_same_device_come_first_and_one_victim_can_be_asked_for() -> None:
    found = pairs({"a": "0", "b": "1", "c": "0"})
    assert found[:2] == [Pair("c", "a"), Pair("a", "c")]
    assert pairs({"a": "0", "b": "1", "c": "0"}, only="b") == [Pair("b", "c"), Pair("b", "a")]
    assert pairs({"a": "0"}) == []


@given(st.integers(1, 5), st.integers(1, 6))
def test_phases_take_turns_and_never_overlap(kinds: int, rounds: int) -> None:
    found = steps(KINDS[:kinds], rounds)
    assert len(found) == kinds * rounds * len(PHASES)
    assert all(later.begin - AHEAD > earlier.end for earlier, later in pairwise(found))
    assert found[0].begin == GAP
    assert [step.which for step in found] == list(PHASES) * (kinds * rounds)


def located(tenant: str, *cores: int, unit: str = "core") -> Located:
    return Located(tenant, unit, cores, "isolated", "")


@pytest.mark.parametrize(
    ("units", "served", "every", "places"),
    [
        ([located("a", 0), located("b", 1)], {}, [0, 1], Places((0,), (1,))),
        ([located("a", 0, 1), located("b", 2, 3)], {}, [0, 1, 2, 3, 4, 5], Places((4,), (5,), apart=True)),
        ([located("a", 0), located("b", 1)], {"a": frozenset({2, 3})}, [0, 1, 2, 3], Places((0,), (1,))),
        ([located("a", 5, unit="SM"), located("b", 6, unit="SM")], {"a": frozenset({0, 1})}, [0, 1], Places()),
    ],
)
def test_clients_run_on_cores_of_no_tenant_or_else_on_their_own_tenants(
    units: list[Located], served: dict[str, frozenset[int]], every: list[int], places: Places
) -> None:
    assert place(Pair("a", "b"), units, served, every) == places
