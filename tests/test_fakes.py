from contextlib import closing

import numpy as np
import pytest

from engines import DATATYPES, Cancelled, ExecutionFailed, ModelRefused, Signature, Tensor, TensorMismatch, TensorSpec
from partitions import PartitionError
from tests import fakes
from tests.contract import PATIENCE, in_a_thread
from tests.engines.tensors import Memory, array
from tests.fakes import FakeDevice, FakeEngine, FakePartition, Script

FP32 = DATATYPES["FP32"]
X = TensorSpec("x", FP32, ("n",))
SIGNATURE = Signature((X,), (TensorSpec("y", FP32, ("n",)),))
ONE = np.arange(3, dtype=np.float32)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def engine(script: Script) -> FakeEngine:
    return FakeEngine(SIGNATURE, script)


@pytest.fixture
def partition(script: Script) -> FakePartition:
    return FakeDevice((2, 3, 4), script).carve([0, 2])


def test_a_scripted_failure_is_raised_once_at_the_nth_call(script: Script) -> None:
    script.reach("carve")
    script.fail("carve", nth=2)
    script.reach("carve")
    with pytest.raises(PartitionError, match="scripted to fail at carve"):
        script.reach("carve")
    script.reach("carve")
    assert script.reached == {"carve": 4}


def test_scripted_failures_have_the_error_of_the_interface(
    script: Script, engine: FakeEngine, partition: FakePartition
) -> None:
    for point in ("carve", "attach", "locate", "bind"):
        script.fail(point)
    with pytest.raises(PartitionError):
        partition.device.carve([0])
    with pytest.raises(PartitionError):
        partition.attach()
    with pytest.raises(PartitionError):
        partition.locate()
    with pytest.raises(ModelRefused):
        engine.bind(partition)


def test_work_fails_on_enqueue_or_on_wait(script: Script, engine: FakeEngine, partition: FakePartition) -> None:
    executor = engine.bind(partition)
    script.fail("enqueue")
    script.fail("run", error=OSError("the device is lost"))
    with pytest.raises(ExecutionFailed):
        executor.enqueue([Tensor.of(ONE)])
    work = executor.enqueue([Tensor.of(ONE)])
    with pytest.raises(OSError, match="the device is lost"):
        work.wait()


def test_a_gate_holds_calls_until_it_is_opened(script: Script, engine: FakeEngine, partition: FakePartition) -> None:
    gate = script.hold("bind")
    _, bound = in_a_thread(lambda: engine.bind(partition))
    gate.wait_for_arrival()
    assert not bound.done()
    gate.open()
    assert bound.result(PATIENCE).engine is engine


def test_a_gate_that_is_never_opened_fails_the_test(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "PATIENCE", 0.0)
    script.hold("locate")
    with pytest.raises(TimeoutError, match=r"shut, 1 arrived> waited 0 s for a call of open\(\)"):
        script.reach("locate")


def test_enqueue_cannot_be_held_up(script: Script) -> None:
    with pytest.raises(ValueError, match="hold its work at 'run'"):
        script.hold("enqueue")


def test_closing_with_work_in_flight_raises(engine: FakeEngine, partition: FakePartition) -> None:
    executor = engine.bind(partition)
    work = executor.enqueue([Tensor.of(ONE)])
    for each in (executor, partition):
        with pytest.raises(RuntimeError, match="closed with work in flight"):
            each.close()
    with pytest.raises(RuntimeError, match="was closed before"):
        engine.close()
    with pytest.raises(RuntimeError, match="was closed before"):
        partition.device.close()
    work.wait()
    for closes in (executor, partition, engine, partition.device):
        closes.close()


def test_an_inference_out_of_turn_raises(engine: FakeEngine, partition: FakePartition) -> None:
    home = engine.bind(partition)
    other = home.alternate(partition.device.carve([1]))
    moved = other.rebind(partition.device.carve([2]))
    work = home.enqueue([Tensor.of(np.zeros(1, np.float32))])
    for executor in (other, moved):
        with pytest.raises(RuntimeError, match="out of its turn"):
            executor.enqueue([Tensor.of(np.zeros(1, np.float32))])
    work.wait()
    moved.enqueue([Tensor.of(np.zeros(1, np.float32))]).wait()


