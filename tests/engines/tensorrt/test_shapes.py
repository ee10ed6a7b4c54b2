"""Shapes that are ready, padded, or prepared while others are served, on a simulated GPU."""

import gc
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from threading import Event
from typing import Any

import numpy as np
import pytest

from engines import EngineError, ExecutionFailed, Tensor, TensorMismatch
from engines.cuda.locks import EXECUTION_LOCK
from tests.contract import in_a_thread
from tests.engines.simulated import AFFINE, SEVERAL, TWO, Bench, affine, assert_right, never_captured, rows
from tests.engines.tensors import UNTOUCHED, array, run
from tests.simulation.tensorrt_config import COMPILING

BATCHES = {"x": [(1, 3), (2, 3), (8, 3)]}
FIVE = ((5, 3),)
SIX = ((6, 3),)
PATIENCE = 30


class Held:
    """A thread that is held where it makes a call, until it is released."""

    def __init__(self, bench: Bench, call: str) -> None:
        self._arrived, self._go = Event(), Event()
        self.order: list[str] = []
        bench.gpu.meanwhile(call, self._hold)

    def wait(self) -> None:
        assert self._arrived.wait(PATIENCE)

    def release(self) -> None:
        self._go.set()

    def _hold(self) -> None:
        self._arrived.set()
        assert self._go.wait(PATIENCE)
        self.order.append("released")


@pytest.fixture
def padding(bench: Bench) -> Iterator[Any]:
    """Ready for 1, 2, 4 and 8 rows."""
    executor = bench.bind(AFFINE, BATCHES, batch_padding=True, warm_up="usual")
    yield executor
    executor.close()


def begun(executor: Any, shapes: tuple[tuple[int, ...], ...]) -> "Future[None]":
    future = executor.preparing(shapes)
    assert future is not None
    return future  # type: ignore[no-any-return]


def calls(bench: Bench, since: int, *names: str) -> list[int]:
    return [bench.gpu.log[since:].count(name) for name in names]


NEW = (COMPILING, "cuStreamBeginCapture", "cuGraphInstantiate", "ICudaEngine.create_execution_context")


# Padding.


@pytest.mark.parametrize(("count", "larger"), [(3, 4), (5, 8), (6, 8), (7, 8)])
def test_fewer_rows_run_as_the_next_larger_batch_and_only_they_come_out(
    bench: Bench, padding: Any, count: int, larger: int
) -> None:
    """Only the rows of the request are written to the room: the memory behind them may be another inference's."""
    assert_right(padding, rows(8, 99))
    since, instance = len(bench.gpu.log), padding.instance
    assert padding.shapes.find(((count, 3),)).prepared.shapes == ((larger, 3),)
    for seed in range(2):
        data, memory = rows(count, seed), bench.memory(4096)
        (output,) = padding.enqueue(bench.pinned(data), memory.room).wait()
        assert (output.shape, output.address, output.nbytes) == ((count, 3), memory.room.address, 12 * count)
        assert array(output).tolist() == affine(data).tolist()
        assert (memory.bytes[12 * count :] == UNTOUCHED).all()
    assert calls(bench, since, *NEW) == [0, 0, 0, 0]
    assert calls(bench, since, "cuGraphLaunch") == [2]
    computed = np.frombuffer(bench.gpu.read(instance.addresses[1], 96), np.float32).reshape(8, 3)
    assert computed[count:larger].tolist() == affine(rows(8, 99))[count:larger].tolist()


def test_padded_inferences_are_counted_each(bench: Bench, padding: Any) -> None:
    """Although the route of pinned memory is cached."""
    given, room = bench.pinned(rows(3)), bench.room()
    for _ in range(3):
        padding.enqueue(given, room).wait()
    assert_right(padding, rows(7))
    assert_right(padding, rows(4))
    assert padding.describe()["counts"]["padded"] == 4
    assert sorted(shape[0][0] for shape in padding.describe()["shapes"]) == [1, 2, 4, 8]


