"""F02, F64: engines bound to a stream that the caller made, of a green context of theirs or of none, captured or not."""

import gc
import importlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from engines import ExecutionFailed, Room, Tensor, TensorMismatch, on_stream
from engines.base import NO_ROOM
from partitions import PartitionError
from tests.engines.simulated import Bench, affine, assert_right, rows
from tests.engines.tensors import array
from tests.simulation.gpu import Context
from tests.simulation.streams import Stream


@pytest.fixture
def theirs(bench: Bench) -> Iterator[Stream]:
    """Of a green context of 16 SMs."""
    context = bench.gpu.create_context(tuple(range(100, 116)))
    stream = bench.gpu.create_stream(context)
    yield stream
    for each in context.streams:
        if not each.closed:
            bench.gpu.destroy_stream(each)
    bench.gpu.destroy_context(context)


@pytest.fixture
def plain(bench: Bench) -> Stream:
    return bench.gpu.create_stream(bench.gpu.primary)


@pytest.mark.parametrize("whose", ["theirs", "plain"])
@pytest.mark.parametrize("capturable", [True, False])
def test_f02_an_inference_runs_entirely_on_the_adopted_stream(
    bench: Bench, request: pytest.FixtureRequest, whose: str, capturable: bool
) -> None:
    bench.gpu.capturable = capturable
    stream: Stream = request.getfixturevalue(whose)
    home = bench.partition.stream.simulated
    partition = bench.device.adopt(stream.handle)
    assert (partition.granules, partition.size) == ((), 16 if whose == "theirs" else 132)
    executor = bench.load(bench.plan()).bind(partition)
    for turn in range(4):
        before = stream.submitted
        work = executor.enqueue([Tensor.of(rows(2 + turn % 2, turn))])
        assert stream.submitted > before
        assert not home.pending
        assert array(work.wait()[0]).tolist() == affine(rows(2 + turn % 2, turn)).tolist()
    assert all(graph.context is stream.context for graph in bench.gpu.graphs)
    executor.close()
    executor.engine.close()
    partition.close()
    partition.close()
    assert not stream.closed
    assert not stream.context.closed


def test_f02_kernels_on_an_adopted_stream_run_on_its_sms(bench: Bench, theirs: Stream, plain: Stream) -> None:
    partition = bench.device.adopt(theirs.handle)
    assert partition.locate() == frozenset(range(100, 116))
    assert repr(partition) == f"<AdoptedPartition, stream {theirs.handle:#x} of a green context, 16 SMs>"
    assert "with all of the device, 132 SMs" in repr(bench.device.adopt(plain.handle))
    partition.close()
    assert repr(partition).endswith(", closed>")
    with pytest.raises(PartitionError, match="cannot take another thread"):
        partition.attach()


def test_f02_an_executor_moves_to_an_adopted_stream_and_back(bench: Bench, theirs: Stream) -> None:
    executor, partition = bench.bind(), bench.device.adopt(theirs.handle)
    moved = executor.rebind(partition)
    executor.close()
    assert_right(moved, rows(2))
    back = moved.rebind(bench.partition)
    moved.close()
    assert_right(back, rows(2))
    back.close()
    partition.close()


def test_f02_new_shapes_are_prepared_on_an_adopted_stream_too(bench: Bench, plain: Stream) -> None:
    partition = bench.device.adopt(plain.handle)
    executor = bench.load(bench.plan()).bind(partition)
    executor.preparing([(5, 3)]).result(30)
    assert_right(executor, rows(5))
    with on_stream(plain.handle):
        assert_right(executor, rows(5, 1))
    executor.close()
    executor.engine.close()
    partition.close()


@pytest.mark.parametrize("settings", [{}, {"graphs": "off"}, {"copies": "engine"}])
def test_f02_an_engine_outlives_an_adopted_stream_that_it_was_bound_to(
    bench: Bench, theirs: Stream, settings: dict[str, Any]
) -> None:
    """Its memory was allocated on that stream: a driver that is asked to free it there crashes the process."""
    empty = bench.holdings()
    engine, partition = bench.load(bench.plan(), **settings), bench.device.adopt(theirs.handle)
    executor = engine.bind(partition)
    assert_right(executor, rows(2))
    if preparing := executor.preparing([(5, 3)]):
        preparing.result(30)
    assert_right(executor, rows(5))
    executor.close()
    partition.close()
    bench.gpu.destroy_stream(theirs)
    with closing(engine.bind(bench.partition)) as again:
        assert_right(again, rows(3))
        assert_right(again, rows(5))
    bench.close_engines()
    assert bench.holdings() == empty


