"""Inferences on a simulated GPU, where nothing happens before it is waited for. F numbers are those of the checklist of
promises that this project took over from others' work on the same problem.
"""

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from engines import ExecutionFailed, TensorMismatch
from engines.base import NO_ROOM, Room, Tensor
from partitions import DeviceLost
from tests.contract import in_a_thread
from tests.engines.simulated import SEVERAL, TWO, Bench, affine, opened
from tests.engines.tensors import Array, Memory, array, run
from tests.simulation import Misuse

LENGTH = 16
MOST_GRAPHS = 32


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as bench:
        yield bench
        bench.close()


@pytest.fixture(autouse=True)
def warnings_only(caplog: pytest.LogCaptureFixture) -> None:
    """Unless a test asks for more."""
    caplog.set_level(logging.WARNING, "greenlane.engines")


@pytest.fixture
def executor(bench: Bench) -> Iterator[Any]:
    executor = bench.bind()
    yield executor
    executor.close()


def rows(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).random((count, 3), np.float32)


def assert_right(executor: Any, data: Array) -> None:
    assert run(executor, data)[0].tolist() == affine(data).tolist()


def never_captured(bench: Bench) -> Any:
    """An executor that runs without graphs."""
    bench.gpu.capturable = False
    return bench.bind()


def test_the_numbers_are_right_on_the_first_run_when_captured_and_when_replayed(executor: Any) -> None:
    """F20, F58."""
    for turn in range(4):
        assert_right(executor, rows(5, turn))
    assert repr(executor) == "<TensorRTExecutor affine1.plan, 7 runs, 2 captures>"


def test_shapes_that_come_in_turn_each_have_a_graph_of_their_own(bench: Bench, executor: Any) -> None:
    """F65: no graph is replayed for another shape."""
    for turn in range(4):
        for count in (1, 8, 3):
            assert_right(executor, rows(count, turn))
    assert bench.gpu.log.count("cuGraphInstantiate") == 4


def test_several_inputs_and_outputs_keep_their_places(bench: Bench) -> None:
    executor = bench.bind(SEVERAL, TWO)
    for count in (1, 5, 2, 1, 5, 1):
        a, b = rows(count), np.arange(count)
        tensors = executor.enqueue([Tensor.of(a), Tensor.of(b)], bench.room()).wait()
        assert [tensor.shape for tensor in tensors] == [(count, 3), (count,), (count, 6)]
        assert array(tensors[0]).tolist() == (a + a).tolist()
        assert array(tensors[1], np.int64).tolist() == (b + b).tolist()
        assert array(tensors[2]).tolist() == np.concatenate([a, a + a], axis=1).tolist()
    executor.close()


def test_a_model_that_takes_nothing_is_run_all_the_same(bench: Bench) -> None:
    executor = bench.bind("constant () => (float[2] y) <float[2] two = {1, 2}> { y = Identity(two) }", {})
    assert run(executor)[0].tolist() == [1, 2]
    executor.close()


def test_many_in_flight_each_have_their_own_data(bench: Bench, executor: Any) -> None:
    """F11, F20: more than there are tables, and of several shapes."""
    data = [rows(1 + turn % 3, turn) for turn in range(3 * LENGTH + 5)]
    rooms = [bench.room(64 * 3) for _ in data]
    inputs = [bench.pinned(each) for each in data]
    for _ in range(2):
        works = [executor.enqueue(given, room) for given, room in zip(inputs, rooms, strict=True)]
        for each, work, room in zip(data, works, rooms, strict=True):
            (output,) = work.wait()
            assert output.address == room.address
            assert array(output).tolist() == affine(each).tolist()


def test_many_in_flight_through_staging_each_have_their_own_data(executor: Any) -> None:
    data = [rows(2, turn) for turn in range(2 * LENGTH + 3)]
    works = [executor.enqueue([Tensor.of(each)]) for each in data]
    for each, work in zip(data, works, strict=True):
        assert array(work.wait()[0]).tolist() == affine(each).tolist()


