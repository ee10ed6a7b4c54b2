"""The guard cancels what keeps the event loop, and rests while nothing runs there. Its intervals are passed by the test."""

from collections.abc import Iterator
from threading import Event, Semaphore

import pytest

from engines import Tensor
from server.workers.loop_runs import LoopGuard
from tests.fakes import PATIENCE


class Intervals:
    """In place of `time.sleep`: each call returns when the test lets an interval pass."""

    def __init__(self) -> None:
        self._begun = Semaphore(0)
        self._passing = Semaphore(0)

    def sleep(self, _: float) -> None:
        self._begun.release()
        assert self._passing.acquire(timeout=PATIENCE)

    def wait_for_begin(self) -> None:
        assert self._begun.acquire(timeout=PATIENCE), "the guard does not look"

    def pass_one(self) -> None:
        self._passing.release()

    @property
    def begun(self) -> bool:
        return self._begun.acquire(blocking=False)


class LongWork:
    """A work that ends when it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = Event()

    def wait(self) -> tuple[Tensor, ...]:
        assert self.cancelled.wait(PATIENCE), "not cancelled"
        return ()

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.fixture
def intervals() -> Intervals:
    return Intervals()


@pytest.fixture
def guard(intervals: Intervals) -> Iterator[LoopGuard]:
    guard = LoopGuard(intervals.sleep)
    yield guard
    guard.close()
    intervals.pass_one()
    if guard.thread:
        guard.thread.join(PATIENCE)
        assert not guard.thread.is_alive()


def test_a_work_that_runs_for_a_whole_interval_is_cancelled(guard: LoopGuard, intervals: Intervals) -> None:
    work = LongWork()
    guard.begin(work)
    for _ in range(2):  # It may have begun to look before the work began.
        intervals.wait_for_begin()
        intervals.pass_one()
    work.wait()
    guard.end()


def test_short_works_are_not_cancelled(guard: LoopGuard, intervals: Intervals) -> None:
    works = [LongWork() for _ in range(5)]
    for work in works:
        guard.begin(work)
        if work is not works[0]:
            intervals.pass_one()
        intervals.wait_for_begin()
        guard.end()
    assert not any(work.cancelled.is_set() for work in works)


def test_the_guard_rests_while_nothing_runs_and_goes_on_with_the_next_work(guard: LoopGuard, intervals: Intervals) -> None:
    guard.begin(LongWork())
    guard.end()
    assert "looking" in repr(guard)
    while not guard.resting:
        if intervals.begun:
            intervals.pass_one()
    assert not intervals.begun
    work = LongWork()
    guard.begin(work)
    for _ in range(2):
        intervals.wait_for_begin()
        intervals.pass_one()
    work.wait()
    guard.end()


def test_a_guard_without_works_has_no_thread(guard: LoopGuard) -> None:
    assert guard.thread is None
    assert repr(guard) == "<LoopGuard resting, 0 runs>"
