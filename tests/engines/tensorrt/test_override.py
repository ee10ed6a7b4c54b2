"""F43: settings that hold for a block; afterwards everything is as it was before."""

import logging
from typing import Any

import numpy as np
import pytest

from engines import ExecutionFailed, ModelRefused, Tensor
from tests.contract import in_a_thread
from tests.engines.simulated import Bench, assert_right, never_captured, rows
from tests.engines.tensorrt.test_data_dependent import FIVE, NONZERO
from tests.engines.tensors import run

LOGGER = "greenlane.engines"


def launches(bench: Bench, executor: Any, count: int = 2) -> tuple[int, int]:
    """Run an inference and check it; returns how many graphs were launched, and how many inferences enqueued call by call."""
    before = [bench.gpu.log.count(call) for call in ("cuGraphLaunch", "IExecutionContext.execute_async_v3")]
    assert_right(executor, rows(count, count))
    after = [bench.gpu.log.count(call) for call in ("cuGraphLaunch", "IExecutionContext.execute_async_v3")]
    return after[0] - before[0], after[1] - before[1]


@pytest.fixture
def executor(bench: Bench) -> Any:
    return bench.bind()


def test_f43_graphs_are_off_in_the_block_and_what_was_captured_is_there_afterwards(executor: Any, bench: Bench) -> None:
    assert_right(executor, rows(2))
    captures = executor.describe()["counts"]["captures"]
    with executor.overriding(graphs="off"):
        assert launches(bench, executor) == (0, 1)
        assert executor.describe()["graphs"] == "none"
    assert launches(bench, executor) == (1, 0)
    assert executor.describe()["graphs"] == "captured"
    assert executor.describe()["counts"]["captures"] == captures
    executor.close()


def test_f43_copies_can_be_overridden_in_the_block(executor: Any, bench: Bench) -> None:
    with executor.overriding(copies="engine"):
        for seed in range(3):
            bench.gpu.log.clear()
            assert_right(executor, rows(2, seed))
            assert bench.gpu.log.count("cuMemcpyAsync") == 2
        assert executor.describe()["copies"] == "engine"
    bench.gpu.log.clear()
    assert_right(executor, rows(2))
    assert "cuMemcpyAsync" not in bench.gpu.log
    executor.close()


def test_f43_rows_are_padded_in_the_block(bench: Bench) -> None:
    executor = bench.bind("rowwise (float[n, 3] x) => (float[n, 3] y) { y = Add(x, x) }")
    with executor.overriding(batch_padding=True):
        for count in (4, 3, 2):
            assert run(executor, rows(count))[0].tolist() == (2 * rows(count)).tolist()


def test_f43_overrides_nest_and_end_when_the_block_fails(executor: Any, bench: Bench) -> None:
    graphs = len(bench.gpu.graphs)

    def inner() -> None:
        with executor.overriding(graphs="off"):
            assert executor.describe()["copies"] == "engine"
            assert launches(bench, executor) == (0, 1)
            raise ZeroDivisionError

    def outer() -> None:
        with executor.overriding(copies="engine"):
            assert launches(bench, executor) == (1, 1)  # Captured, then launched.
            with pytest.raises(ZeroDivisionError):
                inner()
            assert launches(bench, executor) == (1, 0)
            raise KeyError

    with pytest.raises(KeyError):
        outer()
    assert launches(bench, executor) == (1, 0)
    assert len(bench.gpu.graphs) == graphs
    executor.close()


def test_f43_inferences_in_flight_at_the_begin_and_end_of_the_block_are_right(bench: Bench) -> None:
    executor, given = bench.bind(), [rows(2 + turn % 2, turn) for turn in range(12)]
    works = [executor.enqueue([Tensor.of(data)]) for data in given[:4]]
    with executor.overriding(graphs="off"):
        works += [executor.enqueue([Tensor.of(data)]) for data in given[4:8]]
    works += [executor.enqueue([Tensor.of(data)]) for data in given[8:]]
    for data, work in zip(given, works, strict=True):
        (output,) = work.wait()
        assert np.array_equal(output.array(executor.engine.signature.outputs[0].datatype), 2 * data - 3)