def test_an_output_that_was_staged_stays_the_work_s_however_often_it_is_waited_for(executor: Any) -> None:
    first = executor.enqueue([Tensor.of(rows(2))])
    for turn in range(2):
        assert array(first.wait()[0]).tolist() == affine(rows(2)).tolist(), turn
        for seed in range(LENGTH + 1):
            assert_right(executor, rows(2, seed + 1))


def test_works_that_nobody_waits_for_are_forgotten(executor: Any) -> None:
    for turn in range(2 * LENGTH):
        executor.enqueue([Tensor.of(rows(2, turn))])
    assert_right(executor, rows(2))


def test_enqueue_waits_once_the_ring_is_full_and_never_before(bench: Bench, executor: Any) -> None:
    """F11: it returns before completion."""
    (given,), room = bench.pinned(rows(2)), bench.room()
    works = [executor.enqueue([given], room) for _ in range(LENGTH)]
    assert {repr(work) for work in works} == {"<TensorRTWork in flight>"}
    executor.enqueue([given], room)
    assert sum(graph.in_flight for graph in bench.gpu.graphs) == LENGTH


def test_a_work_ends_when_it_is_waited_for_and_cannot_be_cancelled(bench: Bench, executor: Any) -> None:
    data = rows(2)
    work = executor.enqueue(bench.pinned(data), bench.room())
    work.cancel()
    assert repr(work) == "<TensorRTWork in flight>"
    assert array(work.wait()[0]).tolist() == affine(data).tolist()
    assert repr(work) == "<TensorRTWork done>"


def test_every_operation_is_on_the_partition_s_stream(bench: Bench, executor: Any) -> None:
    """F02, F09: another partition's stream sees none of it."""
    other = bench.device.carve([1])
    executor.enqueue([Tensor.of(rows(3))])
    assert bench.partition.stream._stream.pending
    assert not other.stream._stream.pending
    other.close()


# Outputs and inputs, pinned or not.


def test_outputs_go_straight_into_a_room_that_the_gpu_reaches(bench: Bench, executor: Any) -> None:
    room = bench.room()
    (output,) = executor.enqueue(bench.pinned(rows(8)), room).wait()
    assert (output.address, output.nbytes, output.shape) == (room.address, 96, (8, 3))


@pytest.mark.parametrize("short", [1, 95, 96])
def test_outputs_that_do_not_fit_are_elsewhere(bench: Bench, executor: Any, short: int) -> None:
    room, data = bench.room(96), rows(8)
    (output,) = executor.enqueue(bench.pinned(data), Room(room.address, room.nbytes - short)).wait()
    assert array(output).tolist() == affine(data).tolist()
    assert not room.address <= output.address < room.address + 96


