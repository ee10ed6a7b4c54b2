"""Callers with memory on the GPU and streams of their own, on a simulated one. F numbers are those of the checklist of
promises that this project took over from others' work on the same problem: F01 to F10 and F34 to F38 are here.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Barrier, Event, Lock
from typing import Any

import numpy as np
import pytest

from engines import ExecutionFailed, Room, Tensor, on_stream
from engines.streams import selected
from engines.tensorrt.plan import LogOnce
from engines.verification.rows import run_on
from tests.contract import in_a_thread
from tests.engines.simulated import Bench, affine, opened
from tests.engines.tensors import Array, Memory, array, run
from tests.simulation.gpu import Context
from tests.simulation.streams import Operation, Stream

LOGGER = "greenlane.engines"
STAGED = "affine1.plan: inputs or outputs are staged through the host, as their memory is not pinned"
ELSEWHERE = 0x77
"""Some context that is not the device's primary one."""


class OnGpu:
    """An array on the GPU, as the library that owns it exports it; it lives as long as the GPU."""

    def __init__(self, bench: Bench, shape: tuple[int, ...], dtype: Any = np.float32) -> None:
        self._gpu = bench.gpu
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize
        self.address = bench.gpu.allocate(self.nbytes, bench.gpu.index)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "strides": None, "version": 3}

    def write(self, data: Array) -> None:
        """As the device does."""
        self._gpu.write(self.address, data.astype(self.dtype).tobytes())

    def read(self) -> Array:
        """As the device does."""
        return np.frombuffer(self._gpu.read(self.address, self.nbytes), self.dtype).reshape(self.shape)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as bench:
        yield bench


@pytest.fixture
def home(bench: Bench) -> Stream:
    """The partition's stream."""
    return bench.partition.stream.simulated


@pytest.fixture
def sibling(bench: Bench, home: Stream) -> Stream:
    """A caller's stream of the partition's green context."""
    return bench.gpu.create_stream(home.context)


@pytest.fixture
def plain(bench: Bench) -> Stream:
    """A caller's stream of the primary context."""
    return bench.gpu.create_stream(bench.gpu.primary)


def rows(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).random((count, 3), np.float32)


def submitted(*streams: Stream) -> list[int]:
    return [len(stream.pending) for stream in streams]


def enqueue(executor: Any, bench: Bench, data: Array) -> tuple[Any, OnGpu]:
    """An inference whose tensors are on the GPU: the work, and where the output will be."""
    given, taken = OnGpu(bench, data.shape), OnGpu(bench, data.shape)
    given.write(data)
    return executor.enqueue([Tensor.of(given)], Room.of(taken)), taken


def settled(executor: Any, bench: Bench, count: int = 2) -> None:
    """Capture this many rows as a graph, and wait until nothing is in flight."""
    for _ in range(3):
        enqueue(executor, bench, rows(count))[0].wait()
    bench.gpu.log.clear()


# F01 to F10: which stream.


def test_f01_without_a_selected_stream_work_runs_on_the_partition_s(
    bench: Bench, executor: Any, home: Stream, sibling: Stream, plain: Stream
) -> None:
    settled(executor, bench)
    work, taken = enqueue(executor, bench, rows(2, 1))
    assert submitted(sibling, plain) == [0, 0]
    assert home.pending
    work.wait()
    assert taken.read().tolist() == affine(rows(2, 1)).tolist()


@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("staged", [True, False])
def test_f02_an_inference_runs_entirely_on_the_caller_s_stream_of_the_same_green_context(
    bench: Bench, home: Stream, sibling: Stream, capturable: bool, staged: bool
) -> None:
    """Replayed, captured, or run for the first time: the partition's own stream gets only one event record and one wait."""
    bench.gpu.capturable = capturable
    executor = bench.bind()
    for turn in range(4):
        with on_stream(sibling.handle):
            work = executor.enqueue([Tensor.of(rows(3, turn))]) if staged else enqueue(executor, bench, rows(3, turn))[0]
        assert len(home.pending) <= 2
        assert len(sibling.pending) >= 2
        outputs = work.wait()
        if staged:
            assert array(outputs[0]).tolist() == affine(rows(3, turn)).tolist()
        home.wait()


