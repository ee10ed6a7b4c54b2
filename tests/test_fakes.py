import numpy as np
import pytest

from engines import DATATYPES, ModelRefused, Signature, Tensor, TensorSpec
from partitions import PartitionError
from tests import fakes
from tests.engines.tensors import array
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
