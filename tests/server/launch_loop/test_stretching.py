"""How the launch loop chooses between both partitions, as Python does, and what it does with works over a fake driver."""

import ctypes
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.launch_loop.library import open_library
from server.launch_loop.structures import Times as SharedTimes
from server.workers.stretching import BUSY, RETRY, STOPPED, WHY_HOME, Times, decide
from tests.launchable import LaunchableExecutor, needs_a_compiler
from tests.server.workers.test_wide import Borrower
from tests.server.workers.test_worker import PATIENCE, benched

pytestmark = needs_a_compiler

NS = st.integers(0, 10**12)
SMALL = st.integers(0, 5_000_000)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.booleans(), st.one_of(SMALL, NS), NS), max_size=12),
    st.one_of(SMALL, NS),
    st.integers(1, 132),
    st.integers(1, 132),
    NS,
    st.booleans(),
    st.one_of(st.sampled_from([BUSY, STOPPED]), NS),
)
def test_c_and_python_decide_and_learn_the_same(
    seen: list[tuple[bool, int, int]], limit: int, home: int, wide: int, now: int, in_flight: bool, since: int
) -> None:
    """`seen` are works: whether each ran wide, what it took, and when it ended."""
    library, ours, theirs = open_library(), Times(), SharedTimes(wait=RETRY)
    address = ctypes.byref(theirs)
    for was_wide, took, ended in seen:
        if was_wide:
            ours.learn_wide(took, limit, ended)
            library.launch_loop_learn_wide(address, took, limit, ended)
        else:
            ours.learn_home(took)
            library.launch_loop_learn_home(address, took)
        assert (ours.home, ours.wide, ours.retry_at, ours.wait) == (theirs.home, theirs.wide, theirs.retry_at, theirs.wait)
        for at in (now, ended, ours.retry_at):
            said = library.launch_loop_decide(address, at, limit, home, wide, in_flight, since)
            assert decide(ours, at, limit, home, wide, in_flight, since) == said


class Looping(Borrower):
    """A bench whose launch loop knows tickets of one number on both partitions."""

    def launched(self) -> tuple[int, int]:
        """At home, and wide."""
        home, wide = self.engine.executors
        assert isinstance(home, LaunchableExecutor)
        assert isinstance(wide, LaunchableExecutor)
        return home.launched, wide.launched

    def learn(self) -> None:
        """Have the loop learn, and see a long work at home."""
        self.lenders[0].activity.begin()
        for _ in range(2):
            self.run(1)
        self.lenders[0].activity.end()
        assert self.worker.runner
        loop = self.worker.runner.session.loop
        assert loop
        loop.took[0].home = 10**9


@pytest.fixture
def bench() -> Iterator[Looping]:
    with benched(kind=Looping, launchable=True) as bench:
        bench.stretch()
        bench.worker.serve(bench.endpoint)
        bench.worker.resume(bench.worker.wide)
        bench.learn()
        yield bench
        bench.worker.halt()
        assert all(lender.page.own[0] == 0 for lender in bench.lenders)


def test_the_loop_goes_wide_while_the_lenders_rest(bench: Looping) -> None:
    home, wide = bench.launched()
    bench.run_all(20)
    assert bench.launched() == (home, wide + 20)
    bench.lenders[0].activity.begin()
    bench.run_all(20)
    assert bench.launched() == (home + 20, wide + 20)
    assert bench.worker.wide
    assert bench.worker.wide.statistics.launches >= 20
    assert bench.script.reached["enqueue"] <= 2, "the loop ran them"


def test_why_works_stay_at_home_is_counted_in_the_loop_too(bench: Looping) -> None:
    assert bench.worker.wide
    assert bench.worker.runner
    loop, statistics = bench.worker.runner.session.loop, bench.worker.wide.statistics
    assert loop
    before, enqueued = statistics.why_home(), bench.script.reached["enqueue"]
    bench.lenders[0].activity.begin()
    bench.run_all(3)
    bench.lenders[0].activity.set_lends(False)
    bench.run_all(2)
    bench.lenders[0].activity.set_lends(True)
    bench.lenders[0].activity.end()
    loop.took[0].wide = bench.worker.wide.limit + 1
    bench.run(1)
    assert bench.script.reached["enqueue"] == enqueued, "the loop ran them"
    more = dict.fromkeys(WHY_HOME, 0) | {"owner_busy": 3, "owner_stopped": 2, "too_long": 1}
    assert statistics.why_home() == {why: before[why] + more[why] for why in WHY_HOME}
    assert [each.model for each in bench.worker.too_long()] == []  # The worker itself has seen a shorter one.
    bench.worker.wide.times.clear()
    ((model, home, wide),) = bench.worker.too_long()
    assert (model, wide) == ("m/1#1", bench.worker.wide.limit + 1)
    assert home > 0


def test_a_wide_work_is_alone_in_flight_and_is_seen_by_the_lender(bench: Looping) -> None:
    gate = bench.script.hold("run")
    home, wide = bench.launched()
    bench.put(bench.ticket(0, 0))
    gate.wait_for_arrival()
    assert bench.lenders[0].activity.is_met()
    bench.put(*[bench.ticket(slot, slot) for slot in range(1, 4)])
    assert sum(bench.launched()) <= home + wide + 1, "another was launched beside it"
    gate.open()
    assert [bench.answer(bench.next()) for _ in range(4)] == [[0], [1], [2], [3]]


def test_tickets_that_come_ahead_wait_for_the_work_at_home_and_go_wide(bench: Looping) -> None:
    bench.lenders[0].activity.begin()
    gate = bench.script.hold("run")
    home, wide = bench.launched()
    bench.put(bench.ticket(0, 0))
    gate.wait_for_arrival()
    bench.lenders[0].activity.end()
    bench.put(bench.ticket(1, 1), bench.ticket(2, 2, deadline=0), bench.ticket(3, 3))
    bench.wait_until_held()
    gate.open()
    assert [bench.answer(bench.next()) for _ in range(2)] == [[0], [1]]
    assert bench.kind() == "expired"
    assert bench.answer(bench.next()) == [3]
    assert bench.launched() == (home + 1, wide + 2)


def test_a_work_that_a_lender_comes_back_to_is_counted(bench: Looping) -> None:
    assert bench.worker.wide
    before = bench.worker.wide.statistics.returns
    gate = bench.begin(bench.ticket(0, 0))
    bench.lenders[0].activity.begin()
    gate.open()
    bench.next()
    bench.worker.halt()
    assert bench.worker.wide.statistics.returns == before + 1


def test_after_narrowing_everything_is_at_home_and_after_widening_the_loop_learns_again(bench: Looping) -> None:
    assert bench.worker.wide
    assert bench.worker.wide.suspend().result(PATIENCE) is None
    bench.worker.revoke()
    _, wide = bench.launched()
    bench.run_all(5)
    assert bench.launched()[1] == wide
    bench.worker.resume(bench.worker.wide)
    bench.learn()
    bench.run(3)
    assert bench.launched()[1] > wide
