"""F02: engines bound to a stream that the caller made, of a green context of theirs or of none."""

from collections.abc import Iterator
from typing import Any

import pytest

from engines import ExecutionFailed, Tensor, on_stream
from partitions import PartitionError
from tests.engines.simulated import Bench, affine, assert_right, never_captured, rows
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
def test_f02_all_of_an_inference_is_on_the_stream_that_was_adopted(
    bench: Bench, request: pytest.FixtureRequest, whose: str, capturable: bool
) -> None:
    bench.gpu.capturable = capturable
    stream: Stream = request.getfixturevalue(whose)
    home = bench.partition.stream._stream
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


def test_f02_a_kernel_on_it_runs_on_its_sms_and_it_describes_itself(bench: Bench, theirs: Stream, plain: Stream) -> None:
    partition = bench.device.adopt(theirs.handle)
    assert partition.locate() == frozenset(range(100, 116))
    assert repr(partition) == f"<AdoptedPartition, stream {theirs.handle:#x} of a green context, 16 SMs>"
    assert "with all of the device, 132 SMs" in repr(bench.device.adopt(plain.handle))
    partition.close()
    assert repr(partition).endswith(", closed>")
    with pytest.raises(PartitionError, match="cannot take another thread"):
        partition.attach()


def test_f02_an_executor_moves_to_it_and_back(bench: Bench, theirs: Stream) -> None:
    executor, partition = bench.bind(), bench.device.adopt(theirs.handle)
    moved = executor.rebind(partition)
    executor.close()
    assert_right(moved, rows(2))
    back = moved.rebind(bench.partition)
    moved.close()
    assert_right(back, rows(2))
    back.close()
    partition.close()


def test_f02_what_is_not_ready_is_prepared_there_too(bench: Bench, plain: Stream) -> None:
    partition = bench.device.adopt(plain.handle)
    executor = bench.load(bench.plan()).bind(partition)
    executor.preparing([(5, 3)]).result(30)
    assert_right(executor, rows(5))
    with on_stream(plain.handle):
        assert_right(executor, rows(5, 1))
    executor.close()
    executor.engine.close()
    partition.close()


def test_it_takes_objects_that_say_their_handle(bench: Bench, theirs: Stream) -> None:
    class Object:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, theirs.handle

    assert bench.device.adopt(Object()).handle == theirs.handle


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_a_default_stream_is_not_adopted(bench: Bench, handle: int) -> None:
    with pytest.raises(PartitionError, match=r"the .* stream cannot be adopted: it is everybody's"):
        bench.device.adopt(handle)


@pytest.mark.parametrize("stream", [None, "0", -1, True])
def test_what_is_no_stream_is_not_adopted(bench: Bench, stream: object) -> None:
    with pytest.raises(TypeError, match="is no stream; expected its handle as an integer"):
        bench.device.adopt(stream)


def test_streams_of_another_device_or_context_or_in_a_capture_are_refused(bench: Bench, plain: Stream) -> None:
    for device, why in ((1, "is of device 1, not of device 0"), (0, "neither green nor the primary one")):
        bench.gpu.ordinary.append(Context((0,), 0x200 + device, green=False, device=device))
        stream = bench.gpu.create_stream(bench.gpu.ordinary[-1])
        with pytest.raises(PartitionError, match=why):
            bench.device.adopt(stream.handle)
    bench.gpu.begin_capture(plain, thread_local=False)
    with pytest.raises(PartitionError, match="is being captured; end the capture first"):
        bench.device.adopt(plain.handle)
    bench.gpu.end_capture(plain)


def test_f64_an_inference_inside_a_caller_s_capture_is_refused_with_the_reason(bench: Bench, plain: Stream) -> None:
    """On an adopted stream too, where no guard says that it is the caller's."""
    partition = bench.device.adopt(plain.handle)
    executor: Any = bench.load(bench.plan()).bind(partition)
    assert_right(executor, rows(2))
    bench.gpu.begin_capture(plain, thread_local=False)
    with pytest.raises(ExecutionFailed, match="is being captured, and an inference cannot be part of another graph"):
        executor.enqueue([Tensor.of(rows(2))])
    assert not bench.gpu.end_capture(plain).operations
    plain.capture = bench.gpu.here.capture = None
    assert_right(executor, rows(2, 1))
    executor.close()
    executor.engine.close()
    never_captured(bench).close()