def test_unpinned_memory_is_staged_with_one_record_about_it(
    bench: Bench, executor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """F34, F35: one record an executor, at its first staged inference and not when it is bound."""
    caplog.set_level(logging.INFO, "greenlane.engines")
    executor.enqueue(bench.pinned(rows(2)), bench.room()).wait()
    assert caplog.messages == []
    for seed in range(3):
        assert_right(executor, rows(2, seed))
    assert caplog.messages == ["affine1.plan: inputs or outputs are staged through the host, as their memory is not pinned"]
    again = executor.engine.bind(bench.partition)
    assert len(caplog.messages) == 1
    assert_right(again, rows(2))
    assert len(caplog.messages) == 2
    again.close()


def test_outputs_alone_are_staged_with_a_record_too(bench: Bench, executor: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "greenlane.engines")
    (given,), memory = bench.pinned(rows(2)), Memory(4096)
    for room in (memory.room, NO_ROOM):
        (output,) = executor.enqueue([given], room).wait()
        assert array(output).tolist() == affine(rows(2)).tolist()
    assert len(caplog.messages) == 1
    assert (memory.bytes == 0xEE).all()


def test_memory_is_looked_at_when_it_is_used(bench: Bench, executor: Any) -> None:
    """F37: what was pinned and is no longer is staged."""
    memory, data = Memory(4096), rows(2)
    memory.bytes[: data.nbytes] = np.frombuffer(data.tobytes(), np.uint8)
    tensor, pin = Tensor(data.shape, memory.room.address, data.nbytes), bench.device.pin(*memory.room)
    for _ in range(2):
        assert array(executor.enqueue([tensor]).wait()[0]).tolist() == affine(data).tolist()
        pin.close()


def test_staging_that_cannot_be_had_fails_one_inference(bench: Bench, executor: Any) -> None:
    """F38."""
    bench.gpu.fail("LegacyPinnedMemoryResource.allocate")
    with pytest.raises(ExecutionFailed, match=r"running affine1\.plan: CUDA_ERROR_OUT_OF_MEMORY"):
        run(executor, rows(2))
    for seed in range(LENGTH + 1):
        assert_right(executor, rows(2, seed))


def test_staging_is_made_once_for_each_place_in_the_ring(bench: Bench, executor: Any) -> None:
    """F38."""
    for seed in range(LENGTH):
        assert_right(executor, rows(2, seed))
    held = bench.holdings()
    for seed in range(LENGTH):
        assert_right(executor, rows(8, seed))
    assert len(bench.gpu.allocated) == held[0]


@pytest.mark.parametrize("room", [NO_ROOM, Room(64, 0)])
def test_a_tensor_of_no_bytes_has_a_shape(executor: Any, room: Room) -> None:
    """F28."""
    for _ in range(3):
        (output,) = executor.enqueue([Tensor.of(rows(0))], room).wait()
        assert (output.shape, output.nbytes, array(output).tolist()) == ((0, 3), 0, [])
    assert_right(executor, rows(1))


def test_an_output_without_dimensions_is_one_element(bench: Bench) -> None:
    """F29."""
    executor = bench.bind("total (float[n, 3] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }")
    for seed in range(3):
        data = rows(2, seed)
        (output,) = executor.enqueue([Tensor.of(data)]).wait()
        assert (output.shape, output.nbytes) == ((), 4)
        assert float(array(output)) == pytest.approx(float(data.sum()))
    executor.close()


# Shapes.


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((9, 3), "dimension 0 of shape [9, 3] is 9; the engine was built for 0 to 8"),
        ((2, 4), "dimension 1 of shape [2, 4] is 4; expected 3"),
        ((6,), "shape [6] has 1 dimensions; expected 2, as in [-1, 3]"),
    ],
)
def test_a_shape_outside_of_the_profile_is_refused_before_it_waits(
    bench: Bench, executor: Any, shape: tuple[int, ...], why: str
) -> None:
    """F24, F25: nothing is enqueued."""
    with pytest.raises(TensorMismatch) as caught:
        executor.engine.signature.check([shape])
    assert str(caught.value) == f"input 'x': {why}"


def test_a_shape_that_is_refused_after_another_input_s_was_taken_leaves_nothing_of_it_behind(bench: Bench) -> None:
    bench.gpu.capturable = False
    executor = bench.bind(SEVERAL, TWO)
    with pytest.raises(ExecutionFailed, match=r"input 'b' of shape \[9\]"):
        run(executor, rows(3), np.arange(9))
    a, b = rows(2), np.arange(2)
    tensors = executor.enqueue([Tensor.of(a), Tensor.of(b)]).wait()
    assert array(tensors[0]).tolist() == (a + a).tolist()
    executor.close()


def test_a_new_shape_is_captured_once_its_first_run_has_ended(bench: Bench, executor: Any) -> None:
    """F13: though nobody waited for that."""
    works = [executor.enqueue([Tensor.of(rows(3, seed))]) for seed in range(4)]
    assert "2 captures" in repr(executor)
    assert [array(work.wait()[0]).tolist() for work in works] == [affine(rows(3, seed)).tolist() for seed in range(4)]


def test_a_shape_that_the_library_refuses_fails_and_the_next_is_right(executor: Any) -> None:
    with pytest.raises(ExecutionFailed, match=r"input 'x' of shape \[9, 3\]: .*Static dimension mismatch"):
        run(executor, rows(9))
    assert_right(executor, rows(2))
    assert_right(executor, rows(8))


