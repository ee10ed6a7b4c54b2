"""Several executors of one engine that take turns."""

import numpy as np
import pytest

from engines import DATATYPES, ModelRefused, Signature, Tensor, TensorSpec
from server.instances import Instances
from tests.fakes import FakeDevice, FakeEngine, FakePartition, FakeWork

SIGNATURE = Signature((TensorSpec("x", DATATYPES["FP32"], ("n",)),), ())


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(SIGNATURE)


@pytest.fixture
def partition() -> FakePartition:
    return FakeDevice().carve([0])


def test_they_are_bound_together_and_described_as_one_with_the_counts_of_all(
    engine: FakeEngine, partition: FakePartition
) -> None:
    engine.description = {"graphs": "captured", "counts": {"captures": 2}}
    several = Instances(engine, 3)
    executor = several.bind(partition)
    assert (several.signature, several.platform) == (SIGNATURE, "fake_fake")
    assert len(engine.executors) == 3
    assert executor.describe() == {"graphs": "captured", "instances": 3, "counts": {"captures": 6}}
    engine.description = {"graphs": "none"}
    assert executor.describe() == {"graphs": "none", "instances": 3}


def test_whoever_binds_anew_binds_as_many(engine: FakeEngine, partition: FakePartition) -> None:
    executor = Instances(engine, 2).bind(partition)
    executor.engine.bind(partition).close()
    assert [each.closed for each in engine.executors] == [False, False, True, True]


def test_each_inference_goes_to_the_next_and_they_end_in_order(engine: FakeEngine, partition: FakePartition) -> None:
    executor = Instances(engine, 2).bind(partition)
    works = [executor.enqueue([Tensor.of(np.zeros(1, np.float32))]) for _ in range(3)]
    assert [work.executor for work in works if isinstance(work, FakeWork)] == [*engine.executors, engine.executors[0]]
    works[2].wait()
    assert all(work.ended for work in works if isinstance(work, FakeWork))


def test_the_others_are_closed_though_one_cannot_be(engine: FakeEngine, partition: FakePartition) -> None:
    executor = Instances(engine, 3).bind(partition)
    executor.enqueue([Tensor.of(np.zeros(1, np.float32))])
    with pytest.raises(RuntimeError, match="closed with work in flight"):
        executor.close()
    assert [each.closed for each in engine.executors] == [False, True, True]


def test_none_is_left_where_one_cannot_be_bound(engine: FakeEngine, partition: FakePartition) -> None:
    engine.script.fail("bind", nth=3)
    with pytest.raises(ModelRefused):
        Instances(engine, 3).bind(partition)
    assert [each.closed for each in engine.executors] == [True, True]
