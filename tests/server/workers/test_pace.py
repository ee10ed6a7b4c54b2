"""A share of PCIe: the rule over any works, and a worker that goes by it, over fakes."""

import mmap
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.launch_loop.structures import IN, MEMORY, OUT
from server.link import activity
from server.link.activity import ENDED, OPEN, Activity, ActivityPage
from server.link.messages import Failure, Ticket
from server.workers.narrow import NarrowPlacement, NarrowStatistics
from server.workers.pace import CATCH_UP, LOOK, PIECE, Pace
from server.workers.stretching import SETTLED
from tests.contract import in_a_thread
from tests.fakes import FakeExecutor
from tests.launchable import needs_a_compiler
from tests.server.workers.test_worker import NEVER, SLOTS, Bench, benched

SECOND = 1_000_000_000
GB = 10**9


def page(open_: int = 1, ended: int = 0) -> ActivityPage:
    """A neighbour's, whose words can be written."""
    found = ActivityPage(descriptor := activity.create(1))
    shared = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    found.processes = [memoryview(shared).cast("Q")]
    found.processes[0][OPEN], found.processes[0][ENDED] = open_, ended
    return found


def set_pcie(pace: Pace, rate: int) -> None:
    for path in (IN, OUT):
        pace.set_rate(path, rate)


Start = tuple[int, int, int]
"""When a work began, and what it moves each way."""


def run(pace: Pace, works: Sequence[tuple[int, int, int]], late: int = 0) -> list[Start]:
    """Start works in order, each after a pause of the tenant, as soon as it may, by a thread that wakes late.

    Each is its pause and the bytes that it moves each way.
    """
    now, starts = SECOND, []
    for pause, in_, out in works:
        now += pause
        while left := pace.wait(now):
            assert 0 < left <= LOOK
            now += left + late
        pace.charge(IN, in_, now)
        pace.charge(OUT, out, now)
        starts.append((now, in_, out))
    return starts


WORKS = st.lists(st.tuples(st.integers(0, 20_000_000), st.integers(0, 10**8), st.integers(0, 10**8)), max_size=30)
RATES = st.integers(10**8, 10**11)


@given(WORKS, RATES, st.integers(0, 3_000_000))
def test_in_any_time_the_works_that_begin_move_the_rate_and_the_burst_and_one_work_more(
    works: list[tuple[int, int, int]], rate: int, late: int
) -> None:
    starts = run(Pace([page()], rate), works, late)
    for way in (1, 2):
        for first in range(len(starts)):
            for last in range(first, len(starts)):
                moved = [each[way] for each in starts[first : last + 1]]
                spent = starts[last][0] - starts[first][0] + CATCH_UP
                assert sum(moved[:-1]) * SECOND <= rate * spent


