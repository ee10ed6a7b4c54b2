"""What the GPU measures of an executor's works, over a simulated GPU whose timer the test moves."""

from typing import Any

import pytest

from engines.cuda.copies import CLOCKS
from tests.engines.tensors import run

from ..simulated import Bench, rows

STEP = 1000


@pytest.fixture(autouse=True)
def ticks(bench: Bench) -> list[int]:
    """The timer: each look at it is STEP nanoseconds later, so a work takes that long."""
    ticks = [10**6]

    def timer() -> int:
        ticks[0] += STEP
        return ticks[0]

    bench.gpu.timer = timer
    return ticks


def measured(executor: Any) -> tuple[int, int]:
    return executor.device_time.ns, executor.device_time.works


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_works_are_measured_from_the_end_of_the_warm_up_on(bench: Bench, graphs: str) -> None:
    executor = bench.bind(copies="sm", graphs=graphs)
    assert measured(executor) == (0, 0)
    for _ in range(5):
        run(executor, rows(2))
    assert measured(executor) == (4 * STEP, 4), "the last one is shown when the next begins"
    time = executor.device_time
    executor.close()
    assert (time.ns, time.works, time.closed) == (5 * STEP, 5, True)


def test_each_executor_of_an_instance_has_a_clock_of_its_own(bench: Bench) -> None:
    home = bench.bind(copies="sm")
    other = home.rebind(bench.device.carve([1]))
    for executor, count in ((home, 3), (other, 2)):
        for _ in range(count):
            run(executor, rows(2))
    times = home.device_time, other.device_time
    home.close()
    other.close()
    assert [time.works for time in times] == [3, 2]


def test_a_clock_that_was_given_back_begins_at_nothing(bench: Bench) -> None:
    executor = bench.bind(copies="sm")
    partition = bench.device.carve([1])
    for _ in range(CLOCKS + 3):
        run(executor, rows(2))
        moved = executor.rebind(partition)
        assert measured(moved) == (0, 0)
        executor.close()
        executor = moved
    executor.close()


def test_a_timer_that_does_not_agree_with_the_host_is_not_used(bench: Bench, ticks: list[int]) -> None:
    def wild() -> int:
        ticks[0] += 10**12
        return ticks[0]

    bench.gpu.timer = wild
    executor = bench.bind(copies="sm")
    assert executor.device_time is None
    moved = executor.rebind(bench.device.carve([1]))
    assert moved.device_time is None
    executor.close()
    moved.close()


def test_copy_engines_measure_nothing(bench: Bench) -> None:
    executor = bench.bind(copies="engine")
    assert executor.device_time is None


def test_there_are_only_so_many_clocks(bench: Bench) -> None:
    executor = bench.bind(copies="sm")
    copies = executor.instance.copies[True]
    taken = [copies.take_clock(bench.partition.stream) for _ in range(CLOCKS)]
    assert [clock is None for clock in taken].count(True) == 2  # One is the executor's, and number 0 counts nothing.
