"""Plans of fences: how narrow a placement has to be, and what is said where there is none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitions.base import Bandwidth
from server.config.tenant import TenantConfig
from server.control.fence import Fence, Narrowing, describe, plan_fences

MOVES = Bandwidth(memory=3_352 * 10**9, unit=125 * 10**9, pcie=63 * 10**9)
"""One granule of 8 SMs draws 1 TB/s."""
SIZES = [8] * 16


def plan(
    homes: dict[str, tuple[int, ...]], moves: Bandwidth | None = MOVES, unit: int = 0, **keys: dict[str, Any]
) -> dict[str, Fence]:
    """`unit` is what was seen that acme's models draw of one."""
    tenants = {name: TenantConfig(name=name, granules=1, models=("*",), **keys.get(name, {})) for name in homes}
    return plan_fences(tenants, homes, SIZES, "SM", moves, seen={"acme": Narrowing(unit)})


@pytest.mark.parametrize(
    ("value", "granules"),
    [(0.4, (2,)), (0.6, (2, 3)), (2_500 * 10**9, (2, 3)), (3 * 10**12, (2, 3, 4)), (0.99, (2, 3, 4)), ("auto", (2,))],
)
def test_a_narrow_placement_has_the_first_granules_that_cannot_draw_more(value: Any, granules: tuple[int, ...]) -> None:
    homes = {"acme": (2, 3, 4, 5, 6, 7, 8, 9), "globex": (0, 1)}
    found = plan(homes, acme={"memory_bandwidth": value})
    assert found["acme"].granules == granules
    assert (found["acme"].neighbours, found["acme"].pcie, found["acme"].notes) == (("globex",), 0, ())
    assert found.keys() == {"acme"}


def test_a_larger_granule_draws_more() -> None:
    """As the last one of an H100, which has 20 SMs."""
    tenants = {
        name: TenantConfig(name=name, granules=2, models=("*",), memory_bandwidth="2.5TB/s") for name in ("acme", "globex")
    }
    homes = {"acme": (0, 3), "globex": (1, 2)}
    found = plan_fences(tenants, homes, [8, 8, 8, 20], "SM", MOVES)
    assert (found["acme"].granules, found["globex"].granules) == ((0,), ())


def test_a_home_that_cannot_draw_more_needs_none() -> None:
    fence = plan({"acme": (0, 1), "globex": (2,)}, acme={"memory_bandwidth": "2TB/s", "pcie": 0.5})["acme"]
    assert (fence.granules, fence.memory, fence.pcie) == ((), 2 * 10**12, 315 * 10**8)
    assert fence.notes == (
        "it needs no narrower placement: its 16 SMs draw 2 TB/s at most, and its memory_bandwidth is 2 TB/s",
    )


def test_who_borrows_has_one_of_its_whole_home_so_as_not_to_draw_more_on_granules_of_others() -> None:
    for unit in (0, 60 * 10**9):
        fence = plan({"acme": (0, 1), "globex": (2,)}, unit=unit, acme={"memory_bandwidth": "2TB/s", "burst": 4})["acme"]
        assert (fence.granules, fence.memory, fence.paced, fence.notes) == ((0, 1), 2 * 10**12, 0, ())
    fence = plan({"acme": (3,), "globex": (2,)}, acme={"memory_bandwidth": 0.1, "burst": 4})["acme"]
    assert (fence.granules, fence.memory) == ((3,), 10**12)
    assert fence.notes == (
        "its memory_bandwidth is 335.2 GB/s, but one granule (8 SMs) draws 1 TB/s at most: works that draw more run on that, "
        "and are held to that",
    )


def test_one_granule_cannot_be_narrowed_and_its_pcie_is_held_all_the_same() -> None:
    keys, homes = {"memory_bandwidth": 0.1, "pcie": "20GB/s"}, {"acme": (3,), "globex": (2,)}
    assert plan(homes, unit=60 * 10**9, acme=keys) == plan(homes, acme=keys), "whatever was seen of its models"
    fence = plan(homes, acme=keys)["acme"]
    assert (fence.memory, fence.granules, fence.pcie) == (0, (), 20 * 10**9)
    assert fence.notes == (
        "it has one granule, which cannot be narrowed: its 8 SMs draw 1 TB/s at most, and its memory_bandwidth is 335.2 GB/s",
    )


