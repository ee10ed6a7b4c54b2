from typing import Any

from server.statistics import Duration, ModelStatistics
from server.ticket import Done

NOTHING = {"count": 0, "ns": 0}


def done(began: int, ended: int) -> Done:
    return Done(0, (), None, began, ended)


def once(ns: int, count: int = 1) -> dict[str, int]:
    return {"count": count, "ns": ns}


def inference(statistics: ModelStatistics) -> Any:
    return statistics.as_json()["inference_stats"]


def test_durations_add_up() -> None:
    duration = Duration()
    duration.add(3)
    duration.add(4)
    assert duration.as_json() == {"count": 2, "ns": 7}


def test_a_model_that_was_never_asked_has_counted_nothing() -> None:
    assert ModelStatistics().as_json() == {
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": dict.fromkeys(
            ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"), NOTHING
        ),
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def test_an_answered_request_is_counted_in_each_of_its_phases() -> None:
    statistics = ModelStatistics()
    statistics.succeeded(arrived=100, decoded=110, done=done(130, 170), encoded=250, rows=4, now_ms=1234)
    assert inference(statistics) == {
        "success": once(150),
        "fail": NOTHING,
        "queue": once(20),
        "compute_input": once(10),
        "compute_infer": once(40),
        "compute_output": once(80),
    }
    counts = statistics.as_json()
    assert (counts["last_inference"], counts["inference_count"], counts["execution_count"]) == (1234, 4, 1)


def test_every_size_of_batch_is_counted_for_itself_the_smallest_first() -> None:
    statistics = ModelStatistics()
    for rows in (8, 1, 8):
        statistics.succeeded(arrived=0, decoded=1, done=done(2, 2 + rows), encoded=20, rows=rows, now_ms=0)
    assert statistics.as_json()["batch_stats"] == [
        {"batch_size": 1, "compute_input": once(1), "compute_infer": once(1), "compute_output": once(17)},
        {"batch_size": 8, "compute_input": once(2, 2), "compute_infer": once(16, 2), "compute_output": once(20, 2)},
    ]
    assert (statistics.inferences, statistics.executions) == (17, 3)


def test_work_that_began_before_its_decoding_was_noted_never_waited() -> None:
    statistics = ModelStatistics()
    statistics.succeeded(arrived=0, decoded=10, done=done(8, 12), encoded=20, rows=1, now_ms=0)
    assert inference(statistics)["queue"] == once(0)


def test_a_failure_is_counted_by_its_reason_and_runs_no_inference() -> None:
    statistics = ModelStatistics()
    statistics.failed(5, "REJECTED")
    statistics.failed(6, "BACKEND")
    statistics.failed(7, "REJECTED")
    assert statistics.failures == {"REJECTED": 2, "BACKEND": 1}
    assert inference(statistics)["fail"] == once(18, 3)
    assert inference(statistics)["success"] == NOTHING
    assert (statistics.inferences, statistics.executions, statistics.last_ms) == (0, 0, 0)


def test_no_two_models_share_their_counts() -> None:
    one, other = ModelStatistics(), ModelStatistics()
    one.failed(1, "OTHER")
    one.succeeded(0, 1, done(1, 2), 3, 1, 0)
    assert other == ModelStatistics()
