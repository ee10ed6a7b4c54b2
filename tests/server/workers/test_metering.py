"""What works take is counted once each, whatever they end with, and works that queue on a stream do not overlap."""

import time
import weakref

import pytest

from engines import Room
from server.accounts.meter import Counter, Meter, Place
from server.link.messages import Ticket
from server.workers.session import InFlight, Metering
from tests.launchable import LaunchableEngine, needs_a_compiler
from tests.server.workers.test_worker import NEVER, Bench, benched

from .test_loop_runs import LoopBench

HOME, WIDE, NARROW = Place(4), Place(4, (("globex", 8),)), Place(1)


class Timed:
    """An executor, or a fake of what it has."""


def flight(launched: int, counter: Counter | None) -> InFlight:
    return InFlight(Ticket(0, 1, "m/1#1", (), NEVER, 0), None, Room(), launched, counter)  # type: ignore[arg-type]


def used(meter: Meter) -> list[tuple[int, int, dict[str, int]]]:
    return [(each.works, each.used, dict(each.borrowed)) for each in meter.usages()]


@pytest.mark.parametrize(
    ("hosted", "works", "sizes"),
    [
        (False, [(100, 110, 200, -1), (150, 201, 300, -1), (900, 901, 1000, -1)], [100, 100, 100]),
        (True, [(100, 150, 200, -1), (100, 200, 300, 70), (300, 300, 400, 500)], [50, 70, 100]),
    ],
    ids=["from their launch or the end of the one before", "on cores from when a thread runs them, as long as it ran"],
)
def test_works_are_counted(hosted: bool, works: list[tuple[int, int, int, int]], sizes: list[int]) -> None:
    meter = Meter()
    metering = Metering(meter, HOME, hosted=hosted)
    counter = metering.counter(Timed(), "m/1#1")
    for launched, waited, ended, most in works:
        each = flight(launched, counter)
        metering.begin(each, waited)
        metering.end(each, ended, most)
    assert used(meter) == [(3, 4 * sum(sizes), {})]


def test_what_a_model_took_is_kept_when_it_is_forgotten_and_its_executor_is_not() -> None:
    meter, executor = Meter(), Timed()
    metering, alive = Metering(meter, HOME, hosted=True), weakref.ref(executor)
    for place in (None, HOME):
        counter = metering.counter(executor, "m/1#1", place)
        assert counter
        counter.add(100)
    assert metering.counter(Timed(), "m/1#2") is counter
    del executor
    metering.forget(["m/1#1", "m/1#3"])
    assert alive() is None
    assert used(meter) == [(2, 4 * 200, {})]


@pytest.mark.parametrize(
    ("place", "ended", "units", "borrowed"), [(WIDE, 15, 4 * 15, {"globex": 8 * 5}), (NARROW, 50, 4 * 10 + 1 * 40, {})]
)
def test_wide_works_borrow_and_narrow_ones_use_the_units_that_they_run_on(
    place: Place, ended: int, units: int, borrowed: dict[str, int]
) -> None:
    """The rest of the share rests during narrow works; what runs longer on fewer units is not dearer."""
    meter = Meter()
    metering = Metering(meter, HOME, hosted=False)
    for where, until in ((None, 10), (place, ended)):
        each = flight(0, metering.counter(Timed(), "m/1#1", where))
        metering.begin(each, 0)
        metering.end(each, until, -1)
    assert used(meter) == [(2, units, borrowed)]


def test_executors_whose_device_measures_are_not_measured_here() -> None:
    class OnDevice:
        ns, works, closed = 70, 2, False

    meter, executor = Meter(), Timed()
    executor.device_time = OnDevice()  # type: ignore[attr-defined]
    metering = Metering(meter, HOME, hosted=False)
    assert metering.counter(executor, "m/1#1") is None
    assert metering.counter(executor, "m/1#9") is None  # The same one, by another key.
    each = flight(0, None)
    metering.begin(each, 0)
    metering.end(each, 10, -1)
    assert used(meter) == [(2, 4 * 70, {})]


def counted(bench: Bench) -> tuple[int, int]:
    """Works and unit-nanoseconds of the bench's worker."""
    found = bench.meter.usages()
    return sum(each.works for each in found), sum(each.used for each in found)


def test_the_worker_counts_works_that_fail_and_not_those_that_do_not_run() -> None:
    with benched() as bench:
        bench.worker.serve(bench.endpoint)
        bench.script.reach = bench.tarry  # type: ignore[method-assign]
        bench.put(bench.ticket(0, 1))
        bench.next()
        ran = counted(bench)
        assert ran[0] == 1
        assert ran[1] > 0
        bench.put(bench.ticket(1, 1, deadline=time.monotonic() - 1), bench.ticket(2, 1, model="none"))
        bench.next(), bench.next()
        assert counted(bench) == ran


def test_a_work_that_fails_counts_for_what_it_ran() -> None:
    with benched() as bench:
        bench.worker.serve(bench.endpoint)
        bench.script.fail("run")
        bench.put(bench.ticket(3, 1))
        assert bench.kind() == "raised"
        assert counted(bench)[0] == 1
        assert counted(bench)[1] > 0


def test_runs_on_the_event_loop_count() -> None:
    with benched(kind=LoopBench) as bench:
        bench.serve()
        before = counted(bench)
        while not bench.run(1):  # Until the model is known to be short.
            bench.send(1)
            before = counted(bench)
        after = counted(bench)
        assert after[0] == before[0] + 1


@needs_a_compiler
def test_the_launch_loop_counts_its_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchableEngine, "duration", 5_000_000)
    with benched(launchable=True) as bench:
        bench.worker.serve(bench.endpoint)
        bench.teach()
        works, before = counted(bench)
        began = time.monotonic_ns()
        bench.put(*[bench.ticket(slot, slot) for slot in range(8)])
        assert [bench.next().failure for _ in range(8)] == [None] * 8
        elapsed = time.monotonic_ns() - began
        after, now = counted(bench)
        assert after == works + 8
        assert 8 * 4_900_000 <= (now - before) // bench.partition.size <= elapsed
