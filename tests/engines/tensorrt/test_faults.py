"""What goes wrong with inferences on a simulated GPU, closing, and threads that meet."""

import gc
from contextlib import closing
from queue import SimpleQueue
from typing import Any

import pytest

from engines import ExecutionFailed, ModelRefused
from engines.base import Tensor
from partitions import DeviceLost
from tests.contract import in_a_thread
from tests.engines.simulated import Bench, affine, assert_right, never_captured, rows
from tests.engines.tensors import Memory, array, run
from tests.simulation import Misuse

LENGTH = 16


def test_a_run_that_is_refused_fails_and_the_next_finds_its_own_table(bench: Bench) -> None:
    """F19: with the library's words, and the ring in step on both sides."""
    executor = never_captured(bench)
    for turn in range(LENGTH + 3):
        bench.gpu.fail("IExecutionContext.execute_async_v3")
        with pytest.raises(ExecutionFailed, match=r"^running affine1\.plan: CUDA_ERROR_OUT_OF_MEMORY: as scripted$"):
            run(executor, rows(2, turn))
        assert_right(executor, rows(2, turn))


def test_kernels_in_clusters_run_on_every_granule_and_on_what_is_left_over_nowhere_alone(bench: Bench) -> None:
    """The SMs that a split leaves over belong to the last granule."""
    engine = bench.load(bench.plan(clusters=True))
    for granule in range(len(bench.device.granules)):
        with closing(bench.device.carve([granule])) as partition, closing(engine.bind(partition)) as executor:
            assert_right(executor, rows(2))
    bench.gpu.scattered = frozenset(range(bench.gpu.sms))
    why = r"err 912; its kernels are launched as clusters of thread blocks, .* or more of them$"
    with closing(bench.device.carve([3])) as partition, pytest.raises(ModelRefused, match=why):
        engine.bind(partition)