@given(WORKS, RATES)
def test_a_work_waits_for_no_longer_than_the_bytes_of_those_before_it_take(
    works: list[tuple[int, int, int]], rate: int
) -> None:
    """As if each direction were a bus of that rate, on which those before are."""
    free = [0, 0]
    pause = 0
    now = SECOND
    for (began, *moved), (pause, _, _) in zip(run(Pace([page()], rate), works), works, strict=True):
        now += pause
        assert began <= max(now, *free)
        now = began
        free = [max(each, began) - -nbytes * SECOND // rate for each, nbytes in zip(free, moved, strict=True)]


@pytest.mark.parametrize("nbytes", [1_000, 600_000, 4 << 20, 38_000_000])
@pytest.mark.parametrize("rate", [GB, 5 * GB, 25 * GB])
@pytest.mark.parametrize("late", [0, 50_000, 1_000_000])
def test_over_a_second_the_rate_is_kept_and_used_within_two_percent(nbytes: int, rate: int, late: int) -> None:
    """Works that are always there, and a thread that wakes up to a millisecond late."""
    count = rate // nbytes + 2
    starts = run(Pace([page()], rate), [(0, nbytes // 7, nbytes)] * min(count, 50_000), late)
    took = starts[-1][0] - starts[0][0]
    moved = sum(each[2] for each in starts[:-1])
    assert moved == pytest.approx(rate * took / SECOND, rel=0.02, abs=rate * CATCH_UP / SECOND)


def test_a_share_may_be_taken_away_while_a_work_is_charged() -> None:
    pace, done, before = Pace([*[page(0)] * 50, page()], GB), threading.Event(), sys.getswitchinterval()

    def change() -> None:
        while not done.is_set():
            pace.set_rate(IN, 0)
            pace.set_rate(IN, GB)

    thread = threading.Thread(target=change)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for now in range(SECOND, SECOND + 5_000):
            pace.charge(IN, 1, now)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)


@given(WORKS, RATES)
def test_while_neighbours_rest_nothing_waits_and_nothing_is_put_off(works: list[tuple[int, int, int]], rate: int) -> None:
    neighbour = page(open_=0)
    pace = Pace([neighbour], rate)
    starts = run(pace, works)
    assert [later[0] - earlier[0] for earlier, later in pairwise(starts)] == [pause for pause, _, _ in works[1:]]
    neighbour.processes[0][OPEN] = 1
    assert pace.wait(starts[-1][0] if starts else 0) == 0


def test_what_waits_goes_on_once_the_neighbours_have_rested_for_a_while() -> None:
    neighbour, now = page(), SECOND
    pace = Pace([neighbour], GB)
    pace.charge(IN, 10 * GB, now)
    assert pace.wait(now) == LOOK
    neighbour.processes[0][OPEN], neighbour.processes[0][ENDED] = 0, now
    assert pace.wait(now + SETTLED - 1) == LOOK
    assert pace.wait(now + SETTLED) == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_larger_share_is_felt_at_once_by_what_waits_for_a_small_one(again: bool) -> None:
    pace, neighbour = Pace([page()], 10**6), [page()]
    now = time.monotonic_ns()
    pace.charge(IN, 10**9, now)  # For 1,000 s.
    pace.charge(OUT, 10**8, now)
    if again:
        pace.hold(neighbour, 10**10)
    else:
        set_pcie(pace, 10**10)
    assert pace.wait(now + SECOND // 20) > 0
    assert pace.wait(now + SECOND // 5) == 0
    set_pcie(pace, 10**6)
    assert pace.wait(now + SECOND // 5) == 0, "a smaller one is for what comes"


def test_each_path_has_a_budget_of_its_own() -> None:
    pace = Pace([page()], GB, 2 * GB)
    pace.charge(IN, 4_000_000, SECOND)
    pace.charge(OUT, 1_000_000, SECOND)
    assert pace.wait(SECOND) == 4_000_000 - CATCH_UP
    pace.charge(MEMORY, 12_000_000, SECOND)
    assert pace.wait(SECOND) == 6_000_000 - CATCH_UP
    pace.count_wait(SECOND)
    pace.count_wait(SECOND + 3_000_000)
    assert pace.waits == 1, "then only the memory is waited for"
    pace.set_rate(MEMORY, 0)
    pace.charge(MEMORY, GB, SECOND)
    assert pace.wait(SECOND) == 4_000_000 - CATCH_UP, "it has all there is"
    pace.charge(OUT, 5_000_000, SECOND)
    pace.count_wait(SECOND + 3_000_000)
    assert pace.waits == 2, "only the outputs are waited for"


class Loading:
    """A load that pays, on a clock of its own, while the tenant has works of so many bytes, as many as may begin; of the paths
    only this one is held.
    """

    def __init__(self, rate: int, work: int = 0, path: int = IN) -> None:
        self.neighbour = page()
        self.pace, self.path = Pace([self.neighbour], 0), path
        self.pace.set_rate(path, rate)
        self.now, self.moved, self.waited = SECOND, 0, 0
        self._work, self._free_at = work, SECOND

    def pause(self, seconds: float) -> None:
        until = self.now + round(seconds * SECOND)
        while self._work and self.now + (left := self.pace.wait(self.now)) < until:
            self.now += left
            if not left:
                self.pace.charge(self.path, self._work, self.now)
                self.moved += self._work
                self.waited, self._free_at = max(self.waited, self.now - self._free_at), self.now
        self.now = until

    def pay(self, nbytes: int) -> float:
        """The seconds that it took."""
        began = self.now
        self.pace.pay(nbytes, self.path, self.pause, lambda: self.now)
        return (self.now - began) / SECOND


@pytest.mark.parametrize("loads", [1, 7, 1000])
@pytest.mark.parametrize(("rate", "path"), [(GB, IN), (25 * GB, IN), (GB, OUT), (GB, MEMORY)])
def test_loads_take_as_long_as_the_tenant_s_share_gives_them(rate: int, path: int, loads: int) -> None:
    """And strains, each on its path."""
    loading = Loading(rate, path=path)
    assert sum(loading.pay(rate // loads) for _ in range(loads)) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("loads", [1, 7, 1000])
@pytest.mark.parametrize("work", [10_000, 4_000_000, 100_000_000])
def test_works_and_loads_share_what_there_is_and_none_waits_for_long(work: int, loads: int) -> None:
    loading = Loading(GB, work)
    took = sum(loading.pay(GB // loads) for _ in range(loads))
    assert loading.moved + GB <= GB * took + GB * (CATCH_UP + PIECE) / SECOND + work
    assert 1.9 <= took <= 2.1
    assert loading.waited <= 2 * (work + GB * PIECE // SECOND) + PIECE


def test_a_load_pays_for_nothing_while_neighbours_rest() -> None:
    for before in (0, GB):  # Also right after a load that has paid.
        loading = Loading(GB, 100_000_000)
        loading.pay(before)
        loading.neighbour.processes[0][OPEN] = 0
        assert sum(loading.pay(GB) for _ in range(100)) == 0
        assert loading.pace.wait(loading.now) == 0


class Neighbour:
    """A tenant of the same GPU, and its page as the others have it."""

    def __init__(self) -> None:
        descriptor = activity.create(4)
        self.activity: Activity = activity.attach(descriptor)
        self.page = ActivityPage(descriptor)
        os.close(descriptor)


class Paced(Bench):
    """A bench whose tenant has a share of PCIe, beside a neighbour."""

    def share(self, rate: int) -> Pace:
        self.neighbour = Neighbour()
        self.pace = self.worker.pace = Pace([self.neighbour.page], rate)
        return self.pace

    def use_up(self, seconds: float = 3600.0) -> None:
        """The tenant has moved what it may move in so long."""
        self.neighbour.activity.begin()
        self.pace.charge(IN, int(seconds * self.pace.rate(IN)), time.monotonic_ns())

    def fence(self, moved: int) -> NarrowPlacement:
        """Works, each of which moves so many bytes of memory, go to a narrow placement while the neighbour is at work."""
        partition = self.device.carve([1])
        made = NarrowPlacement(partition, [self.neighbour.page], 1, NarrowStatistics())
        made.executors["m/1#1"] = self.engine.bind(partition)
        made.set_moved({"m/1#1": moved})
        made.demand("m/1#1").home = 1
        self.worker.narrow = made
        self.worker.revoke()
        self.worker.resume(made)
        return made

    def wait_until_one_waits(self, count: int = 1) -> None:
        """Block until so many works have had to wait."""
        until = time.monotonic() + 60.0
        while self.pace.waits < count:
            assert time.monotonic() < until, "nothing waits"
            time.sleep(0)


@contextmanager
def paced(launchable: bool, rate: int = 10**6) -> Iterator[Paced]:
    with benched(kind=Paced, launchable=launchable) as bench:
        bench.share(rate)
        bench.worker.serve(bench.endpoint)
        if launchable:
            bench.teach()
        yield bench
        bench.worker.halt()


@pytest.fixture(params=[False, pytest.param(True, marks=needs_a_compiler)], ids=["worker", "launch loop"])
def bench(request: pytest.FixtureRequest) -> Iterator[Paced]:
    with paced(request.param) as bench:
        yield bench


def test_a_ticket_waits_for_the_share_and_goes_on_in_order_when_neighbours_rest(bench: Paced) -> None:
    bench.use_up()
    before = bench.enqueued()
    bench.put(*[bench.ticket(slot, slot) for slot in range(SLOTS)])
    bench.wait_until_one_waits()
    assert bench.enqueued() == before
    bench.neighbour.activity.end()
    assert [bench.answer(bench.next()) for _ in range(SLOTS)] == [[slot] for slot in range(SLOTS)]


def test_a_ticket_waits_no_longer_than_until_it_is_due(bench: Paced) -> None:
    bench.use_up(0.05)
    began = time.monotonic()
    bench.put(bench.ticket(0, 1))
    assert bench.answer(bench.next()) == [1]
    assert time.monotonic() - began >= 0.03
    assert bench.pace.waits == 1, "however often it was looked at"


def test_a_work_in_flight_is_completed_while_the_next_ticket_waits(bench: Paced) -> None:
    gate = bench.begin(bench.ticket(0, 0))
    bench.use_up()
    bench.put(bench.ticket(1, 1))
    gate.open()
    assert bench.answer(bench.next()) == [0]
    bench.wait_until_one_waits()
    bench.neighbour.activity.end()
    assert bench.answer(bench.next()) == [1]


def test_a_ticket_that_waits_can_be_cancelled_and_expires(bench: Paced) -> None:
    bench.use_up()
    first, second = bench.ticket(0, 0), bench.ticket(1, 1, deadline=time.monotonic() + 0.05)
    bench.put(first, second, bench.ticket(2, 2))
    bench.wait_until_one_waits()
    bench.worker.cancel(first.slot, first.serial)
    assert bench.next().failure == Failure("cancelled", "withdrawn before it began")
    assert bench.kind() == "expired"
    bench.neighbour.activity.end()
    assert bench.answer(bench.next()) == [2]


def test_a_worker_with_a_ticket_that_waits_can_be_abandoned(bench: Paced) -> None:
    bench.use_up()
    bench.put(bench.ticket(0, 0), bench.ticket(1, 1))
    bench.wait_until_one_waits()
    bench.worker.abandon()
    assert [bench.kind(), bench.kind()] == ["cancelled", "cancelled"]


def test_a_ticket_that_waits_holds_up_no_halt_and_is_left_to_the_next_worker(bench: Paced) -> None:
    bench.use_up()
    bench.put(*[bench.ticket(slot, slot) for slot in range(3)])
    bench.wait_until_one_waits()
    in_a_thread(bench.worker.halt)
    other = bench.another(1)
    other.serve(bench.endpoint)
    assert [bench.answer(bench.next()) for _ in range(3)] == [[0], [1], [2]]
    other.halt()


def test_an_http_process_that_takes_back_a_ticket_that_waits_costs_no_time(bench: Paced) -> None:
    """It can write to the whole link, also how many tickets it has put."""
    bench.use_up(0.05)
    bench.put(bench.ticket(0, 0))
    bench.wait_until_one_waits()
    put = bench.link.arena.total_put
    put[0] -= 1
    began = time.process_time()
    poller = select.poll()
    poller.register(bench.link.completions.event, select.POLLIN)
    poller.poll(400)
    assert time.process_time() - began < 0.2
    put[0] += 1


def test_a_ticket_that_waits_costs_no_time(bench: Paced) -> None:
    """Also one that the launch loop does not know, which waits in Python although there is a loop."""
    bench.use_up()
    bench.put(bench.ticket(0, 1, 2, 3))
    bench.wait_until_one_waits()
    began = time.process_time()
    poller = select.poll()
    poller.register(bench.link.completions.event, select.POLLIN)
    poller.poll(400)
    assert time.process_time() - began < 0.2
    bench.neighbour.activity.end()
    assert bench.answer(bench.next()) == [1, 2, 3]


def test_the_pages_of_neighbours_outlive_what_the_launch_loop_reads_them_by() -> None:
    """A share that is taken away may be read until the loop has seen that."""
    neighbour = Neighbour()
    shared, kept = Pace([neighbour.page], GB).shared, weakref.ref(neighbour.page.processes[0])
    del neighbour
    assert kept() is not None
    del shared
    assert kept() is None


def test_other_neighbours_count_from_then_on_and_what_was_charged_still_does(bench: Paced) -> None:
    bench.use_up()
    bench.put(bench.ticket(0, 0))
    bench.wait_until_one_waits()
    other, charged, waits = Neighbour(), bench.pace.shared.free_at[IN], bench.pace.waits
    bench.pace.hold([other.page], bench.pace.rate(IN))
    bench.worker.pace = bench.pace
    assert bench.answer(bench.next()) == [0], "the other rests"
    other.activity.begin()
    assert bench.pace.shared.free_at[IN] >= charged
    bench.put(bench.ticket(1, 1))
    bench.wait_until_one_waits(waits + 1)
    other.activity.end()
    assert bench.answer(bench.next()) == [1]


def test_a_share_that_is_taken_away_or_given_holds_from_then_on(bench: Paced) -> None:
    bench.use_up()
    bench.put(bench.ticket(0, 0))
    bench.wait_until_one_waits()
    bench.worker.pace = None
    assert bench.answer(bench.next()) == [0]
    bench.worker.pace = bench.pace
    bench.put(bench.ticket(0, 5))
    bench.wait_until_one_waits(2)
    bench.neighbour.activity.end()
    assert bench.answer(bench.next()) == [5]


def test_inputs_and_outputs_count(bench: Paced) -> None:
    """At a byte a millisecond: a number has four."""
    set_pcie(bench.pace, 1000)
    bench.neighbour.activity.begin()
    before = time.monotonic_ns()
    bench.put(bench.ticket(0, 1.5))
    bench.next()
    for free_at in (bench.pace.shared.free_at[IN], bench.pace.shared.free_at[OUT]):
        assert before < free_at + CATCH_UP - 4_000_000 < time.monotonic_ns()


@needs_a_compiler
def test_the_time_that_a_work_takes_is_not_lost_to_its_tenant(bench: Paced) -> None:
    """Its outputs count from when it began, although their size is known at its end only."""
    bench.neighbour.activity.begin()
    gate = bench.begin(bench.ticket(0, 1))
    began = time.monotonic_ns()
    while time.monotonic_ns() - began < 20_000_000:
        pass
    gate.open()
    assert bench.answer(bench.next()) == [1]
    assert 0 < bench.pace.shared.free_at[OUT] <= began + 4 * SECOND // bench.pace.rate(IN)


def test_outputs_that_are_not_asked_for_and_not_copied_do_not_count() -> None:
    with paced(True) as bench:
        bench.put(bench.ticket(0, 1)._replace(unasked=1))
        bench.next()
        bench.neighbour.activity.begin()
        bench.put(bench.ticket(0, 1)._replace(unasked=1))
        bench.next()
        assert (bench.pace.shared.free_at[IN] > 0, bench.pace.shared.free_at[OUT]) == (True, 0)
        assert bench.script.reached["enqueue"] == 1, "the loop ran the last one"


def test_works_of_a_tenant_that_moves_little_never_wait(bench: Paced) -> None:
    set_pcie(bench.pace, 10 * GB)
    bench.neighbour.activity.begin()
    for _ in range(20):
        bench.rush()
    assert bench.pace.waits == 0


@pytest.mark.parametrize("anyway", [False, True])
def test_works_on_the_narrow_placement_begin_as_the_share_of_memory_allows(bench: Paced, anyway: bool) -> None:
    """Each moves what the tenant may in a twentieth of a second, also if it is held whatever it moves."""
    narrow = bench.fence(-GB // 20 if anyway else GB // 20)
    set_pcie(bench.pace, 0)
    bench.pace.set_rate(MEMORY, GB)
    bench.neighbour.activity.begin()
    began = time.monotonic()  # The first one is charged when it begins.
    bench.put(bench.ticket(0, 0))
    assert bench.answer(bench.next()) == [0]
    before = narrow.statistics.launches
    for number in range(1, 7):
        bench.put(bench.ticket(number % SLOTS, number))
        assert bench.answer(bench.next()) == [number]
    took = time.monotonic() - began
    assert narrow.statistics.launches - before == 6
    assert took >= 6 / 20 - 2 * CATCH_UP / SECOND
    assert bench.pace.waits == 0, "for PCIe"
    narrow.set_moved({"m/1#1": GB // 20})
    narrow.demand("m/1#1").home = 10**18
    before, charged = narrow.statistics.launches, bench.pace.shared.free_at[MEMORY]
    bench.put(*[bench.ticket(slot, slot) for slot in range(SLOTS)])
    assert [bench.answer(bench.next()) for _ in range(SLOTS)] == [[slot] for slot in range(SLOTS)]
    assert narrow.statistics.launches == before
    assert bench.pace.shared.free_at[MEMORY] == charged, "at home memory is not charged"
    narrow.demand("m/1#1").home = 1
    bench.neighbour.activity.end()
    bench.put(*[bench.ticket(slot, slot) for slot in range(SLOTS)])
    assert [bench.answer(bench.next()) for _ in range(SLOTS)] == [[slot] for slot in range(SLOTS)]


def test_weights_that_are_streamed_count_with_the_inputs() -> None:
    with paced(False, rate=GB) as bench:
        executor = bench.engine.executors[0]
        assert isinstance(executor, FakeExecutor)
        executor.streamed = 3600 * GB  # type: ignore[attr-defined]
        bench.neighbour.activity.begin()
        bench.put(bench.ticket(0, 1), bench.ticket(1, 2, deadline=NEVER))
        assert bench.answer(bench.next()) == [1]
        bench.wait_until_one_waits()
        bench.neighbour.activity.end()
        assert bench.answer(bench.next()) == [2]


class Storm:
    """Tickets of a paced bench; all that may happen to them, by chance."""

    def __init__(self, bench: Paced, seed: int, narrow: bool) -> None:
        self._bench = bench
        self._chance = Random(seed)
        self._waiting: dict[int, tuple[Ticket, list[float]]] = {}
        self._busy = False
        if narrow:
            bench.fence(10**12)

    def put(self) -> None:
        bench, chance, tickets = self._bench, self._chance, []
        free = sorted(set(range(SLOTS)) - self._waiting.keys())
        for slot in chance.sample(free, chance.randint(0, len(free))):
            numbers = [float(chance.randint(0, 99))] * chance.choice([1, 1, 1, 3])
            deadline = time.monotonic() + chance.choice([0, 0.001, 0.01]) if chance.random() < 0.2 else NEVER
            tickets.append(bench.ticket(slot, *numbers, deadline=deadline))
            self._waiting[slot] = tickets[-1], numbers
        bench.put(*tickets)

    def cancel(self) -> None:
        if self._waiting:
            ticket, _ = self._chance.choice(list(self._waiting.values()))
            self._bench.worker.cancel(ticket.slot, ticket.serial)

    def work_or_rest(self) -> None:
        """The neighbour."""
        activity = self._bench.neighbour.activity
        activity.end() if self._busy else activity.begin()
        self._busy = not self._busy

    def pace(self) -> None:
        self._bench.worker.pace = None if self._bench.worker.pace else self._bench.pace

    def halt(self) -> None:
        self._bench.worker.halt()
        self._bench.worker.serve(self._bench.endpoint)

    def take(self) -> None:
        """One completion, if any ticket is on its way."""
        if self._waiting:
            done = self._bench.next()
            _, numbers = self._waiting.pop(done.slot)
            if done.failure is None:
                assert self._bench.answer(done) == numbers
            else:
                assert done.failure.kind in ("cancelled", "expired")

    def end(self) -> None:
        if self._busy:
            self.work_or_rest()
        self._bench.worker.pace = None
        while self._waiting:
            self.take()
        assert not self._bench.errors


@pytest.mark.parametrize("launchable", [False, pytest.param(True, marks=needs_a_compiler)], ids=["worker", "launch loop"])
@pytest.mark.parametrize("narrow", [False, True], ids=["home", "narrow"])
@pytest.mark.parametrize("seed", range(3))
def test_every_ticket_is_answered_once_whatever_happens_while_some_wait(launchable: bool, narrow: bool, seed: int) -> None:
    with paced(launchable, rate=2000) as bench:
        storm, chance = Storm(bench, seed, narrow), Random(seed)
        happens = [storm.put] * 12 + [storm.take] * 12 + [storm.cancel] * 3 + [storm.work_or_rest, storm.pace, storm.halt]
        for _ in range(300):
            chance.choice(happens)()
        storm.end()