def test_padded_and_whole_batches_in_flight_each_have_their_own_numbers(bench: Bench, padding: Any) -> None:
    data = [rows(1 + turn % 8, turn) for turn in range(40)]
    works = [padding.enqueue(bench.pinned(each), bench.room()) for each in data]
    for each, work in zip(data, works, strict=True):
        assert array(work.wait()[0]).tolist() == affine(each).tolist()


def test_padding_accepts_no_shape_that_is_refused_without(bench: Bench) -> None:
    ranges = {"x": [(2, 3), (2, 3), (8, 3)]}
    said = []
    for settings in ({}, {"batch_padding": True}):
        executor = bench.bind(AFFINE, ranges, warm_up="usual", **settings)
        for shape in ((1, 3), (9, 3), (0, 3), (3, 4), (3,)):
            with pytest.raises(TensorMismatch) as refused:
                run(executor, np.zeros(shape, np.float32))
            said.append(str(refused.value))
        assert_right(executor, rows(3))
        executor.close()
    assert said[:5] == said[5:]


def test_a_shape_without_a_larger_ready_one_is_prepared(bench: Bench) -> None:
    executor = bench.bind(AFFINE, BATCHES, batch_padding=True)
    for count in (3, 8, 5, 7):
        assert_right(executor, rows(count))
    assert executor.describe()["shapes"] == [[[2, 3]], [[3, 3]], [[8, 3]]]
    assert executor.describe()["counts"]["padded"] == 2


def test_several_inputs_are_padded_together(bench: Bench) -> None:
    executor = bench.bind(SEVERAL, TWO, batch_padding=True, warm_up="usual")
    since = len(bench.gpu.log)
    for seed in range(2):
        a, b = rows(3, seed), np.arange(3) + seed
        tensors = executor.enqueue([Tensor.of(a), Tensor.of(b)], bench.room()).wait()
        assert [tensor.shape for tensor in tensors] == [(3, 3), (3,), (3, 6)]
        assert array(tensors[0]).tolist() == (a + a).tolist()
        assert array(tensors[1], np.int64).tolist() == (b + b).tolist()
        assert array(tensors[2]).tolist() == np.concatenate([a, a + a], axis=1).tolist()
    assert calls(bench, since, *NEW) == [0, 0, 0, 0]
    assert executor.describe()["counts"]["padded"] == 2


def test_a_model_with_a_tensor_that_has_no_rows_is_not_padded(bench: Bench) -> None:
    text = "weighted (float[n, 3] x, float[1, 3] w) => (float[n, 3] y) { y = Mul(x, w) }"
    executor = bench.bind(text, BATCHES, batch_padding=True, warm_up="usual")
    data, weights = rows(3), rows(1, 5)
    for _ in range(2):
        assert run(executor, data, weights)[0].tolist() == (data * weights).tolist()
    assert (executor.describe()["counts"]["padded"], executor.describe()["counts"]["compilations"]) == (0, 1)


def test_an_output_without_a_row_for_each_row_is_not_cut(bench: Bench) -> None:
    """The plan does not say which outputs have rows, so this follows from the sizes of the ready shapes."""
    text = "turned (float[n, m] x) => (float[m, n] y) { y = Transpose(x) }"
    executor = bench.bind(text, {"x": [(1, 5), (2, 5), (8, 5)]}, batch_padding=True, warm_up="usual")
    data = np.arange(15, dtype=np.float32).reshape(3, 5)
    (tensor,) = executor.enqueue([Tensor.of(data)]).wait()
    assert tensor.shape == (5, 3)
    assert array(tensor).tolist() == data.T.tolist()
    assert executor.describe()["counts"]["padded"] == 0


# Preparing.


