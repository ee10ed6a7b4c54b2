import time
from typing import Any

import pytest
from msgspec import to_builtins

from server.link.messages import Done
from server.tenants.statistics import ModelStatistics

NOTHING = {"count": 0, "ns": 0}
NO_CACHE = {"cache_hit": NOTHING, "cache_miss": NOTHING}


def done(began: int, ended: int, rows: int = 0) -> Done:
    return Done(0, (), None, began, ended, rows)


def once(ns: int, count: int = 1) -> dict[str, int]:
    return {"count": count, "ns": ns}


def answer(statistics: ModelStatistics) -> Any:
    return to_builtins(statistics.answer("m", "1"))


def inference(statistics: ModelStatistics) -> Any:
    return answer(statistics)["inference_stats"]


def test_a_success_is_counted_in_each_of_its_phases() -> None:
    statistics = ModelStatistics()
    statistics.succeeded(arrived=100, decoded=110, done=done(130, 170), encoded=250, rows=4)
    assert inference(statistics) == {
        "success": once(150),
        "fail": NOTHING,
        "queue": once(20),
        "compute_input": once(10),
        "compute_infer": once(40),
        "compute_output": once(80),
        **NO_CACHE,
    }
    assert (statistics.inferences, statistics.executions) == (4, 1)


def test_last_inference_is_in_milliseconds_since_the_epoch() -> None:
    statistics, now = ModelStatistics(), time.monotonic_ns()
    statistics.succeeded(now - 4, now - 3, done(now - 2, now - 1), now, 1)
    assert statistics.last_ms == pytest.approx(time.time() * 1000, abs=10_000)


def test_batch_stats_count_each_batch_size_smallest_first() -> None:
    statistics = ModelStatistics()
    for rows in (8, 1, 8):
        statistics.succeeded(arrived=0, decoded=1, done=done(2, 2 + rows), encoded=20, rows=rows)
    assert answer(statistics)["batch_stats"] == [
        {"batch_size": 1, "compute_input": once(1), "compute_infer": once(1), "compute_output": once(17)},
        {"batch_size": 8, "compute_input": once(2, 2), "compute_infer": once(16, 2), "compute_output": once(20, 2)},
    ]
    assert (statistics.inferences, statistics.executions) == (17, 3)


def test_requests_of_one_batch_count_as_one_execution_of_all_rows() -> None:
    statistics = ModelStatistics()
    for rows, arrived in ((1, 0), (2, 4)):
        statistics.succeeded(arrived, arrived + 1, done(10, 15, rows=3), encoded=20, rows=rows)
    statistics.succeeded(20, 21, done(30, 35, rows=3), encoded=40, rows=3)  # The others of it were not answered.
    statistics.succeeded(40, 41, done(50, 51), encoded=60, rows=3)
    assert (statistics.inferences, statistics.executions) == (9, 3)
    assert inference(statistics)["success"] == once(20 + 16 + 20 + 20, 4)
    assert inference(statistics)["queue"] == once(9 + 5 + 9 + 9, 4)
    assert inference(statistics)["compute_infer"] == once(5 + 5 + 5 + 1, 4)
    assert answer(statistics)["batch_stats"] == [
        {"batch_size": 3, "compute_input": once(3, 3), "compute_infer": once(11, 3), "compute_output": once(5 + 5 + 9, 3)}
    ]


def test_queue_time_is_never_negative() -> None:
    statistics = ModelStatistics()
    statistics.succeeded(arrived=0, decoded=10, done=done(8, 12), encoded=20, rows=1)
    assert inference(statistics)["queue"] == once(0)


def test_a_failure_is_counted_by_its_reason_and_not_as_an_inference() -> None:
    statistics = ModelStatistics()
    statistics.failed(5, "REJECTED")
    statistics.failed(6, "BACKEND")
    statistics.failed(7, "REJECTED")
    assert statistics.failures == {"REJECTED": 2, "BACKEND": 1}
    assert inference(statistics)["fail"] == once(18, 3)
    assert inference(statistics)["success"] == NOTHING
    assert (statistics.inferences, statistics.executions, statistics.last_ms) == (0, 0, 0)
