"""The experiment on batching works; what it measures is for machines with nothing else to do."""

from benchmarks.batching import compare, experiment


def test_many_clients_are_answered_in_fewer_runs_where_requests_are_joined() -> None:
    with experiment(max_batch=8) as both:
        found = compare(both, 16, 1, 0.3)
    assert found.rows > found.rows_alone == 1
    assert found.rows <= 8
    assert found.comparison.ratio == found.comparison.first.rate / found.comparison.second.rate
