"""When requests are due."""

from greenlane.load.processes import poisson


def test_poisson_arrivals_ascend_end_in_time_and_are_the_same_for_the_same_seed() -> None:
    due = poisson(1000, 2, seed=1)

    assert due == sorted(due) == poisson(1000, 2, seed=1) != poisson(1000, 2, seed=2)
    assert due[0] > 0
    assert due[-1] < 2
    assert 1700 < len(due) < 2300
