"""Inferences on a simulated GPU, where nothing happens before it is waited for. F numbers are those of the checklist of
promises that this project took over from others' work on the same problem.
"""

import logging
from typing import Any

import numpy as np
import pytest

from engines import ExecutionFailed, TensorMismatch
from engines.base import NO_ROOM, Room, Tensor
from engines.signature import align
from tests.engines.simulated import SEVERAL, TWO, Bench, affine, assert_right, rows
from tests.engines.tensors import UNTOUCHED, Memory, array, run

LENGTH = 16


@pytest.fixture(autouse=True)
def warnings_only(caplog: pytest.LogCaptureFixture) -> None:
    """The length of the ring, unless a test needs a longer one."""
    caplog.set_level(logging.WARNING, "greenlane.engines")


def test_alternating_shapes_each_have_a_graph_of_their_own(bench: Bench, executor: Any) -> None:
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


def test_a_model_without_inputs_is_run(bench: Bench) -> None:
    executor = bench.bind("constant () => (float[2] y) <float[2] two = {1, 2}> { y = Identity(two) }", {})
    assert run(executor)[0].tolist() == [1, 2]


def test_many_in_flight_each_have_their_own_data(bench: Bench, executor: Any) -> None:
    """F11, F20, F23, F65: more than there are tables, and of several shapes."""
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
    """F12: waiting for one waits for its copies."""
    data = [rows(2, turn) for turn in range(2 * LENGTH + 3)]
    works = [executor.enqueue([Tensor.of(each)]) for each in data]
    for each, work in zip(data, works, strict=True):
        assert array(work.wait()[0]).tolist() == affine(each).tolist()


def test_a_staged_output_is_kept_when_a_work_is_waited_for_again(executor: Any) -> None:
    first = executor.enqueue([Tensor.of(rows(2))])
    for turn in range(2):
        assert array(first.wait()[0]).tolist() == affine(rows(2)).tolist(), turn
        for seed in range(LENGTH + 1):
            assert_right(executor, rows(2, seed + 1))


def test_works_that_are_never_waited_for_are_dropped(executor: Any) -> None:
    for turn in range(2 * LENGTH):
        executor.enqueue([Tensor.of(rows(2, turn))])
    assert_right(executor, rows(2))


def test_enqueue_waits_once_the_ring_is_full_and_never_before(bench: Bench, executor: Any) -> None:
    """F11, F23: it returns before completion."""
    (given,), room = bench.pinned(rows(2)), bench.room()
    works = [executor.enqueue([given], room) for _ in range(LENGTH)]
    assert {repr(work) for work in works} == {"<CudaWork in flight>"}
    executor.enqueue([given], room)
    assert sum(graph.in_flight for graph in bench.gpu.graphs) == LENGTH


def test_the_driver_is_not_queried_for_works_that_were_waited_for(bench: Bench, executor: Any) -> None:
    """Each query releases the GIL, which another tenant's thread may then take."""
    (given,), room = bench.pinned(rows(2)), bench.room()
    executor.enqueue([given], room).wait()
    begun = len(bench.gpu.log)
    for _ in range(3):
        works = [executor.enqueue([given], room) for _ in range(LENGTH)]
        for work in works:
            work.wait()
    assert bench.gpu.log[begun:].count("Event.sync") == 3 * LENGTH


@pytest.mark.parametrize("order", [1, -1])
def test_works_may_be_waited_for_in_any_order(bench: Bench, executor: Any, order: int) -> None:
    given, room = bench.pinned(rows(2)), bench.room()
    for _ in range(3):
        works = [executor.enqueue(given, room) for _ in range(LENGTH)]
        for work in works[::order]:
            work.wait()
        for _ in range(LENGTH + 1):
            executor.enqueue(given, room)
        assert sum(graph.in_flight for graph in bench.gpu.graphs) <= LENGTH
    assert_right(executor, rows(2))