def test_tensors_without_a_shape_are_named(bench: Bench, executor: Any) -> None:
    """F30."""
    bench.gpu.unresolved = ["x", "hint"]
    with pytest.raises(ExecutionFailed, match="no shape is known for x, hint"):
        run(executor, rows(3))
    bench.gpu.unresolved = []
    assert_right(executor, rows(3))


def test_what_the_library_raises_fails_one_inference(bench: Bench, executor: Any) -> None:
    bench.gpu.fail("IExecutionContext.infer_shapes")
    with pytest.raises(ExecutionFailed, match=r"running affine1\.plan: infer_shapes: CUDA_ERROR_OUT_OF_MEMORY"):
        run(executor, rows(3))
    for _ in range(3):
        assert_right(executor, rows(3))


# Graphs.


def test_graphs_are_bounded_and_the_least_recently_used_goes_first(bench: Bench) -> None:
    text = "wide (float[n, 3] x) => (float[n, 3] y) { y = Add(x, x) }"
    executor = bench.bind(text, {"x": [(1, 3), (1, 3), (99, 3)]})
    for count in range(1, MOST_GRAPHS + 1):
        for _ in range(3):
            run(executor, rows(count))
    assert len(bench.gpu.graphs) == MOST_GRAPHS
    run(executor, rows(1))  # Now 2 is the one that was not used for longest.
    run(executor, rows(90))
    assert len(bench.gpu.graphs) == MOST_GRAPHS - 1
    launched = bench.gpu.log.count("cuGraphLaunch")
    run(executor, rows(1))
    assert bench.gpu.log.count("cuGraphLaunch") == launched + 1
    run(executor, rows(2))
    assert bench.gpu.log.count("cuGraphLaunch") == launched + 1
    executor.close()
    assert bench.gpu.graphs == []


def test_what_is_kept_of_a_shape_describes_itself(bench: Bench, executor: Any) -> None:
    run(executor, rows(3))
    assert list(map(repr, executor._prepared.values())) == ["<Prepared [(2, 3)], captured>", "<Prepared [(3, 3)]>"]


FAULTS = {
    "TensorRT": "IExecutionContext.execute_async_v3",
    "copies": "launch",
    "begin": "cuStreamBeginCapture",
    "end": "cuStreamEndCapture",
    "instantiate": "cuGraphInstantiate",
}


