"""From samples to figures."""

import math

import pytest

from greenlane.load.figures import Figures, Samples, figures, merged, percentile


@pytest.mark.parametrize(("quantile", "value"), [(0.5, 50), (0.99, 99), (0.999, 100), (1, 100), (0.001, 1)])
def test_a_percentile_is_a_value_that_occurred(quantile: float, value: float) -> None:
    assert percentile(range(1, 101), quantile) == value


def test_the_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(percentile([], 0.5))


def test_requests_not_answered_with_200_are_counted_with_their_time() -> None:
    found = figures(Samples([0, 0.1, 0.2], [10, 30, 20], [200, 0, 429]))

    assert found == Figures(3, 2, 20, 30, 30, 30)


def test_samples_of_processes_are_brought_in_order() -> None:
    whole = merged([Samples([0.1, 0.3], [1, 3], [200, 200]), Samples([0.2], [2], [0])])

    assert (whole.due, whole.latency, whole.status) == ([0.1, 0.2, 0.3], [1, 2, 3], [200, 0, 200])
