"""When requests of several processes are due."""

import pytest

from benchmarks.loads import arrivals, fixed, share
from greenlane.load.processes import poisson


def test_fixed_arrivals_are_one_gap_apart() -> None:
    assert fixed(4, 1) == [0.125, 0.375, 0.625, 0.875]


def test_processes_share_a_schedule_without_losing_or_doubling_an_arrival() -> None:
    due = poisson(100, 1, seed=3)

    assert sorted(arrival for index in range(3) for arrival in share(due, index, 3)) == due


@pytest.mark.parametrize(
    ("kind", "rate", "message"), [("often", 1.0, "'often'; expected fixed or poisson"), ("fixed", 0.0, "more than 0")]
)
def test_a_schedule_that_cannot_be_is_refused(kind: str, rate: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrivals(kind, rate, 1.0, 0)


def test_a_schedule_is_found_by_its_name() -> None:
    assert arrivals("fixed", 10, 1, seed=5) == fixed(10, 1)
    assert arrivals("poisson", 10, 1, seed=5) == poisson(10, 1, seed=5)