def test_f02_work_for_another_stream_stays_on_the_partition_and_is_ordered_by_events(
    bench: Bench, executor: Any, home: Stream, plain: Stream
) -> None:
    """A graph of the partition's is refused elsewhere, and a stream on all SMs would undo the partition."""
    settled(executor, bench)
    with on_stream(plain.handle):
        enqueue(executor, bench, rows(2))
    ours = [call for call in bench.gpu.log if call.startswith(("cuEvent", "cuStreamWait", "cuGraph"))]
    assert ours == ["cuEventRecord", "cuStreamWaitEvent", "cuGraphLaunch", "cuEventRecord", "cuStreamWaitEvent"]
    assert submitted(plain) == [2]


@pytest.mark.parametrize("whose", ["plain", "sibling", "home", "null"])
@pytest.mark.parametrize("capturable", [True, False])
def test_f11_an_inference_is_ordered_after_earlier_and_before_later_work_of_the_stream(
    bench: Bench, request: pytest.FixtureRequest, whose: str, capturable: bool
) -> None:
    """No host thread waits in between: enqueue returns before the input is written."""
    bench.gpu.capturable = capturable
    executor = bench.bind()
    stream: Stream = bench.gpu.find_stream(0) if whose == "null" else request.getfixturevalue(whose)
    settled(executor, bench)
    given, taken, seen = OnGpu(bench, (2, 3)), OnGpu(bench, (2, 3)), []
    for turn in range(5):
        stream.put(Operation(partial(given.write, rows(2, turn))))
        with on_stream(stream.handle):
            executor.enqueue([Tensor.of(given)], Room.of(taken))
        stream.put(Operation(lambda: seen.append(taken.read().tolist())))
    assert seen == []
    stream.wait()
    assert seen == [affine(rows(2, turn)).tolist() for turn in range(5)]


def test_f03_a_selected_stream_ends_with_its_block_also_when_that_fails() -> None:
    with on_stream(7):
        assert selected() == 7
    assert selected() is None
    with pytest.raises(KeyError), on_stream(7):
        raise KeyError
    assert selected() is None


def test_f03_the_partition_s_own_stream_is_back_after_a_failure(
    bench: Bench, executor: Any, home: Stream, sibling: Stream
) -> None:
    settled(executor, bench)
    bench.gpu.fail("cuGraphLaunch")
    with pytest.raises(ExecutionFailed), on_stream(sibling.handle):
        enqueue(executor, bench, rows(2))
    home.wait()
    enqueue(executor, bench, rows(2))
    assert submitted(sibling) == [0]
    assert home.pending


def test_f04_selections_of_streams_nest_and_none_selects_no_stream() -> None:
    seen = []
    with on_stream(1):
        with on_stream(2):
            with on_stream(None):
                seen.append(selected())
            seen.append(selected())
        seen.append(selected())
    assert seen == [None, 2, 1]


def test_f05_selecting_the_null_stream_is_not_the_same_as_selecting_none(bench: Bench, executor: Any) -> None:
    settled(executor, bench)
    null = bench.gpu.find_stream(0)
    enqueue(executor, bench, rows(2))
    assert submitted(null) == [0]
    with on_stream(0):
        assert selected() == 0
        enqueue(executor, bench, rows(2))
    assert submitted(null) == [2]


def test_f06_each_thread_selects_its_own_stream() -> None:
    with on_stream(7):
        _, other = in_a_thread(selected)
        assert other.result(30) is None
        assert selected() == 7


def test_f06_each_asyncio_task_selects_its_own_stream(bench: Bench, executor: Any, home: Stream, sibling: Stream) -> None:
    settled(executor, bench)
    seen: list[tuple[int | None, bool]] = []

    async def task(stream: int | None) -> None:
        with on_stream(stream):
            for _ in range(3):
                await asyncio.sleep(0)
                work, _ = enqueue(executor, bench, rows(2))
                seen.append((selected(), bool(sibling.pending)))
                work.wait()
                sibling.wait()

    async def both() -> None:
        await asyncio.gather(task(sibling.handle), task(None))

    asyncio.run(both())
    assert seen[:4] == [(sibling.handle, True), (None, False)] * 2


def test_f07_a_stream_of_another_device_is_refused_before_anything_is_enqueued(
    bench: Bench, executor: Any, home: Stream
) -> None:
    settled(executor, bench)
    bench.gpu.ordinary.append(Context((0,), 0x200, green=False, device=0))
    foreign = bench.gpu.create_stream(bench.gpu.ordinary[-1])
    why = f"stream {foreign.handle:#x} is of device 0, but the engine is bound to device 1; select a stream of device 1"
    with pytest.raises(ExecutionFailed, match=why), on_stream(foreign.handle):
        enqueue(executor, bench, rows(2))
    assert submitted(home, foreign) == [0, 0]
    work, taken = enqueue(executor, bench, rows(2))
    work.wait()
    assert taken.read().tolist() == affine(rows(2)).tolist()