def test_f02_an_executor_that_moved_from_an_adopted_stream_outlives_it(bench: Bench, theirs: Stream) -> None:
    partition = bench.device.adopt(theirs.handle)
    executor = bench.load(bench.plan(), graphs="off").bind(partition)
    assert_right(executor, rows(2))
    moved = executor.rebind(bench.partition)
    executor.close()
    partition.close()
    bench.gpu.destroy_stream(theirs)
    assert_right(moved, rows(3))
    moved.close()


def test_objects_with_a_stream_handle_are_adopted(bench: Bench, theirs: Stream) -> None:
    class Object:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, theirs.handle

    assert bench.device.adopt(Object()).handle == theirs.handle


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_a_default_stream_is_not_adopted(bench: Bench, handle: int) -> None:
    with pytest.raises(PartitionError, match=r"the .* stream cannot be adopted, as all code shares it"):
        bench.device.adopt(handle)


@pytest.mark.parametrize("stream", [None, "0", -1, True])
def test_objects_that_are_no_stream_are_not_adopted(bench: Bench, stream: object) -> None:
    with pytest.raises(TypeError, match="is no stream; expected its handle as an integer"):
        bench.device.adopt(stream)


def test_streams_of_another_device_or_context_or_in_a_capture_are_refused(bench: Bench, plain: Stream) -> None:
    for device, why in ((0, "is of device 0, not of device 1"), (1, "neither green nor the primary one")):
        bench.gpu.ordinary.append(Context((0,), 0x200 + device, green=False, device=device))
        stream = bench.gpu.create_stream(bench.gpu.ordinary[-1])
        with pytest.raises(PartitionError, match=why):
            bench.device.adopt(stream.handle)
    bench.gpu.begin_capture(plain, thread_local=False)
    with pytest.raises(PartitionError, match="is being captured; end the capture first"):
        bench.device.adopt(plain.handle)
    bench.gpu.end_capture(plain)


