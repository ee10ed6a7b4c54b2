"""The experiment on batching works; what it measures is for machines with nothing else to do."""

from .batching import experiment


def test_many_clients_are_answered_in_fewer_runs_where_requests_are_joined() -> None:
    with experiment(max_batch=8) as both:
        found = both.compare(16, 1, 0.3)
    assert found.joined.rows > found.alone.rows == 1
    assert found.joined.rows <= 8
    assert found.ratio == found.joined.rate / found.alone.rate
