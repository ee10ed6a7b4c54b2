"""A worker that borrows, over fakes: what goes to the wide partition, what waits for it, and how it is taken back."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from threading import Semaphore

import pytest

from engines import TensorSpec
from server.launch_loop.structures import view_lenders
from server.link import activity
from server.link.activity import Activity, LenderPage
from server.link.messages import Failure
from server.workers.session import InFlight, Session
from server.workers.stretching import TOO_LONG
from server.workers.wide import WidePlacement, WideStatistics
from tests.server.workers.test_worker import FP32, NEVER, PATIENCE, Bench, benched

LONG = 10**12


class Lender:
    """A tenant that lends: its activity, and the page as the borrower has it."""

    def __init__(self) -> None:
        descriptor = activity.create(4)
        self.activity: Activity = activity.attach(descriptor)
        self.activity.set_lends(True)
        self.activity.expect([1])
        self.page = LenderPage(descriptor, 1)
        os.close(descriptor)


class Borrower(Bench):
    """A bench whose worker has a wide partition too."""

    def stretch(self, limit: int = LONG, lenders: int = 1) -> WidePlacement:
        self.lenders = [Lender() for _ in range(lenders)]
        self.wide = self.device.carve([0, 1])
        pages = [lender.page for lender in self.lenders]
        made = WidePlacement(self.partition, self.wide, pages, limit, WideStatistics())
        made.executors["m/1#1"] = self.engine.bind(self.wide)
        self.worker.wide = made
        made.resume()
        return made

    def run(self, number: int, slot: int = 0) -> None:
        self.put(self.ticket(slot, number))
        assert self.answer(self.next()) == [number]

    def run_all(self, count: int) -> None:
        """One after another."""
        for number in range(count):
            self.run(number)

    def run_at_home(self, number: int = 1) -> None:
        """Run one while a lender has a request open."""
        self.lenders[0].activity.begin()
        self.run(number)
        self.lenders[0].activity.end()
        self.slow_down()

    def slow_down(self) -> None:
        """Works took a second at home, so that they are faster wide, whatever this machine does meanwhile."""
        assert self.worker.wide
        for times in self.worker.wide.times.values():
            times.home = 10**9

    def wait_for_held(self, placement: WidePlacement) -> None:
        """Block until a ticket waits until the works in flight at home have ended."""
        until = time.monotonic() + PATIENCE
        while not placement.held:
            assert time.monotonic() < until, "no ticket waits"
            time.sleep(0)


@contextmanager
def borrower(limit: int = LONG, lenders: int = 1, hosted: bool = False) -> Iterator[tuple[Borrower, WidePlacement]]:
    with benched(kind=Borrower) as bench:
        bench.device.on_host_cores = hosted
        placement = bench.stretch(limit, lenders)
        bench.worker.serve(bench.endpoint)
        yield bench, placement
        bench.worker.halt()
        assert not placement.running
        assert all(lender.page.own[0] == 0 for lender in bench.lenders)


@pytest.mark.parametrize("hosted", [False, True])
def test_works_go_wide_once_their_time_at_home_is_known_and_while_the_lenders_rest(hosted: bool) -> None:
    with borrower(lenders=2, hosted=hosted) as (bench, placement):
        bench.run(0)
        assert bench.wide.stream.ran == 0
        bench.slow_down()
        bench.run_all(5)
        assert (bench.partition.stream.ran, bench.wide.stream.ran) == (1, 5)
        bench.lenders[1].activity.begin()
        bench.run(7)
        assert (bench.partition.stream.ran, bench.wide.stream.ran) == (2, 5)
        bench.lenders[1].activity.end()
        bench.lenders[0].activity.set_lends(False)
        bench.run(8)
        assert (bench.partition.stream.ran, bench.wide.stream.ran) == (3, 5)
        assert (placement.statistics.launches, placement.statistics.returns) == (5, 0)
        home = {why: count for why, count in placement.statistics.why_home().items() if count}
        assert home == {"not_measured": 1, "owner_busy": 1, "owner_stopped": 1}


@pytest.mark.parametrize("hosted", [False, True])
def test_a_wide_work_is_alone_in_flight_and_the_others_follow_it(hosted: bool) -> None:
    with borrower(hosted=hosted) as (bench, placement):
        bench.run_at_home()
        gate = bench.begin(bench.ticket(0, 0))
        assert bench.lenders[0].activity.is_met()
        bench.put(*[bench.ticket(slot, slot) for slot in range(1, 4)])
        enqueued = bench.script.reached["enqueue"]
        gate.open()
        assert [bench.answer(bench.next()) for _ in range(4)] == [[0], [1], [2], [3]]
        assert enqueued == 2, "another was enqueued beside it"
        assert placement.statistics.launches >= 1


@pytest.mark.parametrize("hosted", [False, True])
def test_tickets_that_come_ahead_wait_for_the_work_at_home_and_go_wide(hosted: bool) -> None:
    with borrower(hosted=hosted) as (bench, placement):
        bench.run_at_home()
        bench.lenders[0].activity.begin()
        gate = bench.begin(bench.ticket(0, 0))
        bench.lenders[0].activity.end()
        bench.put(*[bench.ticket(slot, slot) for slot in range(1, 4)])
        if not hosted:  # The other thread sees them; it is parked while works are short.
            assert bench.worker.runner
            bench.worker.runner.session.roles.expect(True)
            bench.wait_for_held(placement)
        gate.open()
        assert [bench.answer(bench.next()) for _ in range(4)] == [[0], [1], [2], [3]]
        assert (bench.partition.stream.ran, bench.wide.stream.ran) == (2, 3)


def test_a_work_that_a_lender_comes_back_to_is_counted_and_not_learnt_from() -> None:
    with borrower() as (bench, placement):
        bench.run_at_home()
        gate = bench.begin(bench.ticket(0, 0))
        bench.lenders[0].activity.begin()
        bench.lenders[0].activity.end()
        gate.open()
        bench.next()
        bench.worker.halt()
        assert (placement.statistics.launches, placement.statistics.returns) == (1, 1)
        (times,) = placement.times.values()
        assert times.wide == 0


def test_what_takes_longer_than_the_lenders_allow_stays_home() -> None:
    with borrower(limit=1) as (bench, placement):
        bench.run_all(4)
        assert placement.statistics.launches == 0
        assert placement.statistics.why_home()["too_long"] == 3, "the first was not measured yet"
        ((model, home, wide),) = bench.worker.too_long()
        assert (model, wide) == ("m/1#1", 0)
        assert home > 1


def test_a_batch_that_takes_longer_than_the_lenders_allow_stays_home_and_smaller_ones_go_wide() -> None:
    with borrower(limit=10**9) as (bench, placement):
        bench.run_at_home()
        placement.times_of(("m/1#1", ((3,),))).home = 10**10
        for count in (3, 1, 3):
            values = range(count)
            bench.put(bench.ticket(0, *values))
            assert bench.answer(bench.next()) == [*values]
        assert (bench.partition.stream.ran, bench.wide.stream.ran) == (3, 1)
        assert placement.statistics.why_home()["too_long"] == 2
        assert bench.worker.too_long() == [], "smaller batches of the model go wide"


def test_what_was_counted_before_is_kept_when_granules_change_hands() -> None:
    with borrower(limit=1) as (_, placement):
        statistics = placement.statistics
        for each in (placement.shared, view_lenders(1, 1, 2, [])):
            statistics.count_in(each)
            each.stayed[TOO_LONG] += 3
        assert statistics.why_home()["too_long"] == 6


def test_narrowing_waits_for_the_wide_work_and_the_tenant_goes_on_at_home() -> None:
    with borrower() as (bench, placement):
        bench.run_at_home()
        gate = bench.begin(bench.ticket(0, 0))
        at_home = placement.suspend()
        assert not at_home.done()
        gate.open()
        at_home.result(PATIENCE)
        assert bench.answer(bench.next()) == [0]
        before = bench.wide.stream.ran
        bench.run(1)
        assert bench.wide.stream.ran == before
        bench.slow_down()
        assert placement.suspend().done()
        placement.resume()
        bench.run(2)
        assert bench.wide.stream.ran == before + 1


def test_a_work_that_was_about_to_go_wide_when_the_partition_is_taken_away_stays_home() -> None:
    with borrower() as (bench, placement):
        bench.run_at_home()
        bench.worker.halt()
        narrowed: list[Future[None]] = []

        class Meanwhile(dict[int, InFlight]):
            """Nothing in flight; the partition is taken away while that is looked up."""

            def __len__(self) -> int:
                narrowed.append(placement.suspend())
                return 0

        session = Session(bench.endpoint, bench.priorities.make(bench.link.tickets.waiting), Semaphore(0))
        flight = placement.enqueue(session, bench.engine.executors[0], bench.ticket(0, 5), Meanwhile())
        assert (flight.placement, placement.running, bench.wide.stream.ran) == (None, False, 0)
        assert [each.done() for each in narrowed] == [True]
        flight.work.wait()


def test_an_answer_in_parts_stays_home_and_is_no_measurement() -> None:
    """What is kept between two parts is on the home partition."""
    with benched(kind=Borrower, compute_parts=lambda inputs: iter([list(inputs)] * 9)) as bench:
        bench.engine.signature = replace(bench.engine.signature, outputs=(TensorSpec("y", FP32, (1,)),))
        placement = bench.stretch()
        bench.worker.serve(bench.endpoint)
        ticket = bench.ticket(0, 7)
        ticket = ticket._replace(after=ticket.serial)
        for _ in range(5):
            bench.put(ticket)
            assert bench.answer(bench.next()) == [7]
            ticket = ticket._replace(serial=ticket.serial + 1000, after=ticket.serial)
        bench.worker.halt()
        assert bench.wide.stream.ran == 0
        assert (placement.times, sum(placement.statistics.why_home().values())) == ({}, 0)


@pytest.mark.parametrize("hosted", [False, True])
def test_a_ticket_that_waits_to_go_wide_is_started_when_the_wide_partition_is_taken_away(hosted: bool) -> None:
    with borrower(hosted=hosted) as (bench, placement):
        bench.worker.executors["home/1#1"] = bench.engine.bind(bench.partition)  # It has none on the wide partition.
        bench.run_at_home()
        bench.run(1)
        gate = bench.begin(bench.ticket(0, 0, model="home/1#1"), bench.ticket(1, 1))
        bench.wait_for_held(placement)
        placement.suspend().result(PATIENCE)
        bench.worker.wide = None
        gate.open()
        assert [bench.answer(bench.next()) for _ in range(2)] == [[0], [1]]


def test_halting_waits_for_a_wide_work_and_the_next_worker_starts_what_is_left() -> None:
    with borrower() as (bench, placement):
        bench.run_at_home()
        gate = bench.begin(bench.ticket(0, 0), bench.ticket(1, 1))
        halting = bench.worker.stop()
        assert not halting.done()
        gate.open()
        halting.result(PATIENCE)
        assert not placement.running
        bench.worker.halt()
        bench.worker.serve(bench.endpoint)
        assert [bench.answer(bench.next()) for _ in range(2)] == [[0], [1]]


def test_a_wide_work_is_cancelled_and_a_ticket_behind_it_that_is_too_late_is_refused() -> None:
    with borrower() as (bench, placement):
        bench.run_at_home()
        gate = bench.script.hold("run")
        wide = bench.ticket(0, 0)
        bench.put(wide, bench.ticket(1, 1, deadline=0), bench.ticket(2, 2, deadline=NEVER))
        gate.wait_for_arrival()
        bench.worker.cancel(0, wide.serial)
        assert [bench.kind(), bench.kind()] == ["cancelled", "expired"]
        gate.open()
        assert bench.answer(bench.next()) == [2]
        assert not placement.running


def test_abandoning_ends_a_wide_work() -> None:
    with borrower() as (bench, placement):
        bench.run_at_home()
        bench.begin(bench.ticket(0, 0), bench.ticket(1, 1))
        bench.worker.abandon(Failure("stopped", "why"))
        assert [bench.next().failure for _ in range(2)] == [("stopped", "why")] * 2
        assert not placement.running