@pytest.mark.parametrize("call", FAULTS.values(), ids=list(FAULTS))
def test_what_cannot_be_captured_runs_without_a_graph_with_one_warning(
    bench: Bench, executor: Any, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F60: the warning names the engine and the reason."""
    graphs = len(bench.gpu.graphs)
    assert_right(executor, rows(3))
    bench.gpu.fail(call, error="CUDA_ERROR_NOT_PERMITTED")
    for seed in range(4):
        assert_right(executor, rows(3, seed))
    for seed in range(4):
        assert_right(executor, rows(5, seed))
    assert len(caplog.messages) == 1
    assert "affine1.plan: cannot be captured as a graph (" in caplog.messages[0]
    assert "CUDA_ERROR_NOT_PERMITTED: as told" in caplog.messages[0]
    assert len(bench.gpu.graphs) == graphs
    assert_right(executor, rows(2))


def test_an_engine_that_cannot_be_captured_at_all_is_bound_with_one_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    executor = never_captured(bench)
    for seed in range(3):
        assert_right(executor, rows(1 + seed, seed))
    assert "STREAM_CAPTURE" in caplog.text
    assert len(caplog.messages) == 1
    assert bench.gpu.graphs == []
    executor.close()


def test_works_without_graphs_follow_each_other_without_a_wait(bench: Bench) -> None:
    """F20, F13: the context is told nothing while it works."""
    executor = never_captured(bench)
    data = [rows(2, seed) for seed in range(5)]
    works = [executor.enqueue(bench.pinned(each), bench.room()) for each in data]
    (context,) = bench.gpu.executions
    assert context.in_flight == 5
    assert [array(work.wait()[0]).tolist() for work in works] == [affine(each).tolist() for each in data]
    executor.close()


def test_a_lost_device_is_no_capture_that_failed(bench: Bench, executor: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert_right(executor, rows(3))
    bench.gpu.fail("cuGraphInstantiate", error="CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(DeviceLost, match="capturing: CUDA_ERROR_LAUNCH_FAILED"):
        run(executor, rows(3))
    assert caplog.messages == []
    with pytest.raises(DeviceLost):
        executor.close()


# What goes wrong.


def test_a_run_that_is_refused_fails_and_the_next_finds_its_own_table(bench: Bench) -> None:
    """F19: with the library's words, and the ring in step on both sides."""
    executor = never_captured(bench)
    for turn in range(LENGTH + 3):
        bench.gpu.fail("IExecutionContext.execute_async_v3")
        with pytest.raises(ExecutionFailed, match=r"^running affine1\.plan: CUDA_ERROR_OUT_OF_MEMORY: as told$"):
            run(executor, rows(2, turn))
        assert_right(executor, rows(2, turn))
    executor.close()


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


@pytest.mark.parametrize(("call", "nth"), [("launch", 1), ("launch", 2), ("Stream.record", 1), ("Event.sync", 1)])
def test_a_failure_after_something_was_submitted_leaves_nothing_in_flight(bench: Bench, call: str, nth: int) -> None:
    """F16, F18, F19: nothing is read or written any more once enqueue has raised, and the next inference is right."""
    executor = never_captured(bench)
    for turn in range(LENGTH + 2):
        given, room = bench.pinned(rows(2, turn)), bench.room()
        bench.gpu.fail(call, nth)
        with pytest.raises(ExecutionFailed, match=r"running affine1\.plan: CUDA_ERROR_OUT_OF_MEMORY: as told"):
            executor.enqueue(given, room)
        assert not bench.partition.stream._stream.pending
        assert_right(executor, rows(2, turn + 100))
    executor.close()


@pytest.mark.parametrize("call", ["cuGraphLaunch", "Stream.record"])
def test_a_graph_that_cannot_be_launched_fails_and_the_next_inference_is_right(bench: Bench, executor: Any, call: str) -> None:
    for turn in range(LENGTH + 2):
        bench.gpu.fail(call)
        with pytest.raises(ExecutionFailed, match="CUDA_ERROR_OUT_OF_MEMORY: as told"):
            run(executor, rows(2, turn))
        assert not bench.partition.stream._stream.pending
        assert_right(executor, rows(2, turn))


def test_a_wait_that_fails_is_an_execution_that_failed(bench: Bench, executor: Any) -> None:
    work = executor.enqueue(bench.pinned(rows(2)), bench.room())
    bench.gpu.fail("Event.sync")
    with pytest.raises(ExecutionFailed, match="waiting for the GPU: CUDA_ERROR_OUT_OF_MEMORY"):
        work.wait()
    assert array(work.wait()[0]).tolist() == affine(rows(2)).tolist()


def test_a_lost_device_is_said_to_be_lost_by_whatever_comes_next(bench: Bench, executor: Any) -> None:
    work, other = (executor.enqueue([Tensor.of(rows(2))]) for _ in range(2))
    bench.gpu.fail("Event.sync", error="CUDA_ERROR_ILLEGAL_ADDRESS")
    for call in (work.wait, other.wait, lambda: run(executor, rows(2)), executor.close):
        with pytest.raises(DeviceLost, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            call()
    executor.close()


def test_memory_that_the_gpu_cannot_reach_loses_the_device(bench: Bench, executor: Any) -> None:
    memory = Memory(4096)
    pin = bench.device.pin(*memory.room)
    work = executor.enqueue([Tensor((2, 3), memory.room.address, 24)], bench.room())
    pin.close()  # Too early.
    with pytest.raises(DeviceLost, match="waiting for the GPU: CUDA_ERROR_ILLEGAL_ADDRESS"):
        work.wait()
    with pytest.raises(DeviceLost):
        executor.close()


# Closing.


def test_closing_waits_then_frees_graphs_the_context_and_memory_in_this_order_once(bench: Bench) -> None:
    """F15, F77."""
    before = bench.holdings()
    executor = bench.bind()
    assert_right(executor, rows(2))
    data, room = rows(2, 1), bench.room()
    executor.enqueue(bench.pinned(data), room)
    begun = len(bench.gpu.log)
    executor.close()
    freed = [call for call in bench.gpu.log[begun:] if not call.startswith("Device")]
    assert list(dict.fromkeys(freed)) == [
        "Stream.sync", "cuGraphExecDestroy", "IExecutionContext.__del__", "Buffer.close", "Event.close",
    ]  # fmt: skip
    assert freed.count("Stream.sync") == 1
    assert bench.holdings() == before
    assert array(Tensor((2, 3), room.address, 24)).tolist() == affine(data).tolist()
    begun = len(bench.gpu.log)
    executor.close()
    assert len(bench.gpu.log) == begun
    assert repr(executor) == "<TensorRTExecutor affine1.plan, 5 runs, 1 captures, closed>"


def test_an_executor_is_closed_by_a_thread_that_cuda_has_not_seen(bench: Bench) -> None:
    before = bench.holdings()
    executor = bench.bind()
    assert_right(executor, rows(2))
    in_a_thread(executor.close)[1].result(30)
    assert bench.holdings() == before


def test_closing_frees_what_it_can_when_something_fails(bench: Bench) -> None:
    for call in ("Stream.sync", "cuGraphExecDestroy"):
        executor = bench.bind()
        bench.gpu.fail(call)
        with pytest.raises(ExecutionFailed, match=r"closing <TensorRTExecutor .*: CUDA_ERROR_OUT_OF_MEMORY"):
            executor.close()
        bench.gpu.graphs.clear()
        gc.collect()  # The error's traceback holds the graph.
        assert len(bench.gpu.allocated) == len(bench.gpu.events) == len(bench.gpu.executions) == 0


def test_binding_again_and_again_leaves_nothing_behind(bench: Bench) -> None:
    engine = bench.load(bench.plan())
    for granule in range(1, 9):
        bench.device.carve([granule]).close()
    before = bench.holdings()
    for granule in range(1, 9):
        partition = bench.device.carve([granule])
        executor = engine.bind(partition)
        partition.run(lambda executor=executor: assert_right(executor, rows(2)))
        executor.close()
        partition.close()
        assert bench.holdings() == before, granule


# The simulation would notice.


def test_the_simulation_objects_to_a_graph_on_another_partition_s_stream(bench: Bench, executor: Any) -> None:
    """F66."""
    other = bench.device.carve([1])
    with pytest.raises(Misuse, match="another context"):
        bench.gpu.launch_graph(bench.gpu.graphs[0], other.stream._stream)
    other.close()


def test_the_simulation_objects_to_a_partition_that_is_closed_before_its_graphs(bench: Bench) -> None:
    """F66, F77."""
    executor = bench.bind()
    bench.partition.close()
    with pytest.raises(Misuse, match="before its graphs"):
        bench.device.close()
    assert repr(executor).endswith("3 runs, 1 captures>")
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
    executor.close()


def test_the_simulation_objects_to_memory_that_is_freed_while_it_is_used(bench: Bench) -> None:
    executor = never_captured(bench)
    executor.enqueue(bench.pinned(rows(2)), bench.room())
    executor._copier._ring.close()
    with pytest.raises(Misuse, match="memory that was freed"):
        bench.partition.stream.sync()
    bench.gpu.lose("CUDA_ERROR_UNKNOWN")


def test_a_waiter_and_the_thread_that_enqueues_do_not_get_in_each_other_s_way(bench: Bench, executor: Any) -> None:
    """F36: works are waited for in one thread while another one's works push theirs out of the ring."""
    data = [rows(2, seed) for seed in range(8 * LENGTH)]
    works: SimpleQueue[Any] = SimpleQueue()
    thread, results = in_a_thread(lambda: [array(works.get().wait()[0]).tolist() for _ in data])
    for each in data:
        works.put(executor.enqueue([Tensor.of(each)]))
    assert results.result(30) == [affine(each).tolist() for each in data]
    thread.join()
