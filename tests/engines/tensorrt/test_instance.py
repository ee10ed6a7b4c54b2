"""Instances that outlive executors, on a simulated GPU: moved to another partition, given back, and taken by the next."""

import copy
import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engines import ExecutionFailed, ModelRefused, Tensor, on_stream
from partitions.cpu import open_cpu
from tests.engines.simulated import AFFINE, Bench, affine, assert_right, rows
from tests.engines.tensors import array
from tests.simulation.tensorrt_config import COMPILING

SLOW = {
    COMPILING,
    "ICudaEngine.create_execution_context",
    "IExecutionContext.set_optimization_profile_async",
    "IExecutionContext.__del__",
    "IRuntimeCache.__del__",
    "IRuntimeConfig.create_runtime_cache",
}
"""Calls that keep the interpreter, or take seconds."""
SMALL = {"x": [(1, 3), (2, 3), (4, 3)]}
LARGE = {"x": [(3, 3), (6, 3), (9, 3)]}


@pytest.fixture
def other(bench: Bench) -> Iterator[Any]:
    """Another partition."""
    partition = bench.device.carve([1])
    yield partition
    bench.close_engines()
    partition.close()


def right(executor: Any, partition: Any, *counts: int) -> None:
    """It computes AFFINE for so many rows, on a thread of the partition."""
    partition.run(lambda: [assert_right(executor, rows(count, 7 * count)) for count in counts])


def open_streams(partition: Any) -> int:
    return sum(not stream.closed for stream in partition.stream.simulated.context.streams)


def idle(count: int) -> str:
    """What `describe` of a pool says when no executor uses its instances."""
    return f"<InstancePool of {count} idle instances, 0 executors, 0 to be released>"


# Moved to another partition.


@pytest.mark.parametrize("facts", [{}, {"aux_streams": 2}])
def test_a_moved_executor_has_the_same_shapes_ready_without_slow_calls(bench: Bench, other: Any, facts: dict[str, int]) -> None:
    executor = bench.load(bench.plan(AFFINE, SMALL, LARGE, **facts)).bind(bench.partition)
    right(executor, bench.partition, 3, 9)
    begun = len(bench.gpu.log)
    moved = executor.rebind(other)
    assert not SLOW & set(bench.gpu.log[begun:])
    assert moved.instance is executor.instance
    assert moved.engine is executor.engine
    begun = len(bench.gpu.log)
    right(moved, other, 2, 3, 6, 9)
    calls = bench.gpu.log[begun:]
    assert calls.count("cuGraphLaunch") == 4
    assert not (SLOW | {"cuStreamBeginCapture"}) & set(calls)
    executor.close()
    begun = len(bench.gpu.log)
    right(moved, other, 2, 9, 8)
    assert "IExecutionContext.__del__" not in bench.gpu.log[begun:]
    moved.close()


def test_graphs_of_the_new_and_the_old_executor_are_each_on_their_own_partition(bench: Bench, other: Any) -> None:
    executor = bench.bind()
    moved = executor.rebind(other)
    contexts = [bench.partition.stream.simulated.context, other.stream.simulated.context]
    assert [graph.context for graph in bench.gpu.graphs] == contexts
    executor.close()
    assert [graph.context for graph in bench.gpu.graphs] == contexts[1:]
    moved.close()


def test_the_old_executor_serves_while_the_new_one_is_captured(bench: Bench, other: Any) -> None:
    """Before the capture, during it, and for a new shape."""
    executor = bench.bind()
    right(executor, bench.partition, 5)
    data = [rows(2, seed) for seed in range(4)]
    works = [executor.enqueue(bench.pinned(each), bench.room()) for each in data]

    def serve() -> None:
        works.append(executor.enqueue(bench.pinned(data[0]), bench.room()))
        assert_right(executor, rows(5, 1))

    bench.gpu.meanwhile("cuStreamEndCapture", lambda: bench.partition.run(serve))
    moved = executor.rebind(other)
    for each, work in zip([*data, data[0]], works, strict=True):
        assert array(work.wait()[0]).tolist() == affine(each).tolist()
    right(executor, bench.partition, 7)
    right(moved, other, 2, 5)
    executor.close()
    moved.close()


