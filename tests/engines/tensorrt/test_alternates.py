"""Executors of one instance on several partitions that take turns, on a simulated GPU: home, wide and narrow."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from engines import Executor, ModelRefused
from tests.engines.simulated import Bench, affine, assert_right, opened, rows
from tests.engines.tensors import array
from tests.simulation.tensorrt_config import COMPILING

FIVE = ((5, 3),)
SLOW = {COMPILING, "ICudaEngine.create_execution_context"}
CAPTURES = "cuStreamBeginCapture"


def calls(bench: Bench, executor: Any, count: int) -> list[str]:
    """What the driver and the library are asked to do for one inference."""
    begun = len(bench.gpu.log)
    assert_right(executor, rows(count))
    return bench.gpu.log[begun:]


def prepare(executor: Any) -> None:
    """Make FIVE ready in the background."""
    future = executor.preparing(FIVE)
    assert future
    future.result(30)
    assert executor.preparing(FIVE) is None


@pytest.fixture
def home(bench: Bench) -> Any:
    return bench.bind()


@pytest.fixture
def other(home: Any, wide: Any) -> Iterator[Any]:
    """An alternate of it on the wide partition."""
    other = home.alternate(wide)
    yield other
    other.close()


def test_an_alternate_shares_all_but_its_graphs_and_compiles_nothing(home: Any, bench: Bench, wide: Any) -> None:
    assert_right(home, rows(5))
    begun = len(bench.gpu.log)
    other = home.alternate(wide)
    assert not SLOW & set(bench.gpu.log[begun:])
    assert other.instance is home.instance
    assert [graph.context for graph in bench.gpu.graphs] == [
        partition.stream.simulated.context for partition in (bench.partition, bench.partition, wide, wide)
    ]
    assert CAPTURES not in calls(bench, other, 5)
    assert (home.describe().get("adds"), other.describe()["adds"]) == (None, {})
    other.close()


def test_an_alternate_that_is_not_used_costs_its_home_no_call(home: Any, bench: Bench, wide: Any) -> None:
    assert_right(home, rows(2))
    alone = calls(bench, home, 2)
    other = home.alternate(wide)
    assert calls(bench, home, 2) == alone
    assert_right(other, rows(2))
    assert calls(bench, home, 2) == alone
    other.close()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("first", ["home", "wide"])
def test_shapes_that_one_has_prepared_are_captured_by_the_other_and_not_compiled(
    home: Any, other: Any, bench: Bench, first: str, background: bool
) -> None:
    one, two = (home, other) if first == "home" else (other, home)
    prepare(one)
    assert_right(one, rows(5, 1))
    begun = len(bench.gpu.log)
    if background:
        prepare(two)
    assert_right(two, rows(5, 2))
    assert bench.gpu.log[begun:].count(CAPTURES) == 1
    assert not SLOW & set(bench.gpu.log[begun:])
    for executor in (one, two, one):
        assert CAPTURES not in calls(bench, executor, 5)


@pytest.mark.parametrize("first", ["home", "wide"])
def test_preparing_one_is_ordered_with_what_the_other_has_in_flight_and_launches_later(
    home: Any, other: Any, bench: Bench, first: str
) -> None:
    """New shapes run once on the memory that all use. The simulation objects to a context that runs on two streams at once."""
    one, two = (home, other) if first == "home" else (other, home)
    prepare(one)
    revoked: list[int] = []
    one.recipe(((2, 3),), lambda: revoked.append(1))
    data = [rows(5, seed) for seed in range(3)]
    works = [one.enqueue(bench.pinned(each), bench.room()) for each in data]
    two.preparing(((6, 3),)).result(30)
    assert revoked == [1]
    works.append(one.enqueue(bench.pinned(rows(2)), bench.room()))
    for each, work in zip([*data, rows(2)], works, strict=True):
        assert array(work.wait()[0]).tolist() == affine(each).tolist()
    assert_right(two, rows(6))


def test_an_executor_that_is_enqueued_to_while_the_other_prepares_goes_on(home: Any, other: Any) -> None:
    """Each wants the lock of the other, or the one for captures."""
    future = other.preparing(FIVE)
    for seed in range(30):
        assert_right(home, rows(2 + seed % 6, seed))
    future.result(30)
    for executor in (other, home):
        assert_right(executor, rows(5))


def test_with_graphs_of_the_library_s_own_an_alternate_has_an_instance_of_its_own_and_says_so(bench: Bench, wide: Any) -> None:
    home = bench.bind(copies="engine")
    other = home.alternate(wide)
    assert other.instance is not home.instance
    assert other.describe()["adds"] == other.memory != {}
    for executor in (other, home, other):
        assert_right(executor, rows(5))
    other.close()


@pytest.mark.parametrize("first", ["home", "wide"])
def test_graphs_of_the_other_work_after_one_could_not_be_captured(home: Any, other: Any, bench: Bench, first: str) -> None:
    """Alone, an executor would continue with graphs of the library's own, and free the contexts of the others' graphs."""
    one, two = (home, other) if first == "home" else (other, home)
    bench.gpu.fail("cuGraphInstantiate")
    assert_right(one, rows(5))
    assert one.describe()["graphs"] == "none"
    assert "cuGraphLaunch" in calls(bench, two, 2)
    for executor in (one, two, one):
        for count in (2, 5, 7):
            assert_right(executor, rows(count))


def test_an_alternate_that_cannot_be_made_leaves_its_home_serving_and_leaks_nothing(home: Any, bench: Bench, wide: Any) -> None:
    assert_right(home, rows(5))
    before = bench.holdings()
    bench.gpu.fail("cuGraphInstantiate", 2)
    with pytest.raises(ModelRefused, match=r"affine1\.plan.* on <CudaPartition .* lent, .*CUDA_ERROR_OUT_OF_MEMORY"):
        home.alternate(wide)
    gc.collect()
    assert bench.holdings() == before
    assert_right(home, rows(5))


def test_settings_are_overridden_on_one_while_the_other_keeps_its_own(home: Any, other: Any, bench: Bench) -> None:
    with home.overriding(graphs="off"):
        for executor in (home, other, home):
            assert_right(executor, rows(2))
            assert_right(executor, rows(5))
        assert "cuGraphLaunch" in calls(bench, other, 5)
    assert "cuGraphLaunch" in calls(bench, home, 2)


def test_an_alternate_that_was_not_closed_is_released_with_its_last_reference(home: Any, bench: Bench, wide: Any) -> None:
    before = bench.holdings()
    other = home.alternate(wide)
    assert_right(other, rows(5))
    del other
    assert bench.holdings()[1:4] == before[1:4]
    assert_right(home, rows(5))
    assert repr(home.instance).endswith("used by 1>")


class Turns(RuleBasedStateMachine):
    """Executors that are added, moved, closed and used in any order give right answers, and leave nothing behind."""

    def __init__(self) -> None:
        super().__init__()
        self.made = ExitStack()
        folder = Path(self.made.enter_context(TemporaryDirectory()))
        self.bench = self.made.enter_context(opened(folder))
        self.partitions = [self.bench.partition, self.bench.device.carve([0, 1, 2], [1, 2]), self.bench.device.carve([0, 14])]
        self.before = self.bench.holdings()
        self.engine = self.bench.load(self.bench.plan())
        self.executors: list[Executor] = [self.engine.bind(self.bench.partition)]

    @precondition(lambda self: len(self.executors) < 4)
    @rule(of=st.integers(0, 9), where=st.integers(0, 2))
    def add(self, of: int, where: int) -> None:
        self.executors.append(self.executors[of % len(self.executors)].alternate(self.partitions[where]))

    @rule(which=st.integers(0, 9), where=st.integers(0, 2))
    def move(self, which: int, where: int) -> None:
        old = self.executors[which % len(self.executors)]
        self.executors[which % len(self.executors)] = old.rebind(self.partitions[where])
        old.close()

    @precondition(lambda self: len(self.executors) > 1)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        self.executors.pop(which % len(self.executors)).close()

    @rule(which=st.integers(0, 9), count=st.sampled_from([2, 2, 2, 1, 5, 8]), works=st.integers(1, 3))
    def infer(self, which: int, count: int, works: int) -> None:
        executor, inputs = self.executors[which % len(self.executors)], [rows(count, seed) for seed in range(works)]
        begun = [executor.enqueue(self.bench.pinned(data), self.bench.room(256)) for data in inputs]
        for work, data in zip(begun, inputs, strict=True):
            assert array(work.wait()[0]).tolist() == affine(data).tolist()

    @rule(which=st.integers(0, 9), count=st.integers(1, 8))
    def prepare(self, which: int, count: int) -> None:
        executor: Any = self.executors[which % len(self.executors)]
        if future := executor.preparing(((count, 3),)):
            future.result(30)

    def teardown(self) -> None:
        for executor in self.executors:
            executor.close()
        self.bench.close_engines()
        gc.collect()
        memory, graphs, events, contexts, _ = self.bench.holdings()
        assert (graphs, events, contexts) == self.before[1:4]
        assert memory - len(self.bench._pins) <= self.before[0]
        for partition in self.partitions[1:]:
            partition.close()
        self.bench.close()
        self.made.close()


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