class Adopted:
    """An executor on a stream of the caller's, with memory that the GPU reaches."""

    def __init__(self, bench: Bench, stream: Stream, **settings: Any) -> None:
        self.bench = bench
        self.stream = stream
        self.partition = bench.device.adopt(stream.handle)
        self.executor: Any = bench.load(bench.plan(), **settings).bind(self.partition)
        self.input, self.room = bench.memory(96), bench.memory(4096)

    def given(self, count: int) -> list[Tensor]:
        return [Tensor((count, 3), self.input.room.address, 12 * count)]

    def feed(self, data: Any) -> None:
        self.input.bytes[: data.nbytes] = np.frombuffer(data.tobytes(), np.uint8)

    @contextmanager
    def capturing(self) -> Iterator[list[Any]]:
        """Gives the graph of what was submitted in the block."""
        driver = importlib.import_module("cuda.bindings.driver")
        found: list[Any] = []
        driver.cuStreamBeginCapture(self.stream.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        yield found
        _, graph = driver.cuStreamEndCapture(self.stream.handle)
        found.append(graph)

    def close(self) -> None:
        self.executor.close()
        self.executor.engine.close()
        self.partition.close()


@pytest.fixture
def adopted(bench: Bench, plain: Stream) -> Adopted:
    return Adopted(bench, plain)


def test_f64_an_inference_is_part_of_a_graph_that_the_caller_captures(bench: Bench, adopted: Adopted) -> None:
    """The inference is captured call by call: no graph of ours is launched inside, and inferences outside of it keep their
    own tensors.
    """
    assert_right(adopted.executor, rows(3))
    log = len(bench.gpu.log)
    with adopted.capturing() as graphs:
        work = adopted.executor.enqueue(adopted.given(3), adopted.room.room)
        (output,) = work.wait()
    assert "cuGraphLaunch" not in bench.gpu.log[log:]
    (graph,) = graphs
    assert len(graph.operations) == 3
    assert (output.shape, output.address) == ((3, 3), adopted.room.room.address)
    for seed in range(4):
        adopted.feed(rows(3, seed))
        bench.gpu.launch_graph(graph, adopted.stream)
        adopted.stream.wait()
        assert array(output).tolist() == affine(rows(3, seed)).tolist()
        assert_right(adopted.executor, rows(1 + seed, seed))
    bench.gpu.destroy_graph(graph)
    adopted.close()


def test_f64_several_are_in_one_graph_one_after_another(bench: Bench, adopted: Adopted) -> None:
    """The second inference takes the first one's output."""
    for count in (2, 3):
        assert_right(adopted.executor, rows(count))
    with adopted.capturing() as graphs:
        (first,) = adopted.executor.enqueue(adopted.given(3), adopted.room.room).wait()
        room = Room(adopted.room.room.address + 1024, 1024)
        (second,) = adopted.executor.enqueue([Tensor((2, 3), first.address, 24)], room).wait()
    adopted.feed(rows(3))
    bench.gpu.launch_graph(graphs[0], adopted.stream)
    adopted.stream.wait()
    assert array(second).tolist() == affine(affine(rows(3)[:2])).tolist()
    bench.gpu.destroy_graph(graphs[0])
    adopted.close()


def test_f64_the_garbage_collector_does_not_run_while_an_inference_joins_a_capture(bench: Bench, adopted: Adopted) -> None:
    """It could free an engine, in the thread that captures, which invalidates the caller's capture."""
    assert_right(adopted.executor, rows(3))
    seen: list[bool] = []
    with adopted.capturing() as graphs:
        bench.gpu.meanwhile("IExecutionContext.execute_async_v3", lambda: seen.append(gc.isenabled()))
        adopted.executor.enqueue(adopted.given(3), adopted.room.room).wait()
        assert (seen, gc.isenabled()) == ([False], True)
    bench.gpu.destroy_graph(graphs[0])
    adopted.close()


def test_f64_an_inference_that_cannot_join_a_capture_does_not_change_it(bench: Bench, adopted: Adopted) -> None:
    assert_right(adopted.executor, rows(2))
    given, room = adopted.given(2), adopted.room.room
    wrong: list[tuple[list[Tensor], Room, type[Exception], str]] = [
        (adopted.given(5), room, ExecutionFailed, "run these shapes once before the capture"),
        ([Tensor.of(rows(2))], room, ExecutionFailed, "input 'x' is where the GPU cannot reach"),
        (given, NO_ROOM, ExecutionFailed, "the 24 bytes of its outputs would be where the GPU cannot reach"),
        (given, Room(room.address, 8), ExecutionFailed, "the 24 bytes of its outputs would be where the GPU cannot reach"),
        ([Tensor((9, 3), room.address, 108)], room, TensorMismatch, "dimension 0"),
        ([], room, TensorMismatch, "0 tensors given"),
    ]
    with adopted.capturing() as graphs:
        for tensors, where, kind, why in wrong:
            with pytest.raises(kind, match=why):
                adopted.executor.enqueue(tensors, where)
        adopted.executor.enqueue(given, room)
    assert len(graphs[0].operations) == 3
    bench.gpu.destroy_graph(graphs[0])
    assert_right(adopted.executor, rows(2, 1))
    adopted.close()


@pytest.mark.parametrize("settings", [{"graphs": "off"}, {"copies": "engine"}])
def test_f64_an_executor_without_captured_graphs_cannot_join_a_capture(
    bench: Bench, plain: Stream, settings: dict[str, Any]
) -> None:
    """Because its contexts use the library's own graphs, or have inferences in flight."""
    adopted = Adopted(bench, plain, **settings)
    assert_right(adopted.executor, rows(2))
    with (
        adopted.capturing() as graphs,
        pytest.raises(ExecutionFailed, match="cannot be part of a graph that is being captured"),
    ):
        adopted.executor.enqueue(adopted.given(2), adopted.room.room)
    assert not graphs[0].operations
    bench.gpu.destroy_graph(graphs[0])
    adopted.close()


def test_f64_a_captured_stream_that_the_engine_is_not_bound_to_is_refused(bench: Bench, plain: Stream) -> None:
    executor = bench.bind()
    bench.gpu.begin_capture(plain, thread_local=True)
    with on_stream(plain.handle), pytest.raises(ExecutionFailed, match=r"bind the engine to that stream \(CudaDevice.adopt\)"):
        executor.enqueue([Tensor.of(rows(2))])
    assert not bench.gpu.end_capture(plain).operations
    plain.capture = bench.gpu.here.capture = None
