"""How the launch loop sends works to the narrow placement, as Python does, and what it does with them over a fake driver."""

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitions import DeviceLost
from server.control.fence import Fence
from server.control.stretch import Wide
from server.device.placements import TenantPlacements
from server.device.roles import TenantFence
from server.device.side import Means
from server.device.tenant_locks import TenantLocks
from server.launch_loop.library import open_library
from server.launch_loop.structures import Demand, view_fence
from server.link import activity
from server.workers.fence import SECOND, at_work, could_exceed, exceeds
from server.workers.narrow import NarrowPlacement, NarrowStatistics
from server.workers.placement import Placement
from server.workers.stretching import SETTLED, towards
from server.workers.worker import Worker
from tests.launchable import LaunchableExecutor, needs_a_compiler, open_fake_cuda
from tests.server.workers.test_fence import NEIGHBOURS, NOW, RESTING
from tests.server.workers.test_narrow import HOG, TINY, Fenced, Neighbour
from tests.server.workers.test_narrow import RATE as RATE_OF_TENANT
from tests.server.workers.test_wide import Borrower
from tests.server.workers.test_worker import PATIENCE, SLOTS, Bench, benched

pytestmark = needs_a_compiler

FIGURE = st.one_of(st.integers(0, 2**20), st.integers(0, 2**58))
MOVED = st.one_of(FIGURE, st.integers(-(2**58), -1))
UNITS = st.integers(1, 132)
RATE = st.one_of(st.integers(1, 2**20), st.integers(1, 2**58))
"""Nanoseconds of nine years, and as many bytes: with the units of a device no product of these is more than 128 bits have."""
DRAWS = st.one_of(
    st.tuples(MOVED, FIGURE, RATE),
    # As on a GPU: up to some terabytes a second, and about as much as the tenant may.
    st.builds(
        lambda home, rate, halves, more: (home * rate * halves // SECOND // 2 + more, home, rate),
        st.integers(10**4, 10**9),
        st.integers(10**9, 10**13),
        st.integers(0, 8),
        st.integers(0, 1),
    ),
)
"""What a work moves, takes at home, and may draw."""
AFTER = st.one_of(st.sampled_from([SETTLED - 1, SETTLED, SETTLED + 1]), st.integers(-2 * SETTLED, 2 * SETTLED))


@settings(max_examples=300)
@given(st.one_of(NEIGHBOURS, RESTING), NOW, DRAWS, AFTER, UNITS, UNITS)
def test_c_and_python_send_the_same_works_to_the_narrow_placement(
    neighbours: list[memoryview], now: int, draws: tuple[int, int, int], after: int, units: int, wide: int
) -> None:
    moved, home, rate = draws
    fence = view_fence(rate, NarrowStatistics().counted, neighbours)
    demand = Demand(home, 0, moved)
    moments = {now, now % (2 * SETTLED), *[max(0, min(2**62, int(each[activity.ENDED]) + after)) for each in neighbours]}
    for at in moments:
        said = open_library().launch_loop_goes_narrow(ctypes.byref(fence), ctypes.byref(demand), at)
        assert bool(said) == (exceeds(moved, home, rate) and at_work(neighbours, at))
        said = open_library().launch_loop_stays_home(ctypes.byref(fence), ctypes.byref(demand), units, wide, at)
        assert bool(said) == (could_exceed(moved, home, rate, units, wide) and at_work(neighbours, at))


@given(st.lists(st.one_of(st.integers(0, 10**6), st.integers(0, 10**12)), max_size=20))
def test_c_and_python_learn_the_same_times(took: list[int]) -> None:
    ours, theirs = 0, Demand()
    for each in took:
        ours = towards(ours, each)
        open_library().launch_loop_learn_time(ctypes.byref(theirs), each)
        assert theirs.home == ours > 0


class Looping(Fenced):
    """A fenced bench whose launch loop knows tickets of one number of both models, on both placements."""

    def placed(self, number: int) -> list[LaunchableExecutor]:
        """The executors at home, 0, or narrow, 1."""
        partition = (self.partition, self.narrow)[number]
        return [each for each in self.engine.executors if isinstance(each, LaunchableExecutor) and each.partition is partition]

    def launched(self) -> tuple[int, int]:
        """At home, and narrow."""
        home, narrow = (sum(each.launched for each in self.placed(number)) for number in (0, 1))
        return home, narrow

    def flying(self) -> tuple[int, int]:
        """In flight at home, and narrow."""
        home, narrow = (sum(each.launched - each.ended for each in self.placed(number)) for number in (0, 1))
        return home, narrow

    def learn(self) -> None:
        """Have the loop learn both models."""
        for model in (HOG, TINY):
            for _ in range(2):
                self.run(1, model=model)
        assert self.worker.narrow
        self.know(self.worker.narrow)

    def watch(self) -> list[tuple[int, int]]:
        """From now on each work looks, when it runs, at what is in flight: where works were on both placements."""
        both: list[tuple[int, int]] = []
        reach = self.script.reach

        def look(point: str, given_up: Callable[[], bool] = lambda: False) -> None:
            flying = self.flying()
            if point == "run" and all(flying):
                both.append(flying)
            reach(point, given_up)

        self.script.reach = look  # type: ignore[method-assign]
        return both


@pytest.fixture
def bench() -> Iterator[Looping]:
    with benched(kind=Looping, launchable=True) as bench:
        bench.fence()
        bench.worker.serve(bench.endpoint)
        bench.learn()
        yield bench
        bench.worker.halt()
        assert bench.lost or bench.flying() == (0, 0)


def test_the_loop_is_narrow_while_a_neighbour_is_at_work_and_home_when_all_have_rested(bench: Looping) -> None:
    assert bench.worker.narrow
    enqueued, (home, narrow) = bench.script.reached["enqueue"], bench.launched()
    counted = bench.worker.narrow.statistics.launches
    bench.run_all(20)
    assert bench.launched() == (home + 20, narrow)
    bench.know(bench.worker.narrow)
    bench.neighbours[0].activity.begin()
    bench.run_all(20)
    assert bench.launched() == (home + 20, narrow + 20)
    bench.run_all(3, model=TINY)
    assert bench.launched() == (home + 23, narrow + 20)
    bench.neighbours[0].activity.end()
    bench.run(1)
    assert bench.launched() == (home + 23, narrow + 21), "its neighbour has only just ended"
    bench.neighbours[0].activity.begin()
    bench.neighbours[0].rest()
    bench.run(1)
    assert bench.launched() == (home + 24, narrow + 21)
    assert bench.worker.narrow.statistics.launches == counted + 21
    assert bench.script.reached["enqueue"] == enqueued, "the loop ran them"


def test_the_loop_learns_what_works_take_at_home_and_narrow_apart(bench: Looping) -> None:
    placement = bench.worker.narrow
    assert placement
    placement.demand(HOG).home = placement.demand(HOG).narrow = 0
    bench.run(1)
    home = placement.measured()[HOG].home
    assert (home > 0, placement.measured()[HOG].narrow) == (True, 0)
    placement.demand(HOG).moved = 10**15
    bench.neighbours[0].activity.begin()
    bench.run_all(3)
    assert placement.measured()[HOG].home == home
    assert placement.measured()[HOG].narrow > 0


def test_narrow_works_are_in_flight_together(bench: Looping) -> None:
    bench.neighbours[0].activity.begin()
    gate, (_, before) = bench.script.hold("run"), bench.launched()
    bench.put(*[bench.ticket(slot, slot) for slot in range(SLOTS)])
    gate.wait_for_arrival()
    until = time.monotonic() + PATIENCE
    while bench.launched()[1] < before + SLOTS:
        assert time.monotonic() < until, f"{bench.launched()} were launched"
        time.sleep(0)
    gate.open()
    assert [bench.answer(bench.next()) for _ in range(SLOTS)] == [[slot] for slot in range(SLOTS)]


@pytest.mark.parametrize(("first", "then"), [(TINY, HOG), (HOG, TINY)])
def test_a_ticket_for_another_placement_waits_for_those_in_flight_and_all_behind_it_too(
    bench: Looping, first: str, then: str
) -> None:
    both, before = bench.watch(), bench.launched()
    bench.neighbours[0].activity.begin()
    gate = bench.begin(bench.ticket(0, 0, model=first))
    models = [then, then, first, then, first, first]
    bench.put(*[bench.ticket(slot, slot, model=model) for slot, model in enumerate(models, 1)])
    bench.wait_until_held()
    assert sum(bench.launched()) == sum(before) + 1
    gate.open()
    assert [bench.answer(bench.next()) for _ in range(7)] == [[slot] for slot in range(7)]
    assert (both, bench.script.reached["enqueue"]) == ([], 2)


def test_a_ticket_that_waits_goes_home_when_the_neighbours_process_ends(bench: Looping) -> None:
    bench.neighbours[0].activity.begin()
    home, narrow = bench.launched()
    gate = bench.begin(bench.ticket(0, 0, model=TINY))
    bench.put(bench.ticket(1, 1), bench.ticket(2, 2), bench.ticket(3, 3, deadline=0))
    bench.wait_until_held()
    activity.reset(bench.neighbours[0].descriptor)
    gate.open()
    dones = {done.slot: done.failure for done in [bench.next() for _ in range(4)]}
    assert [slot for slot, failure in dones.items() if failure is None] == [0, 1, 2]
    assert bench.launched() == (home + 3, narrow)


def test_what_has_no_graph_on_the_narrow_placement_is_run_there_by_the_worker_and_at_home_by_the_loop(bench: Looping) -> None:
    hog = bench.placed(1)[0]
    hog.launchable = False
    bench.placed(0)[0].revoke()
    bench.run_all(20)
    home, enqueued = bench.placed(0)[0].launched, bench.script.reached["enqueue"]
    bench.run(1)
    assert (bench.placed(0)[0].launched, bench.script.reached["enqueue"]) == (home + 1, enqueued), "the loop knows it at home"
    assert bench.worker.narrow
    bench.know(bench.worker.narrow)
    bench.neighbours[0].activity.begin()
    bench.run_all(5)
    assert (bench.narrow.stream.ran, bench.script.reached["enqueue"]) == (5, enqueued + 5)
    hog.launchable = True
    hog.revoke()  # It has been captured there by now.
    bench.run_all(5)
    assert hog.launched > 0
    assert bench.placed(0)[0].launched == home + 1


def test_after_suspending_everything_is_at_home_and_after_resuming_narrow_again(bench: Looping) -> None:
    placement = bench.worker.narrow
    assert placement
    bench.neighbours[0].activity.begin()
    bench.run(0)
    gate = bench.begin(bench.ticket(0, 0), bench.ticket(1, 1))
    placement.suspend()
    gate.open()
    bench.worker.revoke()
    assert bench.flying() == (0, 0), "it waits for the works of the loop"
    assert [bench.answer(bench.next()) for _ in range(2)] == [[0], [1]]
    _, narrow = bench.launched()
    bench.run_all(5)
    assert (bench.launched()[1], bench.narrow.stream.ran) == (narrow, 0)
    bench.worker.resume(placement)
    bench.know(placement)
    bench.run_all(5)
    assert bench.launched()[1] > narrow


def test_another_rate_or_neighbour_counts_at_once(bench: Looping) -> None:
    placement = bench.worker.narrow
    assert placement
    bench.neighbours[0].activity.begin()
    bench.run(0)
    home, narrow = bench.launched()
    placement.hold([each.page for each in bench.neighbours], 10**9)
    bench.worker.resume(placement)
    bench.run(0)
    assert bench.launched() == (home + 1, narrow)
    other = Neighbour()
    placement.hold([other.page], RATE_OF_TENANT)
    bench.worker.resume(placement)
    bench.know(placement)
    bench.run(0)
    assert bench.launched() == (home + 2, narrow)
    other.activity.begin()
    bench.know(placement)
    bench.run(0)
    assert bench.launched() == (home + 2, narrow + 1)


def test_a_placement_that_is_taken_away_from_a_worker_that_serves_is_used_no_more(bench: Looping) -> None:
    placement = bench.worker.narrow
    assert placement
    bench.neighbours[0].activity.begin()
    bench.run(0)
    placement.suspend().result(PATIENCE)
    bench.worker.revoke()
    bench.worker.narrow = None
    placement.close()
    bench.run_all(5)
    assert bench.narrow.closed


def test_an_engine_may_be_closed_on_the_narrow_placement_at_any_moment(bench: Looping) -> None:
    """A model that leaves, or is paged out: closing revokes, and works go on at home."""
    assert bench.worker.narrow
    bench.neighbours[0].activity.begin()
    bench.run(0)
    bench.worker.narrow.executors.pop(HOG).close()
    home, _ = bench.launched()
    bench.run_all(3)
    assert bench.launched()[0] >= home + 2


def test_the_next_worker_launches_the_first_ticket_narrow_without_having_run_one_like_it(bench: Looping) -> None:
    bench.neighbours[0].activity.begin()
    partition, narrow = bench.device.carve([2, 3]), bench.device.carve([2])
    following = Worker(
        Placement(partition, {HOG: bench.engine.bind(partition)}), bench.lost.append, bench.priorities, meter=bench.meter
    )
    made = NarrowPlacement(narrow, [each.page for each in bench.neighbours], 1, NarrowStatistics())
    made.executors[HOG] = bench.engine.bind(narrow)
    made.set_moved({HOG: 10**12})
    made.demand(HOG).home = 1
    following.narrow = made
    following.resume(made)
    enqueued = bench.script.reached["enqueue"]
    following.take_over(bench.endpoint, bench.worker)
    bench.worker.retire()
    following.serve(bench.endpoint)
    bench.put(bench.ticket(0, 5))
    assert bench.answer(bench.next()) == [5]
    assert (made.statistics.launches, bench.script.reached["enqueue"]) == (1, enqueued)
    following.close()


def test_the_loop_of_the_next_worker_uses_the_placement_that_it_takes_over(bench: Looping) -> None:
    placement, partition = bench.worker.narrow, bench.device.carve([0, 1, 2])
    assert placement
    home = Placement(partition, {HOG: bench.worker.executors[HOG].rebind(partition)})
    following = Worker(home, bench.lost.append, bench.priorities, meter=bench.meter)
    following.take_over(bench.endpoint, bench.worker)
    bench.worker.halt()
    bench.worker.narrow, following.narrow = None, placement
    following.serve(bench.endpoint)
    following.revoke()
    bench.neighbours[0].activity.begin()
    bench.run(1)
    (_, narrow), enqueued = bench.launched(), bench.script.reached["enqueue"]
    bench.run_all(5)
    assert (bench.launched()[1], bench.script.reached["enqueue"]) == (narrow + 5, enqueued)
    bench.worker.retire()
    assert not bench.narrow.closed
    following.close()
    assert bench.narrow.closed


def test_an_error_of_the_device_during_a_narrow_work_is_reported(bench: Looping) -> None:
    bench.neighbours[0].activity.begin()
    bench.script.fail("run", error=DeviceLost("gone"))
    bench.put(bench.ticket(0, 0))
    assert bench.kind() == "lost"
    assert [str(each) for each in bench.lost] == ["gone"]


def test_a_narrow_launch_that_fails_fails_its_ticket(bench: Looping) -> None:
    assert bench.worker.narrow
    bench.neighbours[0].activity.begin()
    counted = bench.worker.narrow.statistics.launches
    open_fake_cuda().fake_fail_after(0)
    try:
        bench.put(bench.ticket(0, 0))
        assert bench.kind() == "lost"
    finally:
        open_fake_cuda().fake_fail_after(1 << 62)
    assert len(bench.lost) == 1
    assert bench.worker.narrow.statistics.launches == counted


def test_no_ticket_is_lost_whatever_neighbours_do_and_is_revoked_and_cancelled(bench: Looping) -> None:
    both, placement = bench.watch(), bench.worker.narrow
    assert placement
    for turn in range(120):
        if turn % 3 == 0:
            bench.neighbours[0].activity.begin()
        elif turn % 3 == 2:
            bench.neighbours[0].rest()
        bench.know(placement)
        models = [(HOG, TINY)[(slot + turn) % (2 + turn % 3) == 0] for slot in range(SLOTS)]
        tickets = [bench.ticket(slot, turn, model=models[slot]) for slot in range(SLOTS)]
        if turn % 7 == 0:
            bench.worker.cancel(5, tickets[5].serial)
        bench.put(*tickets)
        if turn % 5 == 0:
            bench.placed(turn % 2)[0].revoke()
        if turn % 11 == 0:
            placement.suspend()
            bench.worker.revoke()
            bench.worker.resume(placement)
        dones = [bench.next() for _ in range(SLOTS)]
        assert sorted(done.slot for done in dones) == list(range(SLOTS))
        assert [bench.answer(done) for done in dones if done.failure is None] == [[turn]] * (SLOTS - (turn % 7 == 0))
    assert both == []
    assert placement.statistics.launches > 100


@pytest.fixture
def held() -> Iterator[tuple[Looping, TenantFence]]:
    """A bench whose tenant has a fence that makes the narrow placement itself."""
    with benched(kind=Looping, launchable=True) as bench, ThreadPoolExecutor(1) as threads:
        bench.neighbours = [Neighbour()]
        bench.worker.executors[TINY] = bench.engine.bind(bench.partition)
        pages = {"globex": bench.neighbours[0].descriptor}
        means = Means(bench.device, {"acme": bench.worker}, TenantLocks(["acme"]), pages, {}, 10, threads)
        fence = TenantFence("acme", means)
        fence.set(Fence(("globex",), RATE_OF_TENANT, (0,)))
        bench.worker.serve(bench.endpoint)
        yield bench, fence
        bench.worker.halt()


async def make_all(bench: Looping, fence: TenantFence) -> None:
    """Carry the plan out, with all models at home."""
    while await fence.make(bench.worker):
        pass
    assert bench.worker.narrow
    bench.narrow = bench.worker.narrow.partition  # type: ignore[assignment]


async def test_a_model_that_was_paged_out_is_held_again_from_when_it_is_ready_there(
    held: tuple[Looping, TenantFence],
) -> None:
    bench, fence = held
    await make_all(bench, fence)
    placement = bench.worker.narrow
    assert placement
    bench.worker.executors[HOG].close()
    placement.executors.pop(HOG).close()
    bench.worker.executors[HOG] = bench.engine.bind(bench.partition)
    for number in (1, 1, 2):
        bench.run(number)  # The loop learns it before it is ready on the narrow placement.
    await make_all(bench, fence)
    bench.neighbours[0].activity.begin()
    narrow = placement.statistics.launches
    for number in range(1, 6):
        bench.know(placement)
        bench.run(number)
    assert placement.statistics.launches == narrow + 5


async def test_a_model_that_was_paged_out_may_borrow_again_from_when_it_is_ready_there() -> None:
    with benched(kind=Looping, launchable=True) as bench, ThreadPoolExecutor(1) as threads:
        worker, lender = bench.worker, Neighbour()
        pages, numbers = {"globex": lender.descriptor}, {"acme": 0, "globex": 1}
        means = Means(bench.device, {"acme": worker}, TenantLocks(["acme"]), pages, numbers, 10, threads)
        placements = TenantPlacements("acme", means)
        worker.serve(bench.endpoint)
        placements.plan(Wide((0, 1), {"globex": (1,)}, 1.0), None)
        await placements.settled()
        assert worker.wide
        assert worker.runner
        loop = worker.runner.session.loop
        assert loop
        for each in (*placements.leave([HOG]), worker.executors[HOG]):
            each.close()
        worker.executors[HOG] = bench.engine.bind(bench.partition)
        for number in (1, 1, 2):
            bench.run(number)
        assert loop.knows_any
        placements.follow()
        await placements.settled()
        assert list(worker.wide.executors) == [HOG]
        assert not loop.knows_any, "it learns all again, with the wide placement"
        bench.run(3)
        await placements.close()


def test_a_graph_on_the_narrow_placement_is_captured_when_the_loop_learns_the_home_one() -> None:
    """Not only when a neighbour begins to work, as its first requests would meet works at home."""
    with benched(kind=Looping, launchable=True) as bench:
        bench.fence()
        asked: list[object] = []
        hog = bench.placed(1)[0]
        hog.launchable = False
        hog.preparing = lambda shapes: asked.append(shapes)  # type: ignore[method-assign, assignment, return-value, func-returns-value]
        bench.worker.serve(bench.endpoint)
        for _ in range(3):
            bench.run(1)
        assert asked == [((1,),)]


class Both(Looping, Borrower):
    """A bench whose worker borrows, and is fenced. Its home is half of its wide partition."""

    def another(self, granule: int) -> Worker:
        return Bench.another(self, granule)


def test_a_tenant_that_borrows_is_narrow_while_neighbours_work_and_wide_while_all_rest() -> None:
    with benched(kind=Both, launchable=True) as bench:
        bench.stretch()
        placement = bench.fence()
        bench.worker.serve(bench.endpoint)
        bench.lenders[0].activity.begin()
        bench.learn()
        bench.lenders[0].activity.end()
        assert bench.worker.runner
        loop = bench.worker.runner.session.loop
        assert loop
        bench.worker.wide.times_of((HOG, ((1,),))).home = 10**9  # type: ignore[union-attr]
        (wide,) = [each for each in bench.engine.executors if each.partition is bench.wide]
        assert isinstance(wide, LaunchableExecutor)
        bench.run_all(3)
        enqueued = bench.script.reached["enqueue"]
        bench.neighbours[0].activity.begin()
        bench.know(placement)
        _, narrow = bench.launched()
        gone_wide = wide.launched
        bench.run_all(5)
        assert (bench.launched()[1], wide.launched, bench.script.reached["enqueue"]) == (narrow + 5, gone_wide, enqueued)
        (home, narrow), stayed = bench.launched(), bench.worker.wide.statistics.why_home()["fenced"]  # type: ignore[union-attr]
        for number in range(5):
            bench.know(placement, RATE_OF_TENANT)  # As much as it may at home.
            bench.run(number)
        assert (bench.launched(), wide.launched) == ((home + 5, narrow), gone_wide)
        assert bench.worker.wide.statistics.why_home()["fenced"] == stayed + 5  # type: ignore[union-attr]
        bench.worker.halt()