def test_a_ready_shape_needs_no_preparation(bench: Bench, executor: Any, padding: Any) -> None:
    assert executor.preparing(((2, 3),)) is None
    assert padding.preparing(((3, 3),)) is None
    assert padding.preparing(((8, 3),)) is None
    with_none = never_captured(bench)
    assert with_none.preparing(FIVE) is None


def test_a_new_shape_is_prepared_in_the_background_and_then_launches_a_graph(bench: Bench, executor: Any) -> None:
    held = Held(bench, COMPILING)
    future = begun(executor, FIVE)
    held.wait()
    since = len(bench.gpu.log)
    for seed in range(20):
        assert_right(executor, rows(2, seed))
    assert calls(bench, since, "cuGraphLaunch", *NEW) == [20, 0, 0, 0, 0]
    assert not future.done()
    assert executor.describe()["shapes"] == [[[2, 3]]]
    held.release()
    future.result(PATIENCE)
    assert executor.preparing(FIVE) is None
    since = len(bench.gpu.log)
    for seed in range(3):
        assert_right(executor, rows(5, seed))
        assert_right(executor, rows(2, seed))
    assert calls(bench, since, "cuGraphLaunch", *NEW) == [6, 0, 0, 0, 0]
    assert (executor.describe()["counts"]["compilations"], executor.describe()["counts"]["captures"]) == (1, 2)


def test_preparing_does_not_overwrite_inferences_in_flight(bench: Bench, executor: Any) -> None:
    """A preparation runs on memory of its own, and does not wait for inferences in flight."""
    data, seen, made = rows(2), [], "ICudaEngine.create_execution_context"
    work = executor.enqueue(bench.pinned(data), room := bench.room())

    def look() -> None:
        """The separate memory is that of the compiling context and of the captured one."""
        seen.append((repr(work), bool((bench._pins[-1][0].bytes == UNTOUCHED).all())))

    bench.gpu.meanwhile(made, lambda: bench.gpu.meanwhile(made, look))
    begun(executor, ((8, 3),)).result(PATIENCE)
    assert seen == [("<CudaWork in flight>", True)]
    (output,) = work.wait()
    assert output.address == room.address
    assert array(output).tolist() == affine(data).tolist()


def test_a_shape_that_is_asked_for_twice_is_prepared_once(bench: Bench, executor: Any) -> None:
    held = Held(bench, COMPILING)
    futures = [begun(executor, FIVE) for _ in range(3)]
    held.wait()
    futures.append(begun(executor, FIVE))
    held.release()
    assert len(set(map(id, futures))) == 1
    futures[0].result(PATIENCE)
    assert [each.partition(" ")[2] for each in bench.gpu.compiled] == ["((2, 3),)", "((5, 3),)"]


def test_prepared_shapes_and_background_compilation_use_separate_memory(bench: Bench, executor: Any) -> None:
    """The simulation objects to a context that runs on two streams at once, as its memory is one."""
    begun(executor, FIVE).result(PATIENCE)
    held = Held(bench, "IExecutionContext.set_input_shape")
    future = begun(executor, SIX)
    held.wait()
    works = [executor.enqueue([Tensor.of(rows(5, seed))]) for seed in range(3)]
    held.release()
    future.result(PATIENCE)
    for seed, work in enumerate(works):
        assert array(work.wait()[0]).tolist() == affine(rows(5, seed)).tolist()
    assert_right(executor, rows(6))


def test_a_preparation_does_not_keep_its_executor_waiting_for_what_another_compiles(bench: Bench, executor: Any) -> None:
    with EXECUTION_LOCK:
        future = begun(executor, FIVE)
        assert_right(executor, rows(2))
        assert not future.done()
        assert_right(executor, rows(2, 1))
    future.result(PATIENCE)
    assert_right(executor, rows(5))


def test_several_new_shapes_are_prepared_one_after_another_with_two_contexts(bench: Bench, executor: Any) -> None:
    since = len(bench.gpu.log)
    for future in [begun(executor, shapes) for shapes in (FIVE, SIX, ((7, 3),))]:
        future.result(PATIENCE)
    for count in (5, 6, 7, 2):
        assert_right(executor, rows(count))
    assert calls(bench, since, "ICudaEngine.create_execution_context", COMPILING) == [2, 3]