def test_less_than_a_granule_draws_is_held_to_what_one_draws() -> None:
    fence = plan({"acme": (3, 4), "globex": (2,)}, acme={"memory_bandwidth": "auto"})["acme"]
    assert (fence.granules, fence.memory) == ((3,), 419 * 10**9)
    assert fence.notes == (
        "its memory_bandwidth is 419 GB/s, but one granule (8 SMs) draws 1 TB/s at most: works that draw more run on that, "
        "and are held to that",
    )


@pytest.mark.parametrize("moves", [None, MOVES._replace(pcie=0)])
def test_what_is_not_known_of_a_device_holds_nothing_back_and_is_said(moves: Bandwidth | None) -> None:
    fence = plan({"acme": (3, 4), "globex": (2,)}, moves, acme={"memory_bandwidth": "2TB/s", "pcie": "1GB/s"})["acme"]
    assert (fence.granules, fence.pcie) == ((), 0)
    assert "its pcie holds nothing back: what this device moves is not known" in fence.notes
    assert ("its memory_bandwidth holds nothing back: what this device moves is not known" in fence.notes) == (moves is None)


def test_what_is_enforced_is_described_with_the_means() -> None:
    fence = plan({"acme": (3, 4, 5), "globex": (2,)}, acme={"memory_bandwidth": 0.6, "pcie": 0.5})["acme"]
    assert list(describe(fence, "SM", SIZES, MOVES)) == [
        "memory bandwidth while others are at work: 2.011 TB/s of 3.352 TB/s; models that draw more run on granules [3, 4], "
        "whose 16 SMs draw 2 TB/s at most",
        "PCIe while others are at work: 31.5 GB/s each way of 63 GB/s; inferences start no sooner than their inputs and "
        "outputs allow",
    ]
    assert not list(describe(fence._replace(granules=(), pcie=0), "SM", SIZES, MOVES))


@pytest.mark.parametrize(
    ("seen", "granules", "paced"),
    [
        (Narrowing(60 * 10**9), (2, 3, 4, 5, 6), True),
        (Narrowing(125 * 10**9), (2, 3, 4), True),
        (Narrowing(10**12), (2, 3, 4), True),  # More than there is.
        (Narrowing(10**9), (2, 3, 4, 5, 6, 7, 8), True),  # Works that draw too much are never at home.
        (Narrowing(), (2, 3), False),
        (Narrowing(60 * 10**9, single=True), (2,), False),
        (Narrowing(single=True), (2,), False),
    ],
)
def test_a_placement_is_as_wide_as_what_was_seen_of_its_models_fills(
    seen: Narrowing, granules: tuple[int, ...], paced: bool
) -> None:
    homes, keys = {"acme": (2, 3, 4, 5, 6, 7, 8, 9), "globex": (0, 1)}, {"memory_bandwidth": "2TB/s"}
    tenants = {name: TenantConfig(name=name, granules=1, models=("*",), **keys) for name in homes}
    found = plan_fences(tenants, homes, SIZES, "SM", MOVES, seen={"acme": seen})["acme"]
    assert (found.granules, found.paced, found.notes) == (granules, 2 * 10**12 if paced else 0, ())


def test_a_share_below_what_a_granule_draws_is_paced_once_that_is_seen() -> None:
    homes = {"acme": (2, 3, 4, 5), "globex": (0, 1)}
    tenants = {name: TenantConfig(name=name, granules=1, models=("*",), memory_bandwidth="0.1TB/s") for name in homes}
    first, later = (
        plan_fences(tenants, homes, SIZES, "SM", MOVES, seen=seen)["acme"] for seen in ({}, {"acme": Narrowing(30 * 10**9)})
    )
    assert (first.granules, first.paced, len(first.notes)) == ((2,), 0, 1), "one granule draws more, and nothing is known"
    assert (later.granules, later.paced, later.notes) == ((2,), 10**11, ())


@given(size=st.integers(1, 14), value=st.one_of(st.floats(0.001, 1), st.integers(10**6, 5 * 10**12), st.just("auto")))
def test_a_narrow_placement_is_a_part_of_home_that_draws_no_more_or_one_granule(size: int, value: Any) -> None:
    home = tuple(range(1, 1 + size))
    fence = plan({"acme": home, "globex": (0,)}, acme={"memory_bandwidth": value})["acme"]
    drawn = len(fence.granules) * 8 * MOVES.unit
    assert fence.granules == home[: len(fence.granules)] != home
    if fence.granules:
        assert drawn <= fence.memory or (len(fence.granules) == 1 and fence.notes)
        assert drawn + 8 * MOVES.unit > fence.memory, "one more would be within it"
    else:
        assert fence.notes
