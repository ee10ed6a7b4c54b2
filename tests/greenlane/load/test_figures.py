"""From samples to figures."""

import math

import pytest

from greenlane.load.figures import Figures, Samples, cumulative, figures, medians, merged, percentile, ratio


def flat(p99: float, failed: int = 0) -> Figures:
    return Figures(100, failed, p99 / 2, p99, p99 * 2, p99 * 2)


@pytest.mark.parametrize(("quantile", "value"), [(0.5, 50), (0.99, 99), (0.999, 100), (1, 100), (0.001, 1)])
def test_a_percentile_is_a_value_that_occurred(quantile: float, value: float) -> None:
    assert percentile(range(1, 101), quantile) == value


def test_the_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(percentile([], 0.5))


def test_requests_not_answered_with_200_are_counted_with_their_time() -> None:
    found = figures(Samples([0, 0.1, 0.2], [10, 30, 20], [200, 0, 429]))

    assert found == Figures(3, 2, 20, 30, 30, 30)


def test_medians_are_over_rounds_and_counts_are_sums() -> None:
    assert medians([flat(10), flat(1000, failed=1), flat(30)]) == Figures(300, 1, 15, 30, 60, 60)


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_not_the_ratio_of_medians() -> None:
    assert ratio([flat(10), flat(60), flat(90)], [flat(10), flat(20), flat(90)], "p99") == 1
    assert math.isnan(ratio([], [], "p99"))


def test_samples_of_processes_are_brought_in_order() -> None:
    whole = merged([Samples([0.1, 0.3], [1, 3], [200, 200]), Samples([0.2], [2], [0])])

    assert (whole.due, whole.latency, whole.status) == ([0.1, 0.2, 0.3], [1, 2, 3], [200, 0, 200])


def test_a_distribution_keeps_its_slowest_requests_when_it_is_thinned() -> None:
    values, slower = cumulative(range(100_000), points=100)

    assert len(values) < 300
    assert (values[0], slower[0]) == (0, 1)
    assert (values[-1], slower[-1]) == (99_999, 1 / 100_000)
    assert cumulative([]) == ([], [])
