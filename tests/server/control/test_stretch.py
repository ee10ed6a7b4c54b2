"""Who borrows which granules: whole plans, and what holds for all of them."""

from hypothesis import given
from hypothesis import strategies as st

from server.control.stretch import Wide, plan_wide


def test_a_borrower_takes_up_to_its_burst_from_those_who_lend() -> None:
    homes = {"acme": (0, 1), "globex": (2, 3, 4), "initech": (5,), "hooli": (6, 7)}
    plan = plan_wide(homes, {"acme": 6, "globex": 3}, {"globex": 0.002, "hooli": 0.001})
    assert plan == {"acme": Wide((0, 1, 2, 3, 4, 6), {"globex": (2, 3, 4), "hooli": (6,)}, 0.001)}


def test_borrowers_share_what_is_lent() -> None:
    plan = plan_wide({"a": (0,), "b": (1,), "c": (2, 3, 4, 5)}, {"a": 6, "b": 6}, {"c": 0.001})
    assert {name: wide.granules for name, wide in plan.items()} == {"a": (0, 2, 4), "b": (1, 3, 5)}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], dict[str, int], dict[str, float]]:
    holders = draw(st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=1, max_size=16))
    homes = {name: tuple(i for i, each in enumerate(holders) if each == name) for name in sorted(set(holders) - {""})}
    most = {name: draw(st.integers(0, 20)) for name in homes}
    return homes, most, {name: draw(st.sampled_from([0.0, 0.001, 0.01])) for name in homes}


@given(worlds())
def test_every_plan_keeps_to_the_shares(world: tuple[dict[str, tuple[int, ...]], dict[str, int], dict[str, float]]) -> None:
    homes, most, lend = world
    plan = plan_wide(homes, most, lend)
    borrowed = [granule for wide in plan.values() for granules in wide.lent.values() for granule in granules]
    assert len(set(borrowed)) == len(borrowed), "lent to two"
    for name, wide in plan.items():
        lent = [granule for granules in wide.lent.values() for granule in granules]
        assert sorted((*homes[name], *lent)) == list(wide.granules)
        assert len(homes[name]) < len(wide.granules) <= most[name]
        assert all(set(granules) <= set(homes[lender]) for lender, granules in wide.lent.items())
        assert 0 < wide.limit == min(lend[lender] for lender in wide.lent)