def test_f43_shapes_that_are_prepared_in_the_block_are_waited_for_at_its_end(executor: Any, bench: Bench) -> None:
    with executor.overriding(copies="engine"):
        future = executor.preparing([(5, 3)])
    assert future.done()
    assert_right(executor, rows(5))
    executor.close()
    assert not bench.gpu.graphs


def test_f43_an_executor_that_is_closed_in_the_block_leaves_nothing(executor: Any, bench: Bench) -> None:
    with executor.overriding(copies="engine"), executor.overriding(copies="auto"):
        assert_right(executor, rows(2))
        executor.close()
        assert not bench.gpu.graphs
        with pytest.raises(ExecutionFailed, match="takes nothing more"):
            run(executor, rows(2))
    with pytest.raises(ExecutionFailed, match="takes nothing more"), executor.overriding(graphs="off"):
        pass


def test_f43_an_executor_cannot_be_rebound_in_the_block(executor: Any, bench: Bench) -> None:
    with (
        executor.overriding(graphs="off"),
        pytest.raises(ExecutionFailed, match="does not move while its settings are overridden"),
    ):
        executor.rebind(bench.partition)
    executor.close()


def test_f43_graphs_are_turned_on_where_they_were_off(bench: Bench) -> None:
    executor = bench.bind(graphs="off")
    with executor.overriding(graphs="required"):
        assert launches(bench, executor) == (1, 1)
    assert launches(bench, executor) == (0, 1)


def test_f43_a_capture_that_fails_leaves_what_was_captured_before(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    executor = bench.bind()
    contexts = len(bench.gpu.executions)
    with executor.overriding(copies="engine"):
        bench.gpu.fail("cuGraphInstantiate")
        assert launches(bench, executor) == (0, 2)
        assert launches(bench, executor) == (0, 1)
    assert "so it runs without until the override ends" in caplog.text
    assert len(bench.gpu.executions) == contexts
    assert launches(bench, executor) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"graphs": "maybe"}, ValueError, "graphs is 'maybe'; expected one of"),
        ({"profile": 1}, TypeError, "profile cannot be overridden, as it is loaded so; expected graphs, copies, batch_padding"),
        ({"graph": "off"}, TypeError, "no setting is called 'graph'; did you mean 'graphs'"),
    ],
)
def test_f43_settings_that_cannot_be_overridden_are_refused(
    executor: Any, bench: Bench, changes: Any, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why), executor.overriding(**changes):
        pass
    assert launches(bench, executor) == (1, 0)
    executor.close()


def test_f43_overrides_that_need_other_contexts_are_refused_with_the_reason(bench: Bench) -> None:
    executor = bench.bind(graphs="off", cuda_graph_strategy="whole_graph_capture")
    with pytest.raises(ModelRefused, match="made with TensorRT's own graphs and keep them"), executor.overriding(graphs="on"):
        pass
    executor.close()
    executor = bench.bind(NONZERO, FIVE)
    why = "graphs are required, but it cannot be captured as one: the size of output 'y' depends on data"
    with pytest.raises(ModelRefused, match=why), executor.overriding(graphs="required"):
        pass
    executor.close()
    executor = bench.bind(copies="engine", graphs="off")
    with (
        pytest.raises(ModelRefused, match="need kernels that it was loaded without"),
        executor.overriding(copies="sm"),
    ):
        pass
    executor.close()
    never_captured(bench).close()


def test_f43_another_thread_sees_the_same_settings(executor: Any, bench: Bench) -> None:
    def body() -> tuple[int, int]:
        bench.partition.attach()
        return launches(bench, executor)

    with executor.overriding(graphs="off"):
        assert in_a_thread(body)[1].result(30) == (0, 1)
    executor.close()