def test_f08_the_current_context_is_not_switched_if_it_is_the_one_needed(bench: Bench, executor: Any, plain: Stream) -> None:
    settled(executor, bench)
    with on_stream(plain.handle):
        enqueue(executor, bench, rows(2))
    assert "cuCtxPushCurrent" not in bench.gpu.log


@pytest.mark.parametrize("failing", ["", "cuStreamGetDevice", "cuEventRecord", "cuGraphLaunch", "cuStreamWaitEvent"])
def test_f08_the_caller_s_context_is_current_again_after_success_and_failure(
    bench: Bench, executor: Any, plain: Stream, failing: str
) -> None:
    settled(executor, bench)
    given, taken = OnGpu(bench, (2, 3)), OnGpu(bench, (2, 3))
    given.write(rows(2))
    bench.gpu.here.pushed = [ELSEWHERE]
    if failing:
        bench.gpu.fail(failing)
    with pytest.raises(ExecutionFailed, match="as scripted") if failing else nullcontext(), on_stream(plain.handle):
        executor.enqueue([Tensor.of(given)], Room.of(taken))
    assert bench.gpu.here.pushed == [ELSEWHERE]
    assert bench.gpu.log.count("cuCtxPushCurrent") == bench.gpu.log.count("cuCtxPopCurrent") == 1
    bench.gpu.here.pushed = []


def test_f09_the_green_context_need_not_be_current_for_work_to_stay_on_it(
    bench: Bench, executor: Any, home: Stream, plain: Stream
) -> None:
    """The selected stream decides, not the current context."""
    settled(executor, bench)
    assert bench.gpu.current() == bench.gpu.primary.handle
    for stream in (None, plain.handle, 0):
        with on_stream(stream):
            enqueue(executor, bench, rows(2))
        assert any(graph.in_flight for graph in bench.gpu.graphs)
        assert all(graph.context is home.context for graph in bench.gpu.graphs)
        plain.wait()
        home.wait()


@pytest.mark.parametrize(
    ("handle", "name"), [(2, "the per-thread default stream"), (0, "the NULL stream"), (1, "the legacy default stream")]
)
def test_f10_a_default_stream_with_another_current_context_is_refused(
    bench: Bench, executor: Any, handle: int, name: str
) -> None:
    settled(executor, bench)
    bench.gpu.here.pushed = [ELSEWHERE]
    why = rf"{name} was selected, but .* select a stream of a green context by its handle"
    with pytest.raises(ExecutionFailed, match=why), on_stream(handle):
        executor.enqueue([], Room())
    assert bench.gpu.here.pushed == [ELSEWHERE]
    bench.gpu.here.pushed = []


def test_a_stream_that_is_being_captured_is_refused(bench: Bench, executor: Any, plain: Stream) -> None:
    """The capture is not disturbed."""
    settled(executor, bench)
    bench.gpu.begin_capture(plain, thread_local=False)
    why = "is being captured, and the engine is bound to another one"
    with pytest.raises(ExecutionFailed, match=why), on_stream(plain.handle):
        enqueue(executor, bench, rows(2))
    assert not bench.gpu.end_capture(plain).operations


@pytest.mark.parametrize("capturable", [True, False])
def test_f14_one_executor_on_several_streams_is_ordered_and_never_at_once(
    bench: Bench, home: Stream, sibling: Stream, plain: Stream, capturable: bool
) -> None:
    """New shapes and known ones; the simulation objects to an execution context on two streams that are not in order."""
    bench.gpu.capturable = capturable
    executor = bench.bind()
    ended = []
    for turn, stream in enumerate([None, sibling.handle, plain.handle, home.handle, 0] * 3):
        with on_stream(stream):
            ended.append((turn, *enqueue(executor, bench, rows(2 + turn % 2, turn))))
    for turn, work, taken in reversed(ended):
        work.wait()
        assert taken.read().tolist() == affine(rows(2 + turn % 2, turn)).tolist()


def test_f15_an_executor_is_closed_after_a_caller_s_stream_was_destroyed(bench: Bench, sibling: Stream) -> None:
    executor = bench.bind()
    with on_stream(sibling.handle):
        enqueue(executor, bench, rows(2))[0].wait()
    sibling.wait()
    bench.gpu.destroy_stream(sibling)
    executor.close()
    bench.close()
    assert not bench.gpu.events