def test_a_work_ends_when_it_is_waited_for_and_cannot_be_cancelled(bench: Bench, executor: Any) -> None:
    """F22: its memory is in use until then."""
    data = rows(2)
    work = executor.enqueue(bench.pinned(data), bench.room())
    work.cancel()
    assert repr(work) == "<CudaWork in flight>"
    assert array(work.wait()[0]).tolist() == affine(data).tolist()
    assert repr(work) == "<CudaWork done>"


# Outputs and inputs, pinned or not.


def test_shapes_that_another_executor_has_learnt_are_made_ready_and_others_left(
    bench: Bench, executor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for count in (5, 3):
        assert_right(executor, rows(count))
    learnt = executor.describe()["shapes"]
    other = bench.load(bench.plan()).bind(bench.partition)
    other.make_ready([*learnt, [[99, 3]]])
    assert sorted(other.describe()["shapes"]) == sorted(learnt)
    captured = bench.gpu.log.count("cuGraphInstantiate")
    for count in (5, 3):
        assert_right(other, rows(count))
    assert bench.gpu.log.count("cuGraphInstantiate") == captured
    (message,) = caplog.messages
    assert "shapes [(99, 3)], which were in use before, are not ready: input 'x'" in message
    other.close()


@pytest.mark.parametrize("copies", ["sm", "engine"])
@pytest.mark.parametrize("unasked", [0b100, 0b001, 0b110, 0b111, 0b1000])
def test_outputs_that_are_not_asked_for_are_not_copied(bench: Bench, copies: str, unasked: int) -> None:
    """Neither to the room nor elsewhere; the others follow each other there."""
    executor = bench.bind(SEVERAL, TWO, copies=copies)
    memory = bench.memory(4096)
    a, b = rows(2), np.arange(2)
    inputs = bench.pinned(a, b)
    for _ in range(2):  # Captured, and replayed from known addresses.
        memory.bytes[:] = UNTOUCHED
        tensors = executor.enqueue(inputs, memory.room._replace(unasked=unasked)).wait()
        right, end = [a + a, b + b, np.concatenate([a, a + a], axis=1)], 0
        for index, (tensor, expected) in enumerate(zip(tensors, right, strict=True)):
            if unasked >> index & 1:
                assert tensor == Tensor((), memory.room.address, 0)
            else:
                assert (tensor.address - memory.room.address, tensor.shape) == (end, expected.shape)
                assert array(tensor, expected.dtype).tolist() == expected.tolist()
                memory.bytes[end : end + tensor.nbytes] = UNTOUCHED
                end = align(end + tensor.nbytes)
        assert (memory.bytes == UNTOUCHED).all()


def test_what_is_staged_has_only_the_outputs_that_are_asked_for(bench: Bench) -> None:
    executor = bench.bind(SEVERAL, TWO)
    a, b = rows(2), np.arange(2)
    left_out, more, _ = executor.enqueue([Tensor.of(a), Tensor.of(b)], Room(unasked=0b101)).wait()
    assert (left_out.shape, left_out.nbytes, array(more, np.int64).tolist()) == ((), 0, (b + b).tolist())


def test_outputs_alone_are_staged_with_a_record_too(bench: Bench, executor: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "greenlane.engines")
    (given,), memory = bench.pinned(rows(2)), Memory(4096)
    for room in (memory.room, NO_ROOM):
        (output,) = executor.enqueue([given], room).wait()
        assert array(output).tolist() == affine(rows(2)).tolist()
    assert len(caplog.messages) == 1
    assert (memory.bytes == 0xEE).all()


def test_staging_that_cannot_be_allocated_fails_one_inference(bench: Bench, executor: Any) -> None:
    """F38."""
    bench.gpu.fail("LegacyPinnedMemoryResource.allocate")
    with pytest.raises(ExecutionFailed, match=r"running affine1\.plan: CUDA_ERROR_OUT_OF_MEMORY"):
        run(executor, rows(2))
    for seed in range(LENGTH + 1):
        assert_right(executor, rows(2, seed))


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


# Shapes.


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((9, 3), "dimension 0 of shape [9, 3] is 9; the engine was built for 0 to 8"),
        ((2, 4), "dimension 1 of shape [2, 4] is 4; expected 3"),
        ((6,), "shape [6] has 1 dimension; expected 2, as in [-1, 3]"),
    ],
)
def test_a_shape_outside_the_profile_is_refused_before_waiting(
    bench: Bench, executor: Any, shape: tuple[int, ...], why: str
) -> None:
    """F24, F25: nothing is enqueued."""
    with pytest.raises(TensorMismatch) as caught:
        executor.engine.signature.check([shape])
    assert str(caught.value) == f"input 'x': {why}"


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([], "0 tensors given, but the model's inputs are 1: x FP32[-1, 3]"),
        ([Tensor.of(rows(1)), Tensor.of(rows(1))], "2 tensors given, but the model's inputs are 1: x FP32[-1, 3]"),
        ([Tensor.of(np.zeros((2, 3), np.float64))], "input 'x': 48 bytes for shape [2, 3] of FP32; expected 24"),
        ([Tensor((2, 3), 4096, 12)], "input 'x': 12 bytes for shape [2, 3] of FP32; expected 24"),
    ],
)
def test_wrong_tensors_are_refused_before_anything_is_submitted(
    bench: Bench, executor: Any, tensors: list[Tensor], why: str
) -> None:
    """F26, F27."""
    before = repr(executor)
    with pytest.raises(TensorMismatch) as caught:
        executor.enqueue(tensors)
    assert str(caught.value) == why
    assert repr(executor) == before, "no run"
    assert_right(executor, rows(2))