@pytest.mark.parametrize("settings", [{}, {"allocation_strategy": "user_managed"}])
def test_a_preparation_has_auxiliary_streams_memory_and_profiles_of_its_own(bench: Bench, settings: dict[str, Any]) -> None:
    before = bench.holdings()
    small, large = {"x": [(1, 3), (2, 3), (4, 3)]}, {"x": [(3, 3), (6, 3), (9, 3)]}
    engine = bench.load(bench.plan(AFFINE, small, large, aux_streams=2), **settings)
    executor, (green,) = engine.bind(bench.partition), bench.gpu.contexts
    for count in (3, 8):
        begun(executor, ((count, 3),)).result(PATIENCE)
        assert sum(not stream.closed for stream in green.streams) == 3
    for count in (3, 8, 2, 6, 5, 9):
        assert_right(executor, rows(count))
    executor.close()
    engine.close()
    assert bench.holdings() == before


def test_a_shape_that_the_model_refuses_is_not_prepared(executor: Any) -> None:
    for shapes in (((9, 3),), ((2, 4),), ((2,),), ()):
        assert executor.preparing(shapes) is None
    with pytest.raises(TensorMismatch):
        run(executor, rows(9))
    assert_right(executor, rows(2))


FAILURES = [
    ("cuGreenCtxStreamCreate", 1),
    ("cuGreenCtxStreamCreate", 2),
    ("Device.set_current", 1),
    ("ICudaEngine.create_runtime_config", 1),
    ("ICudaEngine.create_execution_context", 1),
    ("IExecutionContext.set_optimization_profile_async", 1),
    ("Stream.sync", 1),
    ("Stream.sync", 2),
    ("IExecutionContext.set_input_shape", 1),
    ("IExecutionContext.infer_shapes", 1),
    ("Device.allocate", 1),
    ("Device.allocate", 2),
    ("Buffer.fill", 2),
    ("IExecutionContext.execute_async_v3", 1),
    ("IExecutionContext.execute_async_v3", 2),
    (COMPILING, 1),
    ("launch", 1),
    ("cuStreamBeginCapture", 1),
    ("cuStreamEndCapture", 1),
    ("cuGraphInstantiate", 1),
]


@pytest.mark.parametrize(("call", "nth"), FAILURES)
def test_a_preparation_that_fails_at_any_step_can_be_repeated(bench: Bench, call: str, nth: int) -> None:
    before = bench.holdings()
    executor = bench.bind()
    (green,) = bench.gpu.contexts
    bench.gpu.fail(call, nth)
    failed = begun(executor, FIVE)
    with pytest.raises(EngineError, match="CUDA_ERROR_OUT_OF_MEMORY: as scripted"):
        failed.result(PATIENCE)
    assert len(bench.gpu.graphs) == 1
    assert sum(not stream.closed for stream in green.streams) == 1
    assert_right(executor, rows(2))
    again = begun(executor, FIVE)
    assert again is not failed
    again.result(PATIENCE)
    since = len(bench.gpu.log)
    assert_right(executor, rows(5))
    assert calls(bench, since, "cuGraphLaunch", *NEW) == [1, 0, 0, 0, 0]
    executor.close()
    executor.engine.close()
    del failed, again
    gc.collect()
    assert bench.holdings() == before


def test_a_shape_that_was_run_meanwhile_keeps_its_graph(bench: Bench, executor: Any) -> None:
    """And the graph that was prepared for it is destroyed."""
    held = Held(bench, "ICudaEngine.create_execution_context")
    future = begun(executor, FIVE)
    held.wait()
    assert_right(executor, rows(5))
    graphs = list(bench.gpu.graphs)
    held.release()
    future.result(PATIENCE)
    assert bench.gpu.graphs == graphs
    assert_right(executor, rows(5))
    assert executor.describe()["counts"]["captures"] == 2