def test_a_first_run_that_is_refused_is_run_again_before_it_is_captured(
    bench: Bench, executor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench.gpu.fail("IExecutionContext.execute_async_v3")
    with pytest.raises(ExecutionFailed):
        run(executor, rows(3))
    for seed in range(3):
        assert_right(executor, rows(3, seed))
    assert caplog.messages == []
    assert "2 captures" in repr(executor)


@pytest.mark.parametrize("copies", ["sm", "engine"])
@pytest.mark.parametrize(("call", "nth"), [("copies", 1), ("copies", 2), ("Stream.record", 1)])
def test_a_failure_after_something_was_submitted_leaves_nothing_in_flight(
    bench: Bench, call: str, nth: int, copies: str
) -> None:
    """F16, F17, F18, F19: once enqueue has raised, none of its memory is read or written, and the next inference is right."""
    bench.gpu.capturable = False
    executor = bench.bind(copies=copies)
    call = {"sm": "launch", "engine": "cuMemcpyAsync"}[copies] if call == "copies" else call
    for turn in range(LENGTH + 2):
        given, room = bench.pinned(rows(2, turn)), bench.room()
        bench.gpu.fail(call, nth)
        with pytest.raises(ExecutionFailed, match=r"running affine1\.plan: CUDA_ERROR_OUT_OF_MEMORY: as scripted"):
            executor.enqueue(given, room)
        assert not bench.partition.stream.simulated.pending
        assert_right(executor, rows(2, turn + 100))


def test_a_failed_wait_for_a_ring_slot_adds_nothing(bench: Bench, executor: Any) -> None:
    """F16, F19."""
    for turn in range(2 * LENGTH):
        works = [executor.enqueue(bench.pinned(rows(2, seed)), bench.room()) for seed in range(LENGTH)]
        bench.gpu.fail("Event.sync")
        with pytest.raises(ExecutionFailed, match=r"running affine1\.plan: CUDA_ERROR_OUT_OF_MEMORY: as scripted"):
            executor.enqueue(bench.pinned(rows(2)), bench.room())
        assert sum(graph.in_flight for graph in bench.gpu.graphs) <= LENGTH
        assert [array(work.wait()[0]).tolist() for work in works] == [affine(rows(2, s)).tolist() for s in range(LENGTH)]
        assert_right(executor, rows(2, turn))


@pytest.mark.parametrize("call", ["cuGraphLaunch", "Stream.record"])
def test_a_graph_that_cannot_be_launched_fails_and_the_next_inference_is_right(bench: Bench, executor: Any, call: str) -> None:
    for turn in range(LENGTH + 2):
        bench.gpu.fail(call)
        with pytest.raises(ExecutionFailed, match="CUDA_ERROR_OUT_OF_MEMORY: as scripted"):
            run(executor, rows(2, turn))
        assert not bench.partition.stream.simulated.pending
        assert_right(executor, rows(2, turn))


def test_a_wait_that_fails_is_an_execution_that_failed(bench: Bench, executor: Any) -> None:
    work = executor.enqueue(bench.pinned(rows(2)), bench.room())
    bench.gpu.fail("Event.sync")
    with pytest.raises(ExecutionFailed, match="waiting for the GPU: CUDA_ERROR_OUT_OF_MEMORY"):
        work.wait()
    assert array(work.wait()[0]).tolist() == affine(rows(2)).tolist()


def test_after_a_lost_device_every_call_raises_device_lost(bench: Bench, executor: Any) -> None:
    """F18."""
    work, other = (executor.enqueue([Tensor.of(rows(2))]) for _ in range(2))
    bench.gpu.fail("Event.sync", error="CUDA_ERROR_ILLEGAL_ADDRESS")
    for call in (work.wait, other.wait, lambda: run(executor, rows(2)), executor.close):
        with pytest.raises(DeviceLost, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            call()
    executor.close()


def test_memory_that_the_gpu_cannot_reach_loses_the_device(bench: Bench, executor: Any) -> None:
    memory = Memory(4096)
    pin = bench.device.pin(*memory.room[:2])
    work = executor.enqueue([Tensor((2, 3), memory.room.address, 24)], bench.room())
    pin.close()  # Too early.
    with pytest.raises(DeviceLost, match="waiting for the GPU: CUDA_ERROR_ILLEGAL_ADDRESS"):
        work.wait()
    with pytest.raises(DeviceLost):
        executor.close()


# Closing.


def test_closing_waits_then_frees_in_order_and_once(bench: Bench) -> None:
    """F15, F77."""
    before = bench.holdings()
    executor = bench.bind()
    assert_right(executor, rows(2))
    data, room = rows(2, 1), bench.room()
    executor.enqueue(bench.pinned(data), room)
    begun = len(bench.gpu.log)
    executor.close()
    freed = [call for call in bench.gpu.log[begun:] if not call.startswith(("Device", "cuCtx"))]
    assert list(dict.fromkeys(freed)) == [
        "Stream.sync", "cuGraphExecDestroy", "Buffer.close", "Event.close", "cuMemcpyAsync",
    ]  # fmt: skip
    assert freed.count("Stream.sync") == 2, "the second is for what the clock says"
    assert array(Tensor((2, 3), room.address, 24)).tolist() == affine(data).tolist()
    begun = len(bench.gpu.log)
    executor.close()
    assert len(bench.gpu.log) == begun
    assert repr(executor) == "<TensorRTExecutor affine1.plan, 3 runs, 1 captures, closed>"
    for _ in range(2):
        executor.engine.close()
    freed = [call for call in bench.gpu.log[begun:] if not call.startswith(("Device", "cuCtx"))]
    assert list(dict.fromkeys(freed)) == [
        "IExecutionContext.__del__", "Buffer.close", "IRuntimeCache.serialize", "IRuntimeCache.__del__",
    ]  # fmt: skip
    assert freed.count("IExecutionContext.__del__") == 1
    assert bench.holdings() == before


def test_an_executor_and_its_engine_are_closed_by_threads_that_cuda_has_not_seen(bench: Bench) -> None:
    before = bench.holdings()
    executor = bench.bind()
    assert_right(executor, rows(2))
    in_a_thread(executor.close)[1].result(30)
    in_a_thread(executor.engine.close)[1].result(30)
    assert bench.holdings() == before


def test_closing_frees_what_it_can_when_something_fails(bench: Bench) -> None:
    for call in ("Stream.sync", "cuGraphExecDestroy"):
        executor = bench.bind()
        bench.gpu.fail(call)
        with pytest.raises(ExecutionFailed, match=r"closing <TensorRTExecutor .*: CUDA_ERROR_OUT_OF_MEMORY"):
            executor.close()
        executor.engine.close()
        bench.gpu.graphs.clear()
        gc.collect()  # The error's traceback holds the graph.
        memory, _, events, executions, _ = bench.holdings()
        assert memory == events == executions == 0


def test_binding_repeatedly_leaks_nothing(bench: Bench) -> None:
    engine = bench.load(bench.plan())
    for granule in range(1, 9):
        bench.device.carve([granule]).close()
    before, kept = bench.holdings(), []
    for granule in range(1, 9):
        partition = bench.device.carve([granule])
        executor = engine.bind(partition)
        partition.run(lambda executor=executor: assert_right(executor, rows(2)))
        executor.close()
        partition.close()
        kept.append(bench.holdings())
        assert kept[-1] == kept[0], granule
    engine.close()
    assert bench.holdings() == before


def test_an_executor_that_was_closed_takes_nothing_more(bench: Bench) -> None:
    """F15."""
    executor = bench.bind()
    executor.close()
    with pytest.raises(ExecutionFailed, match=r"affine1\.plan, 1 runs, 1 captures, closed> takes nothing more"):
        run(executor, rows(2))


# Threads.


def test_two_threads_may_enqueue_on_one_executor(bench: Bench, executor: Any) -> None:
    """F21."""

    def many(seed: int) -> None:
        for turn in range(60):
            assert_right(executor, rows(1 + turn % 3, 1000 * seed + turn))

    for _, result in [in_a_thread(lambda seed=seed: bench.partition.run(lambda: many(seed))) for seed in range(3)]:
        result.result(60)


@pytest.mark.parametrize("call", ["launch", "cuGraphLaunch", "Stream.record", "cuStreamEndCapture"])
def test_closing_waits_for_an_inference_that_is_being_enqueued(bench: Bench, call: str) -> None:
    """F15: the inference that is being enqueued is enqueued, and ends, before anything is freed."""
    executor, closing = bench.bind(), []
    data, room = rows(2 if call == "cuGraphLaunch" else 5, 1), bench.room()
    bench.gpu.meanwhile(call, lambda: closing.append(in_a_thread(executor.close)))
    executor.enqueue(bench.pinned(data), room)
    ((_, closed),) = closing
    closed.result(30)
    assert array(Tensor(data.shape, room.address, data.nbytes)).tolist() == affine(data).tolist()


# The simulation would notice.


def test_the_simulation_objects_to_a_graph_on_another_partition_s_stream(bench: Bench, executor: Any) -> None:
    """F66."""
    other = bench.device.carve([1])
    with pytest.raises(Misuse, match="another context"):
        bench.gpu.launch_graph(bench.gpu.graphs[0], other.stream.simulated)
    other.close()


def test_the_simulation_objects_to_a_partition_that_is_closed_before_its_graphs(bench: Bench) -> None:
    """F66, F77."""
    executor = bench.bind()
    bench.partition.close()
    with pytest.raises(Misuse, match="before its graphs"):
        bench.device.close()
    assert repr(executor).endswith("1 runs, 1 captures>")
    bench.gpu.lose("CUDA_ERROR_UNKNOWN")


def test_the_simulation_objects_to_a_context_that_is_touched_while_it_works(bench: Bench) -> None:
    """F13, F14."""
    executor, other = never_captured(bench), bench.device.carve([1])
    work = executor.enqueue(bench.pinned(rows(2)), bench.room())
    (context,) = bench.gpu.executions
    for touch in (
        lambda: context.set_input_shape("x", (1, 3)),
        lambda: context.set_tensor_address("x", 64),
        lambda: context.execute_async_v3(other.handle),
    ):
        with pytest.raises(Misuse, match=r"in flight|two streams"):
            touch()
    work.wait()
    other.close()


def test_the_simulation_objects_to_memory_that_is_freed_while_it_is_used(bench: Bench) -> None:
    executor = never_captured(bench)
    executor.enqueue(bench.pinned(rows(2)), bench.room())
    executor.instance.copies[True]._ring.close()
    with pytest.raises(Misuse, match="memory that was freed"):
        bench.partition.stream.sync()
    bench.gpu.lose("CUDA_ERROR_UNKNOWN")


def test_waiting_and_enqueueing_threads_do_not_disturb_each_other(bench: Bench, executor: Any) -> None:
    """F36: works are waited for in one thread while another one's works push theirs out of the ring."""
    data = [rows(2, seed) for seed in range(8 * LENGTH)]
    works: SimpleQueue[Any] = SimpleQueue()
    thread, results = in_a_thread(lambda: [array(works.get().wait()[0]).tolist() for _ in data])
    for each in data:
        works.put(executor.enqueue([Tensor.of(each)]))
    assert results.result(30) == [affine(each).tolist() for each in data]
    thread.join()
