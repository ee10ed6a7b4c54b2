"""F32, F67: outputs whose size depends on data, on the simulated library; no library that was seen on a GPU builds them."""

import logging
from typing import Any

import numpy as np
import pytest

from engines import ExecutionFailed, ModelRefused, Tensor, TensorMismatch, on_stream
from engines.tensorrt.context import DataDependentOutputs
from tests.engines.simulated import Bench
from tests.engines.tensors import Array, array
from tests.models import DISTINCT
from tests.simulation.plans import Ranges

LOGGER = "greenlane.engines"
FIVE: Ranges = {"x": [(1,), (5,), (9,)]}
NONZERO = """nonzero (float[n] x) => (int64[1, found] y, float[n] twice) { y = NonZero(x) twice = Add(x, x) }"""
WHY = "cannot be captured as a graph (the size of output 'y' depends on data), so each inference costs more"


def sparse(size: int, *places: int) -> Array:
    data = np.zeros(size, np.float32)
    data[list(places)] = 1 + np.arange(len(places))
    return data


def answer(work: Any) -> list[Any]:
    y, twice = work.wait()
    return [array(y, np.int64).tolist(), array(twice).tolist()]


def expected(data: Array) -> list[Any]:
    return [[np.flatnonzero(data).tolist()], (2 * data).tolist()]


@pytest.mark.parametrize("copies", ["sm", "engine", "auto"])
def test_f32_each_output_has_the_shape_that_its_data_give(bench: Bench, copies: str) -> None:
    executor = bench.bind(NONZERO, FIVE, copies=copies)
    for data in (sparse(5, 1, 3), sparse(5), sparse(9, *range(9)), sparse(1, 0), sparse(5, 4)):
        work = executor.enqueue([Tensor.of(data)])
        assert answer(work) == expected(data)
        assert work.wait()[0].shape == (1, np.count_nonzero(data))


@pytest.mark.parametrize("copies", ["sm", "engine"])
def test_f32_many_in_flight_each_have_their_own_data(bench: Bench, copies: str) -> None:
    """More inferences than slots: each uses the ring of tables twice."""
    executor = bench.bind(NONZERO, FIVE, copies=copies)
    given = [sparse(5, turn % 5, (turn + 1) % 5) if turn % 3 else sparse(7, turn % 7) for turn in range(40)]
    works = [executor.enqueue([Tensor.of(data)]) for data in given]
    assert [answer(work) for work in works] == [expected(data) for data in given]


def test_f32_the_same_executor_takes_pinned_memory_and_a_caller_s_stream(bench: Bench) -> None:
    executor = bench.bind(NONZERO, FIVE)
    stream = bench.gpu.create_stream(bench.partition.stream.simulated.context)
    for turn in range(3):
        data = sparse(5, turn)
        with on_stream(stream.handle if turn % 2 else None):
            work = executor.enqueue(bench.pinned(data), bench.room())
        assert answer(work) == expected(data)
        bench.partition.stream.sync()
        stream.wait()
    executor.close()
    bench.gpu.destroy_stream(stream)


def test_f32_serving_allocates_nothing(bench: Bench) -> None:
    executor = bench.bind(NONZERO, FIVE)
    for _ in range(16):
        executor.enqueue([Tensor.of(sparse(9, *range(9)))]).wait()
    held, log = bench.holdings(), len(bench.gpu.log)
    for _ in range(16):
        executor.enqueue([Tensor.of(sparse(9, 2))]).wait()
    assert bench.holdings() == held
    assert "Device.allocate" not in bench.gpu.log[log:]


def test_f32_the_executor_moves_to_another_partition(bench: Bench) -> None:
    executor = bench.bind(NONZERO, FIVE)
    with bench.device.current():
        other = bench.device.carve([1])
    moved = executor.rebind(other)
    executor.close()
    assert answer(moved.enqueue([Tensor.of(sparse(5, 2))])) == expected(sparse(5, 2))
    moved.close()
    again = moved.engine.bind(bench.partition)
    assert answer(again.enqueue([Tensor.of(sparse(7, 2))])) == expected(sparse(7, 2))
    again.close()
    moved.engine.close()
    other.close()


