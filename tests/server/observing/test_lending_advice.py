"""What is said about lending, from what a tenant's wide partition did."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from server.control.stretch import LentGranules, WidePartition
from server.observing.advice import IDLE, Neighbour, advise_borrower, advise_lender, advise_neighbours
from server.observing.need import Need
from server.workers.stretching import WHY_HOME

BUSY = "globex is busy 64 % of the time"
USE = "acme could use those granules while they are idle"
NEEDS = {"globex": Need(10.0, 0.64, 0.0)}


def state(launches: int = 0, **home: int) -> WidePartition:
    return WidePartition((0, 1), [LentGranules("globex", (1,))], launches, 0, home, [], [])


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (state(5), state(5), []),
        (state(5), state(15), ["10 of 10 inferences ran on granules that globex lends"]),
        (
            state(5, owner_busy=100),
            state(15, owner_busy=140),
            ["10 of 50 inferences ran on granules that globex lends; for 40, a lender had a request: " + BUSY],
        ),
        (
            state(),
            state(0, too_long=9),
            ["0 of 9 inferences ran on granules that globex lends; for 9, they take longer than the lenders allow (`lend`)"],
        ),
        (state(), state(6, in_flight=5), ["6 of 11 inferences ran on granules that globex lends"]),
        (
            state(),
            state(5, in_flight=5),
            ["5 of 10 inferences ran on granules that globex lends; for 5, another one of its own was running"],
        ),
        (state(9, in_flight=9), state(3, in_flight=1), []),  # The process was replaced meanwhile.
    ],
)
def test_a_borrower_reads_how_often_it_borrowed_and_why_not_more(
    before: WidePartition, after: WidePartition, said: list[str]
) -> None:
    assert advise_borrower(before, after, NEEDS) == said


def test_a_borrower_reads_what_is_too_long_and_what_could_not_be_made() -> None:
    after = replace(state(), too_long=["spin does not run there"], problems=["mlp: no memory"])
    assert advise_borrower(state(), after, {}) == ["spin does not run there", "mlp: no memory"]


def test_without_a_wide_partition_at_the_end_no_lender_is_made_up() -> None:
    after = replace(state(3, owner_busy=4), borrowed=[], problems=["granules [0, 1]: no memory"])
    assert advise_borrower(state(), after, NEEDS) == ["granules [0, 1]: no memory"]


@pytest.mark.parametrize("why", WHY_HOME)
def test_every_reason_to_stay_at_home_is_said_in_words(why: str) -> None:
    (said,) = advise_borrower(state(), state(0, **{why: 7}), NEEDS)
    assert "for 7, " in said
    assert why not in said


def test_a_lender_that_has_stopped_reads_why() -> None:
    (said,) = advise_lender("globex", False)
    assert said.startswith("globex lends nothing for now, as its own requests were later")
    assert advise_lender("globex", True) == advise_lender("globex", None) == []


@pytest.mark.parametrize(
    ("burst", "neighbours", "said"),
    [
        (
            None,
            [Neighbour("globex", 0.04, lends=False), Neighbour("initech", 0.9, lends=False)],
            [f"little used: globex (4 %). With `lend` there and a `burst` for acme, {USE}"],
        ),
        (
            4,
            [Neighbour("globex", 0.0, lends=False)],
            [f"little used: globex (0 %). With `lend` there, {USE}"],
        ),
        (None, [Neighbour("globex", 0.04, lends=True)], []),
        (None, [Neighbour("globex", None, lends=False)], []),
        (None, [], []),
    ],
)
def test_a_tenant_that_needs_more_reads_of_idle_neighbours(
    burst: int | None, neighbours: list[Neighbour], said: list[str]
) -> None:
    assert advise_neighbours("acme", burst, neighbours) == said


@given(st.lists(st.builds(Neighbour, st.sampled_from(["globex", "initech"]), st.floats(0, 1), st.booleans()), max_size=4))
def test_only_idle_neighbours_that_do_not_lend_are_named(neighbours: list[Neighbour]) -> None:
    said = "".join(advise_neighbours("acme", None, neighbours))
    assert bool(said) == (any(each.busy < IDLE for each in neighbours) and not any(each.lends for each in neighbours))  # type: ignore[operator]