def test_closing_a_partition_before_its_executors_raises(engine: FakeEngine, partition: FakePartition) -> None:
    executor = engine.bind(partition)
    with pytest.raises(RuntimeError, match=r"was closed before \[<FakeExecutor"):
        partition.close()
    executor.close()
    partition.close()


def test_a_collected_executor_counts_as_closed_and_work_in_flight_keeps_it(
    engine: FakeEngine, partition: FakePartition
) -> None:
    work = engine.bind(partition).enqueue([Tensor.of(ONE)])
    closed = engine.bind(partition)
    closed.close()
    assert (engine.executors, engine.forgotten) == ([work.executor, closed], 0)
    with pytest.raises(RuntimeError, match="closed with work in flight"):
        partition.close()
    assert array(work.wait()[0]).tolist() == ONE.tolist()
    with pytest.raises(RuntimeError, match="was closed before"):
        partition.close()
    del work
    assert (engine.executors, engine.forgotten) == ([closed], 1)
    for each in (partition, engine):
        each.close()


def test_closed_fakes_refuse_work(engine: FakeEngine, partition: FakePartition) -> None:
    executor = engine.bind(partition)
    executor.close()
    with pytest.raises(RuntimeError, match="was asked to work"):
        executor.enqueue([Tensor.of(ONE)])
    partition.close()
    with pytest.raises(PartitionError, match="cannot take another thread"):
        partition.attach()
    with pytest.raises(ModelRefused):
        engine.bind(partition)


def test_enqueue_of_unprepared_shapes_raises(engine: FakeEngine, partition: FakePartition) -> None:
    with closing(engine.bind(partition)) as executor, pytest.raises(TensorMismatch):
        executor.enqueue([Tensor.of(np.zeros((1, 1), np.float32))])


def test_outputs_are_the_inputs_again_side_by_side(script: Script, partition: FakePartition) -> None:
    outputs = tuple(TensorSpec(name, FP32, ("n",)) for name in "abc")
    engine, memory = FakeEngine(Signature((X, TensorSpec("z", FP32, ("n",))), outputs), script), Memory(4096)
    with closing(engine.bind(partition)) as executor:
        given = executor.enqueue([Tensor.of(ONE), Tensor.of(-ONE)], memory.room).wait()
    assert [array(tensor).tolist() for tensor in given] == [ONE.tolist(), (-ONE).tolist(), ONE.tolist()]
    assert [tensor.address - memory.room.address for tensor in given] == [0, 64, 128]


def test_inputs_are_recorded_in_order(engine: FakeEngine, partition: FakePartition) -> None:
    with closing(engine.bind(partition)) as executor:
        works = [executor.enqueue([Tensor.of(data)]) for data in (ONE, -ONE)]
        works[0].cancel()
        works[1].wait()
        with pytest.raises(Cancelled):
            works[0].wait()
    assert engine.computed == [((-ONE).tobytes(),)]


def test_a_model_may_compute_something_else(script: Script, partition: FakePartition) -> None:
    engine = FakeEngine(SIGNATURE, script, lambda inputs: [bytes(len(inputs[0]))])
    with closing(engine.bind(partition)) as executor:
        assert array(executor.enqueue([Tensor.of(ONE)]).wait()[0]).tolist() == [0, 0, 0]
    short = FakeEngine(SIGNATURE, script, lambda inputs: [b""])
    with closing(short.bind(partition)) as executor, pytest.raises(AssertionError, match="computed 0 bytes for 'y'"):
        executor.enqueue([Tensor.of(ONE)]).wait()


def test_a_device_may_lie_about_where_it_ran(partition: FakePartition) -> None:
    assert partition.locate() == {0, 1, 5, 6, 7, 8}
    assert partition.size == 6
    partition.device.lie = lambda asked: frozenset({len(asked.granules)})
    assert partition.locate() == {2}