def test_f67_data_dependent_outputs_are_never_captured_and_logged_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    executor = bench.bind(NONZERO, FIVE, batch_padding=True)
    for size in (5, 7, 5):
        assert answer(executor.enqueue([Tensor.of(sparse(size, 2))])) == expected(sparse(size, 2))
    assert "cuStreamBeginCapture" not in bench.gpu.log
    assert [message.partition(": ")[2] for message in caplog.messages] == [WHY]
    assert executor.describe()["graphs"] == "none"
    assert executor.describe()["why"] == WHY
    assert executor.preparing([(6,)]) is None


def test_f67_graphs_that_are_required_are_refused_with_the_reason(bench: Bench) -> None:
    before = bench.holdings()
    engine = bench.load(bench.plan(NONZERO, FIVE), graphs="required")
    why = r"graphs are required, but it cannot be captured as one: the size of output 'y' depends on data"
    with pytest.raises(ModelRefused, match=why):
        engine.bind(bench.partition)
    engine.close()
    assert bench.holdings() == before


def test_f67_contexts_with_graphs_of_their_own_are_made_again_without(bench: Bench) -> None:
    executor = bench.bind(NONZERO, FIVE, graphs="off", cuda_graph_strategy="whole_graph_capture")
    assert answer(executor.enqueue([Tensor.of(sparse(5, 2))])) == expected(sparse(5, 2))
    assert {context.get_runtime_config().cuda_graph_strategy.name for context in bench.gpu.executions} == {"DISABLED"}


def test_f32_an_output_larger_than_the_library_s_bound_is_an_error_with_both_numbers(bench: Bench) -> None:
    executor = bench.load(bench.plan(NONZERO, FIVE, bounds={"y": 16})).bind(bench.partition)
    assert answer(executor.enqueue([Tensor.of(sparse(5, 1, 2))])) == expected(sparse(5, 1, 2))
    with pytest.raises(ExecutionFailed, match="output 'y' needs 24 bytes, and the library's bound was 16"):
        executor.enqueue([Tensor.of(sparse(5, 1, 2, 3))])
    assert answer(executor.enqueue([Tensor.of(sparse(5, 1))])) == expected(sparse(5, 1))
    executor.close()


@pytest.mark.parametrize(
    "failing", ["launch", "IExecutionContext.execute_async_v3", "Stream.record", "LegacyPinnedMemoryResource.allocate"]
)
def test_f32_a_failure_leaves_nothing_in_flight_and_the_next_is_right(bench: Bench, failing: str) -> None:
    executor = bench.bind(NONZERO, FIVE)
    data, stream = sparse(5, 1, 2), bench.partition.stream.simulated
    for nth in (1, 2, 3, 4) if failing == "launch" else (1,):
        bench.gpu.fail(failing, nth)
        with pytest.raises(ExecutionFailed, match="as scripted"):
            executor.enqueue([Tensor.of(data)])
        assert not stream.pending
        assert answer(executor.enqueue([Tensor.of(data)])) == expected(data)


def test_f32_inputs_that_do_not_fit_the_signature_are_refused(bench: Bench) -> None:
    executor = bench.bind(NONZERO, FIVE)
    with pytest.raises(TensorMismatch):
        executor.enqueue([Tensor.of(sparse(20, 1))])


def test_f32_a_library_that_says_no_shape_is_an_error(bench: Bench) -> None:
    executor = bench.bind(DISTINCT, FIVE)
    (context,) = bench.gpu.executions
    context.get_output_allocator("y").notify_shape = lambda name, shape: None
    with pytest.raises(ExecutionFailed, match="the library did not report the shape of y"):
        executor.enqueue([Tensor.of(sparse(5, 1))])
    assert repr(DataDependentOutputs({"y": (64, 16)})) == "<DataDependentOutputs ['y']>"
