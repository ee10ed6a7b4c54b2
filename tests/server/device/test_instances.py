"""`RoundRobinExecutor`: several executors of one engine, used one after another."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from engines import DATATYPES, ExecutionFailed, ModelRefused, Signature, Tensor, TensorSpec
from engines.signature import Shape
from server.device.instances import RoundRobinExecutor, bind_instances
from tests.fakes import FakeDevice, FakeEngine, FakeExecutor, FakePartition, FakeWork
from tests.launchable import LaunchableEngine, needs_a_compiler
from tests.server.workers.test_worker import SLOTS, benched

SIGNATURE = Signature((TensorSpec("x", DATATYPES["FP32"], ("n",)),), ())


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(SIGNATURE)


@pytest.fixture
def partition() -> FakePartition:
    return FakeDevice().carve([0])


def test_several_instances_are_described_as_one_with_summed_counts(engine: FakeEngine, partition: FakePartition) -> None:
    engine.description = {"graphs": "captured", "counts": {"captures": 2}}
    executor = bind_instances(engine, partition, 3)
    assert executor.engine is engine
    assert len(engine.executors) == 3
    assert executor.describe() == {"graphs": "captured", "instances": 3, "counts": {"captures": 6}}
    engine.description = {"graphs": "none"}
    assert executor.describe() == {"graphs": "none", "instances": 3}


def test_a_single_instance_is_not_wrapped(engine: FakeEngine, partition: FakePartition) -> None:
    assert [bind_instances(engine, partition, 1)] == engine.executors


def test_rebind_moves_all_instances(engine: FakeEngine, partition: FakePartition) -> None:
    there = partition.device.carve([1])
    here = bind_instances(engine, partition, 2)
    here.rebind(there).close()
    assert [each.closed for each in engine.executors] == [False, False, True, True]
    assert [each.partition for each in engine.executors] == [partition, partition, there, there]


def test_rebind_moves_none_if_one_cannot_be_bound(engine: FakeEngine, partition: FakePartition) -> None:
    executor = bind_instances(engine, partition, 2)
    engine.script.fail("bind", nth=2)
    with pytest.raises(ModelRefused):
        executor.rebind(partition.device.carve([1]))
    assert [each.closed for each in engine.executors] == [False, False, True]


def test_an_alternate_has_one_of_each_instance_or_there_is_none(engine: FakeEngine, partition: FakePartition) -> None:
    there = partition.device.carve([0, 1], [1])
    home = bind_instances(engine, partition, 2)
    engine.script.fail("bind", nth=2)
    with pytest.raises(ModelRefused):
        home.alternate(there)
    other = home.alternate(there)
    assert [each.partition for each in engine.executors if not each.closed] == [partition, partition, there, there]
    assert "adds" not in home.describe()
    assert other.describe()["adds"] == {}
    for executor in (home, other, home):
        executor.enqueue([Tensor.of(np.zeros(1, np.float32))]).wait()
    home.close()
    other.enqueue([Tensor.of(np.zeros(1, np.float32))]).wait()
    other.close()


def test_inferences_use_instances_round_robin_and_end_in_order(engine: FakeEngine, partition: FakePartition) -> None:
    executor = bind_instances(engine, partition, 2)
    works = [executor.enqueue([Tensor.of(np.zeros(1, np.float32))]) for _ in range(3)]
    assert [work.executor for work in works if isinstance(work, FakeWork)] == [*engine.executors, engine.executors[0]]
    works[2].wait()
    assert all(work.ended for work in works if isinstance(work, FakeWork))


def test_close_closes_the_others_if_one_cannot_be_closed(engine: FakeEngine, partition: FakePartition) -> None:
    executor = bind_instances(engine, partition, 3)
    executor.enqueue([Tensor.of(np.zeros(1, np.float32))])
    with pytest.raises(RuntimeError, match="closed with work in flight"):
        executor.close()
    assert [each.closed for each in engine.executors] == [False, True, True]


def test_bind_leaves_none_open_if_one_cannot_be_bound(engine: FakeEngine, partition: FakePartition) -> None:
    engine.script.fail("bind", nth=3)
    with pytest.raises(ModelRefused):
        bind_instances(engine, partition, 3)
    assert [each.closed for each in engine.executors] == [True, True]


class Preparing(FakeExecutor):
    """Returns a given future for shapes that are new."""

    def __init__(self, engine: FakeEngine, partition: FakePartition, pending: "Future[None] | None") -> None:
        super().__init__(engine, partition)
        self.pending = pending

    def preparing(self, shapes: Sequence[Shape]) -> "Future[None] | None":  # type: ignore[override]
        return self.pending


def test_shapes_are_prepared_when_all_instances_are(engine: FakeEngine, partition: FakePartition) -> None:
    first, second = Future[None](), Future[None]()
    whole = RoundRobinExecutor([Preparing(engine, partition, each) for each in (first, None, second)]).preparing([(1,)])
    assert whole is not None
    second.set_result(None)
    assert not whole.done()
    first.set_result(None)
    assert whole.result(0) is None
    assert RoundRobinExecutor([Preparing(engine, partition, None)]).preparing([(1,)]) is None


def test_a_failed_preparation_is_raised_once_all_instances_ended(engine: FakeEngine, partition: FakePartition) -> None:
    first, second = Future[None](), Future[None]()
    whole = RoundRobinExecutor([Preparing(engine, partition, each) for each in (first, second)]).preparing([(1,)])
    assert whole is not None
    first.set_exception(ExecutionFailed("no"))
    assert not whole.done()
    second.set_result(None)
    with pytest.raises(ExecutionFailed, match="no"):
        whole.result(0)


class Trimmed(FakeExecutor):
    """Records the calls of `trim`."""

    def __init__(self, engine: FakeEngine, partition: FakePartition) -> None:
        super().__init__(engine, partition)
        self.trims: list[tuple[float, bool]] = []

    def trim(self, after: float, idle: bool) -> None:
        self.trims.append((after, idle))


def test_trim_is_passed_to_instances_that_keep_memory(engine: FakeEngine, partition: FakePartition) -> None:
    keeping = Trimmed(engine, partition)
    RoundRobinExecutor([keeping, FakeExecutor(engine, partition)]).trim(5.0, idle=True)
    assert keeping.trims == [(5.0, True)]


@needs_a_compiler
def test_the_launch_loop_runs_the_inferences_of_several_instances() -> None:
    with benched(launchable=True) as bench:
        executor = bind_instances(bench.engine, bench.partition, 2)
        bench.worker.executors["m/1#1"].close()
        bench.worker.executors["m/1#1"] = executor
        bench.worker.serve(bench.endpoint)
        bench.put(bench.ticket(0, 1))
        bench.next()
        bench.rush()
        bench.rush()
        assert bench.script.reached["enqueue"] == 1, "the first, which the launch loop learnt from"
        assert sum(each.launched for each in bench.engine.executors) == 2 * SLOTS  # type: ignore[attr-defined]
        bench.engine.executors[0].revoke()  # type: ignore[attr-defined]
        bench.rush()


def test_instances_that_cannot_be_launched_without_the_interpreter_have_no_recipe(
    engine: FakeEngine, partition: FakePartition
) -> None:
    assert RoundRobinExecutor([FakeExecutor(engine, partition)]).recipe([(1,)], lambda: None) is None


@needs_a_compiler
def test_closing_instances_revokes_their_recipe() -> None:
    device, revoked = FakeDevice(), []
    executor = bind_instances(LaunchableEngine(SIGNATURE, device.script), device.carve([0]), 2)
    assert executor.recipe([(1,)], lambda: revoked.append(True))  # type: ignore[attr-defined]
    executor.close()
    assert revoked