def test_a_new_shape_of_the_old_executor_waits_while_the_context_is_captured(bench: Bench, other: Any) -> None:
    """Two threads never call the context at the same time."""
    executor = bench.bind()
    right(executor, bench.partition, 5)
    taken: list[bool] = []
    locks = [each.lock for each in executor.instance.contexts.values()]
    with ThreadPoolExecutor(1) as thread:
        attempt = lambda: taken.extend(thread.submit(lock.acquire, blocking=False).result() for lock in locks)  # noqa: E731
        bench.gpu.meanwhile("cuStreamEndCapture", attempt)
        executor.rebind(other).close()
    assert taken == [False]


@pytest.mark.parametrize("first", ["old", "new"])
def test_closing_the_old_or_the_new_executor_leaves_the_other(bench: Bench, other: Any, first: str) -> None:
    before = bench.holdings()
    executor = bench.bind()
    right(executor, bench.partition, 5)
    moved = executor.rebind(other)
    if first == "old":
        executor.close()
        right(moved, other, 2, 5, 6)
        moved.close()
    else:
        moved.close()
        right(executor, bench.partition, 2, 5, 6)
        executor.close()
    assert repr(executor.engine.pool) == idle(1)
    assert repr(executor.instance) == "<Instance of affine1.plan, 1 contexts, used by 0>"
    executor.engine.close()
    assert bench.holdings() == before


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("cuGraphInstantiate", 1),
        ("cuGraphInstantiate", 2),
        ("cuStreamBeginCapture", 2),
        ("cuStreamEndCapture", 2),
        ("launch", 3),
        ("IExecutionContext.execute_async_v3", 2),
        ("IExecutionContext.set_input_shape", 1),
        ("IExecutionContext.infer_shapes", 2),
        ("Device.create_event", 5),
        ("cuGreenCtxStreamCreate", 2),
        ("cuGreenCtxStreamCreate", 4),
    ],
)
def test_a_move_that_fails_leaves_the_old_executor_serving_and_leaks_nothing(
    bench: Bench, other: Any, call: str, nth: int
) -> None:
    executor = bench.load(bench.plan(aux_streams=1)).bind(bench.partition)
    right(executor, bench.partition, 5, 6)
    before, streams, begun = bench.holdings(), open_streams(other), len(bench.gpu.log)
    bench.gpu.fail(call, nth)
    with pytest.raises(ModelRefused, match="CUDA_ERROR_OUT_OF_MEMORY: as scripted"):
        executor.rebind(other)
    gc.collect()  # The error's traceback held something.
    assert (bench.holdings(), open_streams(other)) == (before, streams)
    assert "IExecutionContext.__del__" not in bench.gpu.log[begun:]
    right(executor, bench.partition, 2, 5, 6, 7)
    moved = executor.rebind(other)
    executor.close()
    right(moved, other, 2, 5, 6, 7)
    moved.close()


def test_an_executor_is_moved_again_and_again(bench: Bench, other: Any) -> None:
    executor = bench.bind()
    right(executor, bench.partition, 5)
    kept = []
    for partition in [other, bench.partition] * 3:
        moved = executor.rebind(partition)
        executor.close()
        executor = moved
        right(executor, partition, 2, 5)
        kept.append((bench.holdings()[:4], open_streams(other)))
    assert kept[2:] == [kept[0], kept[1]] * 2
    executor.close()


def test_executors_that_cannot_be_moved_are_refused(bench: Bench, other: Any) -> None:
    executor, cpu = bench.bind(), open_cpu().carve([0])
    with pytest.raises(ModelRefused, match=r"affine1\.plan: TensorRT serves partitions of a GPU, not <CpuPartition"):
        executor.rebind(cpu)
    cpu.close()
    elsewhere = copy.copy(other)
    elsewhere.device = copy.copy(bench.device)
    elsewhere.device.index = 0
    for refuse in (executor.rebind, executor.engine.bind):
        with pytest.raises(ModelRefused, match=r"affine1\.plan: loaded on GPU 1, but <CudaPartition .* is of GPU 0"):
            refuse(elsewhere)
    closed = bench.device.carve([2])
    closed.close()
    with pytest.raises(ModelRefused, match="cannot take another thread"):
        executor.rebind(closed)
    right(executor, bench.partition, 2)
    executor.close()
    with pytest.raises(ExecutionFailed, match="closed> takes nothing more; bind the engine again"):
        executor.rebind(other)
    executor.engine.close()
    with pytest.raises(ExecutionFailed, match="closed> takes nothing more"):
        executor.rebind(other)


def test_without_graphs_a_moved_executor_gives_right_results(bench: Bench, other: Any) -> None:
    executor = bench.bind(graphs="off")
    right(executor, bench.partition, 5)
    moved = executor.rebind(other)
    right(moved, other, 2, 5, 6)
    executor.close()
    right(moved, other, 2, 5)
    moved.close()


