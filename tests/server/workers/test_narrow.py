"""A worker that is fenced, over fakes: what runs on the narrow placement, and that nothing else is in flight meanwhile."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from engines import Tensor, TensorSpec
from engines.base import NO_ROOM, Room
from partitions import DeviceLost
from server.link import activity
from server.link.activity import Activity, ActivityPage
from server.link.messages import Failure
from server.workers.narrow import NarrowPlacement, NarrowStatistics
from server.workers.placement import Placement
from server.workers.worker import Worker
from tests.fakes import FakeExecutor, FakeStream, FakeWork, Gate
from tests.server.workers.test_wide import Borrower
from tests.server.workers.test_worker import FP32, NEVER, PATIENCE, Bench, benched

RATE = 1000
HOG, TINY = "m/1#1", "tiny/1#1"


class Neighbour:
    """Another tenant of the device: its activity, and the page as others have it."""

    def __init__(self) -> None:
        self.descriptor = activity.create(4)
        self.activity: Activity = activity.attach(self.descriptor)
        self.page = ActivityPage(self.descriptor)

    def rest(self) -> None:
        """Have rested for long enough: as if no request had ever ended."""
        self.activity.end()
        activity.reset(self.descriptor)


class Fenced(Bench):
    """A bench whose worker has a narrow placement too, and a second model, which moves nothing."""

    def another(self, granule: int) -> Worker:
        """On two granules."""
        partition = self.device.carve([granule, granule + 1])
        home = Placement(partition, {HOG: self.engine.bind(partition)})
        return Worker(home, self.lost.append, self.priorities, meter=self.meter)

    def fence(self, neighbours: int = 1) -> NarrowPlacement:
        """Of a home of two granules, one; the first model draws too much."""
        self.neighbours = [Neighbour() for _ in range(neighbours)]
        self.narrow = self.device.carve([0])
        made = NarrowPlacement(self.narrow, [each.page for each in self.neighbours], RATE, NarrowStatistics())
        self.worker.executors[TINY] = self.engine.bind(self.partition)
        for model in (HOG, TINY):
            made.executors[model] = self.worker.executors[model].alternate(self.narrow)
        self.worker.narrow = made
        self.worker.resume(made)
        self.know(made)
        return made

    def know(self, placement: NarrowPlacement, moved: int = 2 * RATE) -> None:
        """The first model takes a second at home, whatever it takes here, and moves twice what its tenant may in that time."""
        placement.set_moved({HOG: moved, TINY: 1})
        for model in (HOG, TINY):
            placement.demand(model).home = 10**9

    def run(self, number: int, slot: int = 0, model: str = HOG) -> None:
        self.put(self.ticket(slot, number, model=model))
        assert self.answer(self.next()) == [number]

    def run_all(self, count: int, model: str = HOG) -> None:
        """One after another."""
        for number in range(count):
            self.run(number, model=model)

    def ran(self) -> tuple[int, int]:
        """Works that ran at home and narrow."""
        return self.partition.stream.ran, self.narrow.stream.ran

    def wait_for_held(self) -> None:
        """Block until a ticket waits until what is in flight elsewhere has ended."""
        assert self.worker.runner
        deferred, until = self.worker.runner.session.deferred, time.monotonic() + PATIENCE
        while deferred.held is None:
            assert time.monotonic() < until, "no ticket waits"
            time.sleep(0)

    def has_two_threads(self) -> None:
        """Have the second thread listen; it is parked while works are short."""
        assert self.worker.runner
        self.worker.runner.session.roles.expect(True)

    def streams(self) -> tuple[FakeStream, FakeStream]:
        return self.partition.stream, self.narrow.stream


@contextmanager
def fenced(neighbours: int = 1, hosted: bool = False) -> Iterator[tuple[Fenced, NarrowPlacement]]:
    with benched(kind=Fenced) as bench:
        bench.device.on_host_cores = hosted
        placement = bench.fence(neighbours)
        bench.worker.serve(bench.endpoint)
        yield bench, placement
        bench.worker.halt()
        assert not placement.running


def never_both(bench: Fenced) -> Callable[[], list[tuple[int, int]]]:
    """From now on each work looks, when it is enqueued, at what is in flight; returns where works were in flight on both."""
    both: list[tuple[int, int]] = []
    reach = bench.script.reach

    def look(point: str, given_up: Callable[[], bool] = lambda: False) -> None:
        if point == "enqueue":
            home, narrow = (len(stream.works) for stream in bench.streams())
            if home and narrow:
                both.append((home, narrow))
        reach(point, given_up)
        if all(stream.works for stream in bench.streams()):
            both.append((1, 1))

    bench.script.reach = look  # type: ignore[method-assign]
    return lambda: both


@pytest.mark.parametrize("hosted", [False, True])
def test_what_draws_too_much_is_narrow_while_a_neighbour_is_at_work_and_home_when_all_have_rested(hosted: bool) -> None:
    with fenced(neighbours=2, hosted=hosted) as (bench, placement):
        bench.run(0)
        assert (bench.ran(), placement.applies()) == ((1, 0), False)
        bench.know(placement)
        bench.neighbours[1].activity.begin()
        bench.run_all(5)
        assert (bench.ran(), placement.applies()) == ((1, 5), True)
        bench.run(7, model=TINY)
        assert bench.ran() == (2, 5)
        bench.neighbours[1].activity.end()
        bench.run(8)
        assert bench.ran() == (2, 6), "its neighbour has only just ended"
        bench.neighbours[1].activity.begin()
        bench.neighbours[1].rest()
        bench.run(9)
        assert (bench.ran(), placement.applies()) == ((3, 6), False)
        assert placement.statistics.launches == 6


def test_a_model_goes_narrow_once_its_bytes_and_its_time_at_home_are_known() -> None:
    with fenced() as (bench, placement):
        bench.neighbours[0].activity.begin()
        placement.set_moved({HOG: 0})
        bench.run(0)
        placement.demand(HOG).home = 0
        placement.set_moved({HOG: 10**12})
        bench.run(1)
        assert bench.ran() == (2, 0)
        home = placement.measured()[HOG].home
        assert home > 0, "it was measured"
        bench.run(2)
        assert bench.ran() == (2, 1)
        found = placement.measured()[HOG]
        assert (found.home, found.moved) == (home, 10**12), "what it takes at home is learnt from works there alone"
        assert found.narrow > 0


class Slow(FakeExecutor):
    """Works while it enqueues, as a library does that copies weights from the host."""

    NS = 20_000_000

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> FakeWork:
        until = time.monotonic_ns() + self.NS
        while time.monotonic_ns() < until:
            pass
        return super().enqueue(inputs, room)


def test_what_is_done_while_a_work_is_enqueued_counts_as_its_time() -> None:
    with fenced() as (bench, placement):
        bench.worker.executors[TINY] = Slow(bench.engine, bench.partition)
        placement.demand(TINY).home = 0
        bench.run(0, model=TINY)
        assert placement.measured()[TINY].home >= Slow.NS
        (used,) = [each.used for each in bench.meter.usages() if each.model == "tiny/1"]
        assert used >= Slow.NS * bench.partition.size, "and is billed"


def test_models_that_have_left_are_forgotten_and_figures_that_are_not_named_stay() -> None:
    with fenced() as (_, placement):
        placement.set_moved({"gone/1#1": 7, TINY: 5})
        assert {name: each.moved for name, each in placement.measured().items()} == {HOG: 2 * RATE, TINY: 5, "gone/1#1": 7}
        placement.set_moved({})
        assert [*placement.measured()] == [HOG, TINY]


def test_on_another_placement_a_model_is_held_as_before_and_what_it_takes_there_is_not_known_yet() -> None:
    with fenced() as (bench, placement):
        placement.demand(HOG).narrow = 10**6
        other = NarrowPlacement(bench.device.carve([1]), [each.page for each in bench.neighbours], RATE, placement.statistics)
        found = other.measured()[HOG]
        assert (found.home, found.narrow, found.moved) == (10**9, 0, 2 * RATE)


def test_what_could_draw_too_much_wide_keeps_home_while_it_can_be_held() -> None:
    with fenced() as (bench, placement):
        bench.know(placement, RATE)
        assert not placement.keeps_home(HOG, 1, 2)
        bench.neighbours[0].activity.begin()
        assert [placement.keeps_home(HOG, 1, wide) for wide in (1, 2)] == [False, True]
        placement.suspend()
        assert not placement.keeps_home(HOG, 1, 2)
        bench.worker.resume(placement)
        placement.executors.pop(HOG).close()
        assert not placement.keeps_home(HOG, 1, 2)


@pytest.mark.parametrize("hosted", [False, True])
def test_narrow_works_are_in_flight_together(hosted: bool) -> None:
    with fenced(hosted=hosted) as (bench, _):
        bench.neighbours[0].activity.begin()
        gate = bench.begin(*[bench.ticket(slot, slot) for slot in range(3)])
        bench.script.wait_for("enqueue", 3)
        gate.open()
        assert [bench.answer(bench.next()) for _ in range(3)] == [[0], [1], [2]]
        assert bench.ran() == (0, 3)


@pytest.mark.parametrize("hosted", [False, True])
def test_a_ticket_for_another_placement_waits_for_those_in_flight_and_all_behind_it_too(hosted: bool) -> None:
    with fenced(hosted=hosted) as (bench, _):
        both = never_both(bench)
        bench.neighbours[0].activity.begin()
        gate = bench.script.hold("run")
        models = [TINY, HOG, HOG, TINY, HOG, TINY, TINY, HOG]
        bench.put(bench.ticket(0, 0, model=models[0]))
        gate.wait_for_arrival()
        if not hosted:
            bench.has_two_threads()
        bench.put(*[bench.ticket(slot, slot, model=models[slot]) for slot in range(1, 8)])
        if not hosted:
            bench.wait_for_held()
            assert bench.enqueued() == 1
            assert bench.link.completions.deferred() == 0, "it is in flight for the HTTP side"
        gate.open()
        assert [bench.answer(bench.next()) for _ in range(8)] == [[slot] for slot in range(8)]
        assert bench.ran() == (4, 4)
        assert both() == []


def test_tickets_of_all_kinds_are_answered_in_order_whatever_neighbours_do() -> None:
    """Many turns, while a neighbour comes and goes: no ticket is lost, and never are works in flight on both."""
    with fenced() as (bench, placement):
        both = never_both(bench)
        for turn in range(60):
            if turn % 3 == 0:
                bench.neighbours[0].activity.begin()
            elif turn % 3 == 2:
                bench.neighbours[0].rest()
            bench.know(placement)
            if turn % 5 == 0:
                bench.has_two_threads()
            bench.put(*[bench.ticket(slot, turn, model=(HOG, TINY)[(slot + turn) % (2 + turn % 3) == 0]) for slot in range(8)])
            assert [bench.answer(bench.next()) for _ in range(8)] == [[turn]] * 8
        assert both() == []
        assert min(bench.ran()) > 60


@contextmanager
def held() -> Iterator[tuple[Fenced, Gate]]:
    """A work in flight at home, in slot 0, until the gate is opened, and a ticket in slot 1 that waits to go narrow."""
    with fenced() as (bench, _):
        bench.neighbours[0].activity.begin()
        gate = bench.begin(bench.ticket(0, 0, model=TINY))
        bench.has_two_threads()
        bench.put(bench.ticket(1, 1, deadline=NEVER))
        bench.wait_for_held()
        yield bench, gate


def test_a_ticket_that_waits_is_cancelled_at_once() -> None:
    with held() as (bench, gate):
        assert not bench.worker.idle
        bench.worker.cancel(1, 2)
        assert bench.kind() == "cancelled"
        gate.open()
        assert bench.answer(bench.next()) == [0]
        bench.run(3)


def test_abandoning_fails_a_ticket_that_waits_and_a_narrow_work() -> None:
    with held() as (bench, _):
        bench.worker.abandon(Failure("stopped", "why"))
        assert [bench.next().failure for _ in range(2)] == [("stopped", "why")] * 2
    with fenced() as (bench, placement):
        bench.neighbours[0].activity.begin()
        bench.begin(bench.ticket(0, 0), bench.ticket(1, 1))
        bench.worker.abandon(Failure("stopped", "why"))
        assert [bench.next().failure for _ in range(2)] == [("stopped", "why")] * 2
        assert not placement.running


def test_a_ticket_that_waits_goes_home_when_the_neighbour_rests_or_its_process_ends() -> None:
    with held() as (bench, gate):
        activity.reset(bench.neighbours[0].descriptor)
        bench.put(bench.ticket(2, 2, model=TINY))
        gate.open()
        assert [bench.answer(bench.next()) for _ in range(3)] == [[0], [1], [2]]
        assert bench.ran() == (3, 0)


def test_suspending_waits_for_narrow_works_and_the_tenant_goes_on_at_home() -> None:
    with fenced() as (bench, placement):
        both = never_both(bench)
        bench.neighbours[0].activity.begin()
        gate = bench.begin(bench.ticket(0, 0), bench.ticket(1, 1))
        bench.script.wait_for("enqueue", 2)
        bench.has_two_threads()
        left = placement.suspend()
        assert not left.done()
        bench.put(bench.ticket(2, 2))
        bench.wait_for_held()
        gate.open()
        left.result(PATIENCE)
        assert [bench.answer(bench.next()) for _ in range(3)] == [[0], [1], [2]]
        assert (bench.ran(), both(), placement.applies()) == ((1, 2), [], False)
        bench.worker.narrow = None
        bench.run(3)
        bench.worker.narrow = placement
        bench.worker.resume(placement)
        bench.know(placement)
        bench.run(4)
        assert bench.ran() == (2, 3)


def test_a_work_that_was_about_to_go_narrow_when_the_placement_is_taken_away_goes_home() -> None:
    with fenced() as (bench, placement):
        bench.neighbours[0].activity.begin()
        suspended: list[Future[None]] = []

        def suspend(_: object) -> None:
            """It is ready: the last that is asked before a work goes there."""
            suspended.append(placement.suspend())

        executor: Any = placement.executors[HOG]
        executor.preparing = suspend
        bench.run(1)
        assert bench.ran() == (1, 0)
        assert [each.done() for each in suspended] == [True]


def test_a_work_that_cannot_be_enqueued_narrow_fails_and_the_next_go_on() -> None:
    with fenced() as (bench, placement):
        bench.neighbours[0].activity.begin()
        bench.script.fail("enqueue")
        bench.put(bench.ticket(0, 0))
        assert bench.kind() == "raised"
        assert (placement.running, placement.statistics.launches) == (False, 0)
        bench.run(1)
        bench.run(2, model=TINY)
        assert bench.ran() == (1, 1)


def test_a_device_that_is_lost_during_a_narrow_work_is_reported() -> None:
    with fenced() as (bench, placement):
        bench.neighbours[0].activity.begin()
        bench.script.fail("run", error=DeviceLost("gone"))
        bench.put(bench.ticket(0, 0))
        assert bench.kind() == "lost"
        assert bench.lost
        assert not placement.running


def test_a_worker_that_ends_closes_its_narrow_placement() -> None:
    with fenced() as (bench, placement):
        bench.worker.retire()
        assert bench.worker.narrow is None
        assert (bench.narrow.closed, bench.partition.closed, placement.executors) == (True, False, {})


def test_a_model_that_has_a_narrow_work_in_flight_is_not_exchanged() -> None:
    """It is paged out once nothing of it is in flight anywhere."""
    with fenced() as (bench, _):
        bench.neighbours[0].activity.begin()
        gate = bench.begin(bench.ticket(0, 0))
        other, before = bench.engine.bind(bench.partition), bench.worker.executors[HOG]
        assert bench.worker.exchange(HOG, other) is None
        gate.open()
        bench.next()
        assert bench.worker.exchange(HOG, other) is before
        before.close()


def test_narrow_works_count_for_the_units_that_they_ran_on() -> None:
    with fenced() as (bench, placement):
        bench.script.reach = bench.tarry  # type: ignore[method-assign]
        bench.neighbours[0].activity.begin()
        began = time.monotonic_ns()
        bench.run(0)
        elapsed = time.monotonic_ns() - began
        (usage,) = [each for each in bench.meter.usages() if each.works]
        assert placement.partition.size < bench.partition.size
        assert 0 < usage.used <= placement.partition.size * elapsed


def test_an_answer_goes_on_wherever_its_next_part_runs() -> None:
    with benched(kind=Fenced, compute_parts=lambda inputs: iter([list(inputs)] * 9)) as bench:
        bench.engine.signature = replace(bench.engine.signature, outputs=(TensorSpec("y", FP32, (1,)),))
        placement = bench.fence()
        bench.worker.serve(bench.endpoint)
        ticket = bench.ticket(0, 7)
        ticket = ticket._replace(after=ticket.serial)
        for part in range(8):
            bench.know(placement)
            if part % 4 == 1:
                bench.neighbours[0].activity.begin()
            elif part % 4 == 3:
                bench.neighbours[0].rest()
            bench.put(ticket)
            assert bench.answer(bench.next()) == [7]
            ticket = ticket._replace(serial=ticket.serial + 1000, after=ticket.serial)
        assert bench.ran() == (4, 4)
        bench.worker.halt()


class Both(Fenced, Borrower):
    """A bench whose worker borrows, and is fenced. Its home is half of its wide partition."""

    def another(self, granule: int) -> Worker:
        return Bench.another(self, granule)


def test_a_tenant_that_borrows_is_narrow_while_neighbours_work_and_wide_while_all_rest() -> None:
    with benched(kind=Both) as bench:
        wide = bench.stretch()
        placement = bench.fence()
        bench.worker.serve(bench.endpoint)
        bench.run_at_home()
        bench.know(placement)
        bench.run(1)
        assert bench.wide.stream.ran == 1
        bench.neighbours[0].activity.begin()
        bench.run_all(3)
        assert (bench.wide.stream.ran, bench.narrow.stream.ran) == (1, 3)
        gate = bench.begin(*[bench.ticket(slot, slot) for slot in range(3)])
        bench.wait_for_enqueued(bench.script.reached["run"] + 2)
        assert len(bench.narrow.stream.works) == 3, "they follow each other though the last one was wide"
        gate.open()
        assert [bench.answer(bench.next()) for _ in range(3)] == [[0], [1], [2]]
        for number in range(3):
            bench.know(placement, RATE)  # As much as it may at home.
            bench.slow_down()
            bench.run(number)
        assert bench.wide.stream.ran == 1
        assert wide.statistics.why_home()["fenced"] == 3
        bench.know(placement, RATE)
        gate = bench.begin(*[bench.ticket(slot, slot) for slot in range(3)])
        bench.wait_for_enqueued(bench.script.reached["run"] + 2)
        assert len(bench.partition.stream.works) == 3, "they follow each other at home"
        gate.open()
        assert [bench.answer(bench.next()) for _ in range(3)] == [[0], [1], [2]]
        bench.neighbours[0].rest()
        bench.slow_down()
        bench.run(4)
        assert bench.wide.stream.ran == 2
        bench.worker.halt()
        assert (wide.running, placement.running) == (False, False)