def test_a_shape_refused_for_its_second_input_leaves_the_context_unchanged(bench: Bench) -> None:
    bench.gpu.capturable = False
    executor = bench.bind(SEVERAL, TWO)
    bench.gpu.fail("IExecutionContext.set_input_shape", 2)
    with pytest.raises(ExecutionFailed, match=r"input 'b' of shape \[3\]: .*as scripted"):
        run(executor, rows(3), np.arange(3))
    a, b = rows(2), np.arange(2)
    tensors = executor.enqueue([Tensor.of(a), Tensor.of(b)]).wait()
    assert array(tensors[0]).tolist() == (a + a).tolist()


def test_a_new_shape_is_captured_while_earlier_work_is_in_flight(bench: Bench, executor: Any) -> None:
    """F13: although no caller waited for them."""
    before = executor.enqueue([Tensor.of(rows(2))])
    works = [executor.enqueue([Tensor.of(rows(3, seed))]) for seed in range(4)]
    assert "2 captures" in repr(executor)
    assert [array(work.wait()[0]).tolist() for work in works] == [affine(rows(3, seed)).tolist() for seed in range(4)]
    assert array(before.wait()[0]).tolist() == affine(rows(2)).tolist()


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("IExecutionContext.set_input_shape", r"input 'x' of shape \[3, 3\]: .*as scripted"),
        ("IExecutionContext.infer_shapes", r"running affine1\.plan: infer_shapes: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_what_the_library_refuses_fails_one_inference(bench: Bench, executor: Any, call: str, why: str) -> None:
    bench.gpu.fail(call)
    with pytest.raises(ExecutionFailed, match=why):
        run(executor, rows(3))
    for count in (3, 3, 2, 8):
        assert_right(executor, rows(count))


def test_tensors_without_a_shape_are_named(bench: Bench, executor: Any) -> None:
    """F30."""
    bench.gpu.unresolved = ["x", "hint"]
    with pytest.raises(ExecutionFailed, match="no shape is known for x, hint"):
        run(executor, rows(3))
    bench.gpu.unresolved = []
    assert_right(executor, rows(3))
