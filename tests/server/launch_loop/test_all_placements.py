"""A tenant that borrows, is fenced and paced, while all of that changes at random: every ticket is answered, and rightly."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from server.workers.pace import Pace
from tests.contract import in_a_thread
from tests.launchable import needs_a_compiler
from tests.server.workers.test_narrow import HOG, TINY, never_both
from tests.server.workers.test_worker import PATIENCE, SLOTS, benched

from .test_fence import Both

TURNS = 150


class Turns:
    """What may happen to such a tenant between and during its requests."""

    def __init__(self, bench: Both, choose: random.Random, launchable: bool) -> None:
        self.bench = bench
        self.choose = choose
        self.wide = bench.stretch()
        self.placement = bench.fence()
        self.pace = Pace([each.page for each in bench.neighbours], 10_000, 10**6)
        self.changes: list[Callable[[], None]] = [
            self.neighbour,
            self.neighbour,
            self.lender,
            self.know,
            self.know,
            self.suspend_narrow,
            self.suspend_wide,
            self.revoke,
            self.set_pace,
            self.halt,
        ]
        if not launchable:
            self.changes.append(self.another_thread)

    def neighbour(self) -> None:
        neighbour = self.bench.neighbours[0]
        neighbour.rest() if neighbour.activity.open else neighbour.activity.begin()

    def lender(self) -> None:
        lender = self.bench.lenders[0].activity
        lender.end() if lender.open else lender.begin()

    def know(self) -> None:
        self.bench.know(self.placement, self.choose.choice([1000, 2000]))
        with suppress(RuntimeError):  # The worker is adding one.
            self.bench.slow_down()

    def suspend_narrow(self) -> None:
        self.placement.suspend()
        self.bench.worker.revoke()
        self.bench.worker.resume(self.placement)

    def suspend_wide(self) -> None:
        self.wide.suspend()
        self.bench.worker.revoke()
        self.bench.worker.resume(self.wide)

    def revoke(self) -> None:
        executor = self.choose.choice(list(self.bench.engine.executors))
        if revoke := getattr(executor, "revoke", None):
            revoke()

    def set_pace(self) -> None:
        self.bench.worker.pace = self.choose.choice([None, self.pace])

    def another_thread(self) -> None:
        """For a worker without a launch loop, beside which no thread may listen."""
        self.bench.has_two_threads()

    def halt(self) -> None:
        self.bench.worker.halt()
        self.bench.worker.serve(self.bench.endpoint)


@pytest.mark.parametrize("launchable", [False, pytest.param(True, marks=needs_a_compiler)])
def test_every_ticket_is_answered_whatever_happens_meanwhile(launchable: bool) -> None:
    with benched(kind=Both, launchable=launchable) as bench:
        choose = random.Random(7)
        turns = Turns(bench, choose, launchable)
        both = bench.watch() if launchable else []
        bench.worker.serve(bench.endpoint)
        for turn in range(TURNS):
            for change in choose.sample(turns.changes, 2):
                change()
            tickets = []
            for slot in range(SLOTS):
                model = choose.choice([HOG, HOG, TINY])
                tickets.append(bench.ticket(slot, *[turn] * choose.choice([1, 1, 1, 2]), model=model))
            cancelled = choose.random() < 0.2
            bench.put(*tickets[:4])
            choose.choice(turns.changes)()
            bench.put(*tickets[4:])
            if cancelled:
                bench.worker.cancel(6, tickets[6].serial)
            dones = [bench.next() for _ in range(SLOTS)]
            assert sorted(done.slot for done in dones) == list(range(SLOTS))
            assert {tuple(set(bench.answer(done))) for done in dones if done.failure is None} == {(turn,)}
            assert [done.failure.kind for done in dones if done.failure] in ([], ["cancelled"] if cancelled else [])
        assert (both, bench.errors, bench.lost) == ([], [], [])
        assert min(turns.placement.statistics.launches, turns.wide.statistics.launches) > 0
        bench.worker.halt()
        assert (turns.placement.running, turns.wide.running) == (False, False)


@pytest.mark.parametrize("launchable", [False, pytest.param(True, marks=needs_a_compiler)])
def test_neighbours_come_and_go_at_any_moment_and_nothing_is_in_flight_on_two_placements(launchable: bool) -> None:
    """Other threads change all that decides while tickets come as fast as they are answered."""
    with benched(kind=Both, launchable=launchable) as bench:
        turns = Turns(bench, random.Random(3), launchable)
        both = bench.watch() if launchable else never_both(bench)
        bench.worker.serve(bench.endpoint)
        stop = threading.Event()

        def change(changes: list[Callable[[], None]]) -> None:
            choose = random.Random(len(changes))
            while not stop.is_set():
                choose.choice(changes)()
                time.sleep(0)

        groups = [turns.neighbour], [turns.know, turns.lender, turns.set_pace]
        threads = [in_a_thread(partial(change, each))[1] for each in groups]
        sent: dict[int, int] = {}
        for number in range(3000):
            slot = number if number < SLOTS else answered(bench, sent)
            sent[slot] = number
            bench.put(bench.ticket(slot, number, model=(HOG, HOG, TINY)[number % 3]))
        for _ in range(SLOTS):
            answered(bench, sent)
        stop.set()
        for each in threads:
            each.result(PATIENCE)
        assert ((both if isinstance(both, list) else both()), bench.errors, bench.lost) == ([], [], [])
        assert turns.placement.statistics.launches > 0


def answered(bench: Both, sent: dict[int, int]) -> int:
    """The slot of the next answer, which is right."""
    done = bench.next()
    assert bench.answer(done) == [sent[done.slot]]
    return done.slot