def test_kernels_that_were_prepared_are_kept_for_the_next_process(bench: Bench) -> None:
    path = bench.plan()
    executor = bench.load(path).bind(bench.partition)
    begun(executor, FIVE).result(PATIENCE)
    compiled = len(bench.gpu.compiled)
    killed = bench.load(path).bind(bench.partition)  # The first thread has closed nothing.
    assert_right(killed, rows(5))
    assert len(bench.gpu.compiled) == compiled
    for each in (executor, killed):
        each.close()


def test_closing_waits_for_a_preparation_and_leaks_nothing(bench: Bench) -> None:
    """Preparations that have not begun are cancelled, none is begun, and the result of a running one is discarded."""
    before = bench.holdings()
    executor = bench.bind()
    (green,) = bench.gpu.contexts
    held = Held(bench, COMPILING)
    future, waiting = begun(executor, FIVE), begun(executor, SIX)
    held.wait()

    def close() -> None:
        executor.close()
        held.order.append("closed")

    _, closed = in_a_thread(close)
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    assert executor.preparing(((7, 3),)) is None
    assert repr(executor.engine.pool) == "<InstancePool of 0 idle instances, 1 executors, 0 to be released>"
    held.release()
    closed.result(PATIENCE)
    future.result(PATIENCE)
    assert held.order == ["released", "closed"]
    assert repr(executor.engine.pool) == "<InstancePool of 1 idle instances, 0 executors, 0 to be released>"
    assert executor.describe()["counts"]["captures"] == 1
    assert bench.gpu.graphs == []
    assert sum(not stream.closed for stream in green.streams) == 1
    with pytest.raises(ExecutionFailed, match="takes nothing more"):
        executor.preparing(FIVE)
    executor.engine.close()
    assert bench.holdings() == before


def test_a_preparation_in_progress_stays_with_the_old_executor_of_a_move(bench: Bench) -> None:
    """The new executor does not compile that shape again."""
    before = bench.holdings()
    executor, other = bench.bind(), bench.device.carve([1])
    held = Held(bench, "ICudaEngine.create_execution_context")
    future = begun(executor, FIVE)
    held.wait()
    moved = executor.rebind(other)
    other.run(lambda: assert_right(moved, rows(2)))
    held.release()
    future.result(PATIENCE)
    assert moved.preparing(((2, 3),)) is None
    compiled = len(bench.gpu.compiled)
    begun(moved, FIVE).result(PATIENCE)
    assert len(bench.gpu.compiled) == compiled
    executor.close()
    other.run(lambda: [assert_right(moved, rows(count)) for count in (2, 5, 6)])
    moved.close()
    executor.engine.close()
    other.close()
    assert bench.holdings()[:4] == before[:4]


@pytest.mark.parametrize("failing", [False, True])
def test_prepared_shapes_are_moved_too(bench: Bench, failing: bool) -> None:
    """Also when a later preparation has failed, which leaves its context with other shapes."""
    executor, other = bench.load(bench.plan(aux_streams=1)).bind(bench.partition), bench.device.carve([1])
    begun(executor, FIVE).result(PATIENCE)
    if failing:
        bench.gpu.fail("IExecutionContext.execute_async_v3")
        with pytest.raises(ExecutionFailed):
            begun(executor, SIX).result(PATIENCE)
    compiled = len(bench.gpu.compiled)
    moved = executor.rebind(other)
    assert len(bench.gpu.compiled) == compiled
    executor.close()
    since = len(bench.gpu.log)
    other.run(lambda: [assert_right(moved, rows(count)) for count in (5, 2)])
    assert calls(bench, since, "cuGraphLaunch", *NEW) == [2, 0, 0, 0, 0]
    moved.close()
    bench.close_engines()
    other.close()