def test_graphs_of_the_library_s_own_stay_where_they_were_made(bench: Bench, other: Any) -> None:
    """The simulation objects to using them on another partition, so a move and the next executor get contexts of their own."""
    before = bench.holdings()
    executor = bench.bind(copies="engine")
    right(executor, bench.partition, 5)
    moved = executor.rebind(other)
    assert moved.instance is not executor.instance
    right(executor, bench.partition, 2)
    executor.close()
    right(moved, other, 2, 5)
    moved.close()
    again = executor.engine.bind(bench.partition)
    right(again, bench.partition, 2)
    again.close()
    executor.engine.close()
    assert bench.holdings() == before


# Given back, and taken by the next.


def test_the_next_executor_reuses_the_last_one_s_instance_without_slow_calls(bench: Bench, other: Any) -> None:
    executor = bench.bind()
    right(executor, bench.partition, 5)
    begun = len(bench.gpu.log)
    executor.close()
    again = executor.engine.bind(other)
    assert again.instance is executor.instance
    right(again, other, 2, 5)
    assert not SLOW & set(bench.gpu.log[begun:])
    again.close()


def test_an_instance_is_cleared_before_the_next_executor_gets_it(bench: Bench, other: Any) -> None:
    executor = bench.bind(AFFINE, {"x": [(1, 3), (2, 3), (8, 3)]})
    right(executor, bench.partition, 8)
    instance = executor.instance
    taken, given = (bench.gpu.read(*each) for each in zip(instance.addresses, instance.sizes, strict=True))
    assert taken == rows(8, 56).tobytes()
    assert given == affine(rows(8, 56)).tobytes()
    executor.close()
    again = executor.engine.bind(other)
    taken, given = (bench.gpu.read(*each) for each in zip(instance.addresses, instance.sizes, strict=True))
    assert not any(taken)
    assert not any(given[2 * 12 :])  # The two rows before are of the warm-up.
    again.close()


def test_one_instance_is_never_given_to_two_executors(bench: Bench, other: Any) -> None:
    engine = bench.load(bench.plan())
    for _ in range(2):
        executors = [engine.bind(partition) for partition in (bench.partition, other)]
        assert executors[0].instance is not executors[1].instance
        for executor in executors:
            executor.close()
            executor.close()
        assert repr(engine.pool) == idle(2)


def test_an_instance_that_cannot_be_cleared_is_refused_and_not_lost(bench: Bench) -> None:
    before = bench.holdings()
    engine = bench.load(bench.plan())
    engine.bind(bench.partition).close()
    bench.gpu.fail("Buffer.fill", 2)
    with pytest.raises(ModelRefused, match="CUDA_ERROR_OUT_OF_MEMORY: as scripted"):
        engine.bind(bench.partition)
    assert repr(engine.pool) == idle(1)
    executor = engine.bind(bench.partition)
    right(executor, bench.partition, 2)
    executor.close()
    engine.close()
    gc.collect()
    assert bench.holdings() == before


def test_an_executor_that_is_closed_after_its_engine_frees_its_instance(bench: Bench) -> None:
    before = bench.holdings()
    executor = bench.bind()
    executor.engine.close()
    executor.close()
    assert bench.holdings() == before


def test_a_caller_s_stream_that_is_gone_is_not_waited_for(bench: Bench) -> None:
    executor = bench.bind(graphs="off")
    theirs = bench.gpu.create_stream(bench.partition.stream.simulated.context)
    with on_stream(theirs.handle):
        executor.enqueue([Tensor.of(rows(2))]).wait()
    theirs.wait()
    bench.gpu.destroy_stream(theirs)
    right(executor, bench.partition, 5)


@pytest.mark.parametrize("settings", [{}, {"copies": "engine"}, {"graphs": "off"}, {"batch_padding": True}])
def test_the_state_of_an_executor_is_json(bench: Bench, settings: dict[str, Any]) -> None:
    executor = bench.bind(**settings)
    right(executor, bench.partition, 5)
    said = dict(executor.describe())
    assert json.loads(json.dumps(said)) == said
    assert said["shapes"] == [[[2, 3]], [[5, 3]]]
    assert said["graphs"] == ("native" if "copies" in settings else "none" if "graphs" in settings else "captured")
    assert said["counts"]["captures"] == (2 if said["graphs"] == "captured" else 0)
    assert said["counts"]["compilations"] == (1 if said["graphs"] == "captured" else 0)