@pytest.mark.parametrize("make", [lambda handle: lambda: (0, handle), lambda handle: (0, handle)])
def test_a_stream_may_be_an_object_that_says_its_handle(make: Callable[[int], Any]) -> None:
    class Theirs:
        __cuda_stream__ = staticmethod(make(0x5EA)) if callable(make(0x5EA)) else make(0x5EA)

    with on_stream(Theirs()):
        assert selected() == 0x5EA


@pytest.mark.parametrize("stream", [True, -1, "0", 1.5])
def test_objects_that_are_no_stream_are_refused_with_what_is_expected(stream: object) -> None:
    with pytest.raises(TypeError, match="is no stream; expected its handle as an integer"), on_stream(stream):
        pass


# F34 to F38: staging through the host.


def test_f34_gpu_memory_is_not_staged_and_nothing_is_logged(
    bench: Bench, executor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """For five shapes, which are run, captured and replayed."""
    caplog.set_level(logging.INFO, LOGGER)
    for turn in range(15):
        work, taken = enqueue(executor, bench, rows(1 + turn % 5, turn))
        (output,) = work.wait()
        assert output.address == taken.address
        assert taken.read().tolist() == affine(rows(1 + turn % 5, turn)).tolist()
    assert [text for text in caplog.messages if ": not verified: " not in text] == [], "a plan has nothing to compare with"


def test_f34_f35_each_engine_logs_staging_once_across_all_its_partitions(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    engine = bench.load(bench.plan())
    first, second = engine.bind(bench.partition), engine.bind(bench.partition)
    other = bench.bind()
    caplog.set_level(logging.INFO, LOGGER)
    for executor in (first, second, first, other, other, second):
        run(executor, rows(2))
    assert caplog.messages == [STAGED, STAGED.replace("affine1", "affine2")]
    for executor in (first, second, other):
        executor.close()


def test_f36_threads_that_stage_at_once_log_it_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    log_once, together = LogOnce(), Barrier(8)

    def stage() -> None:
        together.wait(30)
        log_once(logging.INFO, STAGED)

    for _, ended in [in_a_thread(stage) for _ in range(8)]:
        ended.result(30)
    assert caplog.messages == [STAGED]


class WatchedLock:
    """Sets `contended` when a thread has to wait for the lock."""

    def __init__(self, contended: Event) -> None:
        self._lock = Lock()
        self._contended = contended

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._contended.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class RacedSet(set[str]):
    """After a thread has looked up a message, start another one that logs the same, and wait until it is done or waits for
    the lock.
    """

    def __init__(self, log_once: LogOnce, met: Event) -> None:
        super().__init__()
        self._log_once = log_once
        self._met = met
        self.second: Future[None] | None = None

    def __contains__(self, text: object) -> bool:
        found = super().__contains__(text)
        if not self.second:
            self.second = Future()  # The second thread's lookup starts no third thread.
            _, self.second = in_a_thread(lambda: self._log_once(logging.INFO, STAGED))
            self.second.add_done_callback(lambda _: self._met.set())
            assert self._met.wait(30)
        return found


def test_f36_a_second_thread_between_lookup_and_log_does_not_log_staging_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    log_once, met = LogOnce(), Event()
    log_once._logged = raced = RacedSet(log_once, met)
    log_once._lock = WatchedLock(met)  # type: ignore[assignment]
    log_once(logging.INFO, STAGED)
    assert raced.second
    raced.second.result(30)
    assert caplog.messages == [STAGED]


def test_f37_staging_is_decided_by_the_pointer_of_each_inference(
    bench: Bench, executor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory on the GPU, pinned memory and other memory in turn, for one shape and so for one graph."""
    caplog.set_level(logging.INFO, LOGGER)
    settled(executor, bench)
    staged = bench.gpu.log.count
    for turn in range(2):
        enqueue(executor, bench, rows(2))[0].wait()
        executor.enqueue(bench.pinned(rows(2)), bench.room()).wait()
        assert (staged("LegacyPinnedMemoryResource.allocate"), caplog.messages) == (turn, [STAGED] * turn)
        assert run(executor, rows(2, 3))[0].tolist() == affine(rows(2, 3)).tolist()
        assert staged("LegacyPinnedMemoryResource.allocate") == turn + 1
    assert bench.gpu.log.count("cuGraphInstantiate") == 0


def test_an_inference_of_which_any_part_is_staged_counts_once_as_staged(bench: Bench, executor: Any) -> None:
    settled(executor, bench)
    ordinary, counts = [Tensor.of(rows(2))], []
    for inputs, room in (
        (bench.pinned(rows(2)), bench.room()),
        (ordinary, bench.room()),
        (bench.pinned(rows(2)), Room()),
        (ordinary, Room()),
        (ordinary, bench.room()),
    ):
        executor.enqueue(inputs, room).wait()
        counts.append(executor.describe()["counts"]["staged"])
    assert counts == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("context", [0, 0x200], ids=["of its pool", "of a context"])
def test_f37_memory_of_another_gpu_is_refused_and_not_staged(bench: Bench, executor: Any, home: Stream, context: int) -> None:
    settled(executor, bench)
    bench.gpu.ordinary.append(Context((0,), 0x200, green=False, device=0))
    given, taken = OnGpu(bench, (2, 3)), OnGpu(bench, (2, 3))
    inputs, room = [Tensor.of(given)], Room.of(taken)
    for lost in (given, taken):
        region = bench.gpu.allocated[lost.address]
        region.device, region.context = 0, context
        why = f"memory at {lost.address:#x} is device 0's, but the engine is bound to device 1; copy it there first"
        with pytest.raises(ExecutionFailed, match=why):
            executor.enqueue(inputs, room)
        assert submitted(home) == [0]
        region.device, region.context = bench.gpu.index, 0
    given.write(rows(2))
    executor.enqueue(inputs, room).wait()
    assert taken.read().tolist() == affine(rows(2)).tolist()


def test_f37_memory_of_its_own_gpu_is_used_in_place_whatever_it_was_allocated_of(bench: Bench, executor: Any) -> None:
    """Of the GPU's pool, of a pool that the driver says nothing of, of the primary context, or of a green one."""
    settled(executor, bench)
    taken, green = OnGpu(bench, (2, 3)), bench.gpu.contexts[0].handle
    for device, context in (
        (bench.gpu.index, 0),
        (77, 0),
        (bench.gpu.index, bench.gpu.primary.handle),
        (bench.gpu.index, green),
    ):
        given = OnGpu(bench, (2, 3))
        bench.gpu.allocated[given.address].device, bench.gpu.allocated[given.address].context = device, context
        given.write(rows(2, context))
        executor.enqueue([Tensor.of(given)], Room.of(taken)).wait()
        assert taken.read().tolist() == affine(rows(2, context)).tolist()
        bench.gpu.allocated[given.address].device, bench.gpu.allocated[given.address].context = bench.gpu.index, 0
    assert executor.describe()["counts"]["staged"] == 0


def test_f37_of_what_the_process_allocated_itself_the_driver_is_not_asked(bench: Bench, executor: Any) -> None:
    """The memory that it is warmed up and verified with, and what it has pinned."""
    executor.enqueue(bench.pinned(rows(5)), bench.room()).wait()
    assert run_on(executor, [rows(2)])[0].tolist() == affine(rows(2)).tolist()
    assert "cuPointerGetAttributes" not in bench.gpu.log
    run(executor, rows(5))
    assert "cuPointerGetAttributes" in bench.gpu.log


@pytest.mark.parametrize("count", [2, 7])
def test_f38_staging_that_cannot_be_allocated_fails_one_inference(
    bench: Bench, executor: Any, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """The next ones are run, captured and replayed as ever."""
    settled(executor, bench)
    bench.gpu.fail("LegacyPinnedMemoryResource.allocate")
    with pytest.raises(ExecutionFailed, match=r"running affine1\.plan: CUDA_ERROR_OUT_OF_MEMORY"):
        run(executor, rows(count))
    launched = bench.gpu.log.count("cuGraphLaunch")
    for seed in range(3):
        assert run(executor, rows(count, seed))[0].tolist() == affine(rows(count, seed)).tolist()
    assert bench.gpu.log.count("cuGraphLaunch") > launched
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_f38_staging_is_kept_and_never_grows(bench: Bench, executor: Any) -> None:
    """A slot of the ring has room for the largest shapes from its first use on."""
    room = Memory(4096).room
    for seed in range(16):
        executor.enqueue([Tensor.of(rows(1, seed))], room).wait()
    held = bench.holdings()
    for seed in range(32):
        executor.enqueue([Tensor.of(rows(8, seed))], room).wait()
    assert bench.holdings()[0] == held[0]
