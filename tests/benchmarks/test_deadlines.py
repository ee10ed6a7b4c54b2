"""How late answers are after their deadlines: the arithmetic, and that the experiment runs."""

import os

import pytest

from benchmarks.deadlines import EARLY, LOADS, TARGET, lateness, main, over, worst
from greenlane.load.figures import Samples


def seen(*answers: tuple[float, int]) -> Samples:
    return Samples([0.0] * len(answers), [latency for latency, _ in answers], [status for _, status in answers])


def test_an_answer_is_late_by_what_it_came_after_the_deadline() -> None:
    found = lateness("x", seen((21_000, 504), (29_000, 504), (20_000, 504), (3, 200)), timeout=20_000)

    assert (found.due, found.served, found.expired, found.early, found.other) == (4, 1, 3, 0, 0)
    assert (found.p50, found.p99, found.worst) == (1_000, 9_000, 9_000)
    assert found.word == "missed"


@pytest.mark.parametrize(
    ("answers", "word"),
    [
        ([(20_000 + TARGET, 504)], "PASS"),
        ([(20_001 + TARGET, 504)], "missed"),
        ([(20_000, 504), (20_000 - EARLY, 504)], "PASS"),
        ([(20_000, 504), (19_999 - EARLY, 504)], "missed"),
        ([(20_000, 504), (20_000, 503)], "missed"),
        ([(20_000, 504), (20_000, 0)], "missed"),
        ([(3, 200)], "missed"),
    ],
)
def test_a_target_is_met_by_answers_in_time_that_are_neither_early_nor_of_another_kind(
    answers: list[tuple[float, int]], word: str
) -> None:
    assert lateness("x", seen(*answers), timeout=20_000).word == word


def test_over_rounds_counts_are_sums_and_latencies_medians() -> None:
    rounds = [lateness("x", seen((20_000 + late, 504), (3, 200)), timeout=20_000, client=late) for late in (1, 30, 2)]

    found = over(rounds)

    assert (found.load, found.due, found.served, found.expired, found.other) == ("x", 6, 3, 3, 0)
    assert (found.p50, found.p99, found.worst, found.client) == (2, 2, 30, 2)


def test_the_load_that_missed_by_most_is_reported_wherever_it_stands() -> None:
    fine = lateness("fine", seen((20_000 + TARGET, 504)), timeout=20_000)
    late = lateness("late", seen((20_001 + TARGET, 504)), timeout=20_000)
    early = lateness("early", seen((1, 504)), timeout=20_000)
    silent = lateness("silent", seen((3, 200)), timeout=20_000)

    assert worst([fine, late, early]).load == "late"
    assert worst([early, fine]).load == "early"
    assert worst([fine, silent, late]).load == "silent"


def test_requests_without_time_to_be_served_are_answered_with_504(capsys: pytest.CaptureFixture[str]) -> None:
    """Does not check how late answers are on this machine."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores, a partition each")

    status = main(["--seconds", "0.3", "--rate", "100", "--rounds", "1"])

    lines = capsys.readouterr().out.splitlines()
    assert status in (0, 1)
    assert [line[:27].rstrip() for line in lines[2:-1]] == list(LOADS)
    assert lines[-1].startswith(("PASS: ", "missed: "))


def test_an_unavailable_device_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 2
    assert "deadlines: " in capsys.readouterr().err
