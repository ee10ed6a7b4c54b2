"""Cores are kept awake by processes of the lowest priority, and only until the end of the measurement."""

import os
from pathlib import Path

import pytest

from benchmarks.awake import awake

IDLE = 5
"""SCHED_IDLE of sched(7)."""


def spinners() -> list[int]:
    """The processes that this one started."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def test_every_core_is_kept_awake_by_a_process_of_the_lowest_priority() -> None:
    cores, before = os.sched_getaffinity(0), set(spinners())
    with awake(cores):
        started = set(spinners()) - before
        assert {core for pid in started for core in os.sched_getaffinity(pid)} == cores
        assert {os.sched_getscheduler(pid) for pid in started} == {IDLE}
        assert len(started) == len(cores)
    assert not set(spinners()) - before


def test_a_core_that_is_not_there_is_an_error_and_leaves_nothing_behind() -> None:
    before = set(spinners())
    with pytest.raises(OSError, match="cannot be kept awake"), awake([min(os.sched_getaffinity(0)), 100_000]):
        pytest.fail("was kept awake")
    assert set(spinners()) == before
