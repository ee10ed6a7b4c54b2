"""The simulated library where the real one's documents say what it answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.simulated import AFFINE, ROWS, Bench, opened
from tests.engines.small import model
from tests.engines.tensors import Array

from .plans import Ranges, make_plan
from .tensorrt import IOutputAllocator

NONZERO = "nonzero (float[n, 3] x) => (int64[2, found] y) { y = NonZero(x) }"
DISTINCT = "distinct (float[n] x) => (float[m] y) { y = Unique(x) }"
NMS = """nms (float[1, n, 4] boxes, float[1, 1, n] scores) => (int64[found, 3] chosen)
<int64 most = {10}, float overlap = {0.5}, float least = {0.1}>
{ chosen = NonMaxSuppression(boxes, scores, most, overlap, least) }"""
LINE: Ranges = {"x": [(1,), (4,), (9,)]}
BOXES: Ranges = {"boxes": [(1, 1, 4), (1, 4, 4), (1, 8, 4)], "scores": [(1, 1, 1), (1, 1, 4), (1, 1, 8)]}


class Allocator(IOutputAllocator):
    """Gives memory of a bench for an output, `most` bytes at most, and remembers what it was asked and told."""

    def __init__(self, bench: Bench, most: int = 4096) -> None:
        IOutputAllocator.__init__(self)
        self._bench = bench
        self._most = most
        self.asked: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.memory: Any = None

    def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
        self.asked.append(size)
        self.memory = self._bench.memory(self._most)
        return int(self.memory.room.address) if size <= self._most else 0

    def notify_shape(self, name: str, shape: Any) -> None:
        self.shapes.append(tuple(shape))

    def numbers(self, dtype: Any) -> Array:
        """What lies in the memory."""
        shape, itemsize = self.shapes[-1], np.dtype(dtype).itemsize
        return np.array(self.memory.bytes[: int(np.prod(shape)) * itemsize]).view(dtype).reshape(shape)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as bench:
        yield bench
        bench.close()


def context(bench: Bench, text: str, ranges: Ranges, **facts: Any) -> Any:
    """An execution context of a model, without anything of ours around it."""
    bench.device.make_current()
    return bench.load(bench.plan(text, ranges, **facts)).plan.create_execution_context()


def put(bench: Bench, context: Any, **arrays: Array) -> None:
    """Shapes and addresses of inputs."""
    for name, array in arrays.items():
        (tensor,) = bench.pinned(array)
        assert context.set_input_shape(name, array.shape)
        assert context.set_tensor_address(name, tensor.address)


def execute(bench: Bench, context: Any) -> bool:
    done = context.execute_async_v3(bench.partition.handle)
    bench.partition.stream.sync()
    return bool(done)


def test_the_most_bytes_of_an_output_are_unknown_only_while_the_shapes_are(bench: Bench) -> None:
    one = context(bench, AFFINE, ROWS)
    assert one.get_max_output_size("y") == -1
    one.set_input_shape("x", (5, 3))
    assert one.get_max_output_size("y") == 60
    assert one.get_max_output_size("x") == one.get_max_output_size("absent") == -1
    other = bench.load(bench.plan()).plan
    first, second = other.create_execution_context(), other.create_execution_context()
    assert [each.active_optimization_profile for each in (first, second)] == [0, -1]
    assert second.get_max_output_size("y") == -1


@pytest.mark.parametrize(
    ("text", "ranges", "shapes", "most", "shape"),
    [
        (NONZERO, ROWS, {"x": (4, 3)}, 2 * 12 * 8, (2, -1)),
        (DISTINCT, LINE, {"x": (7,)}, 7 * 4, (-1,)),
    ],
)
def test_a_size_that_depends_on_data_has_an_upper_bound_and_a_shape_with_a_gap(
    bench: Bench, text: str, ranges: Ranges, shapes: dict[str, tuple[int, ...]], most: int, shape: tuple[int, ...]
) -> None:
    """The binding says: the upper bound of the size in bytes; -1 only if the profile or shapes are not set."""
    one = context(bench, text, ranges)
    for name, each in shapes.items():
        one.set_input_shape(name, each)
    assert one.infer_shapes() == []
    assert one.get_max_output_size("y") == most
    assert tuple(one.get_tensor_shape("y")) == shape


def test_an_allocator_is_asked_for_memory_and_told_the_shape_before_the_call_returns(bench: Bench) -> None:
    one, allocator = context(bench, NONZERO, ROWS), Allocator(bench)
    assert one.set_output_allocator("y", allocator)
    assert one.get_output_allocator("y") is allocator
    data = np.array([[0, 1, 0], [2, 0, 3]], np.float32)
    put(bench, one, x=data)
    assert one.execute_async_v3(bench.partition.handle)
    assert (allocator.asked, allocator.shapes) == ([48], [(2, 3)])
    bench.partition.stream.sync()
    assert allocator.numbers(np.int64).tolist() == np.array(np.nonzero(data)).tolist()
    assert tuple(one.get_tensor_shape("y")) == (2, -1)


def test_an_output_that_turns_out_empty_is_asked_for_with_a_byte(bench: Bench) -> None:
    one, allocator = context(bench, NONZERO, ROWS), Allocator(bench)
    one.set_output_allocator("y", allocator)
    put(bench, one, x=np.zeros((2, 3), np.float32))
    assert execute(bench, one)
    assert (allocator.asked, allocator.shapes) == ([1], [(2, 0)])


def test_boxes_that_are_left_over_are_those_of_the_data(bench: Bench) -> None:
    one, allocator = context(bench, NMS, BOXES, bounds={"chosen": 8 * 3 * 8}), Allocator(bench)
    one.set_output_allocator("chosen", allocator)
    boxes = np.array([[[0, 0, 1, 1], [0, 0, 1, 0.9], [5, 5, 6, 6], [8, 8, 9, 9]]], np.float32)
    put(bench, one, boxes=boxes, scores=np.array([[[0.9, 0.8, 0.7, 0.05]]], np.float32))
    assert one.get_max_output_size("chosen") == 192
    assert execute(bench, one)
    assert allocator.numbers(np.int64).tolist() == [[0, 0, 0], [0, 0, 2]]


def test_an_allocator_that_gives_nothing_or_raises_refuses_the_run(bench: Bench) -> None:
    one = context(bench, NONZERO, ROWS)
    put(bench, one, x=np.ones((8, 3), np.float32))
    one.set_output_allocator("y", Allocator(bench, most=8))
    assert not execute(bench, one)
    broken = Allocator(bench)
    broken._bench = None  # type: ignore[assignment]
    one.set_output_allocator("y", broken)
    assert not execute(bench, one)


def test_an_allocator_may_have_any_output_and_be_taken_back(bench: Bench) -> None:
    one, allocator = context(bench, AFFINE, ROWS), Allocator(bench)
    put(bench, one, x=np.ones((2, 3), np.float32))
    one.set_output_allocator("y", allocator)
    assert execute(bench, one)
    assert allocator.numbers(np.float32).tolist() == [[-1, -1, -1]] * 2
    one.set_output_allocator("y", None)
    assert one.get_output_allocator("y") is None
    assert not execute(bench, one)
    assert not one.set_output_allocator("x", allocator)


def test_an_allocator_whose_base_was_not_made_is_refused(bench: Bench) -> None:
    class Unmade(IOutputAllocator):
        def __init__(self) -> None:
            """As is forgotten easily."""

    with pytest.raises(TypeError, match="__init__"):
        context(bench, AFFINE, ROWS).set_output_allocator("y", Unmade())


def test_what_waits_for_its_sizes_spoils_a_capture(bench: Bench) -> None:
    one, allocator = context(bench, NONZERO, ROWS), Allocator(bench)
    one.set_output_allocator("y", allocator)
    put(bench, one, x=np.ones((2, 3), np.float32))
    assert execute(bench, one)
    bench.gpu.begin_capture(bench.partition.stream._stream, thread_local=True)
    assert not one.execute_async_v3(bench.partition.handle)
    bench.partition.stream._stream.capture = bench.gpu.here.capture = None
    assert len(allocator.asked) == 1


def test_an_output_that_is_an_input_s_alias_lies_where_that_does(bench: Bench) -> None:
    bench.device.make_current()
    path = bench.folder / "aliased.plan"
    path.write_bytes(make_plan(model(AFFINE), ROWS, aliases={"y": "x"}))
    plan = bench.tensorrt.find_tensorrt().deserialize(path.read_bytes(), "aliased.plan")
    assert plan.get_aliased_input_tensor("y") == "x"
    one = plan.create_execution_context()
    put(bench, one, x=np.ones((2, 3), np.float32))
    one.set_tensor_address("y", bench.room().address)
    assert not execute(bench, one)
    one.set_tensor_address("y", one.get_tensor_address("x"))
    assert execute(bench, one)
