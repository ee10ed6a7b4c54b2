"""What other threads do on a partition while one of them captures a graph there, on a simulated GPU."""

import gc
import importlib
from collections.abc import Callable
from threading import Thread, get_ident
from typing import Any

import pytest

from engines import Tensor
from engines.cuda.locks import EXECUTION_LOCK
from partitions import PartitionError
from tests.engines.simulated import Bench, assert_right, rows
from tests.engines.tensors import Memory
from tests.simulation import Misuse
from tests.simulation.errors import CUDAError
from tests.simulation.tensorrt_config import COMPILING

MOMENTS = ["IExecutionContext.execute_async_v3", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy"]
"""Calls of a capture."""
RECORDING = MOMENTS[:2]
"""Those of CAPTURE that are made while the stream is captured."""


def while_capturing(bench: Bench, executor: Any, moment: str, action: Callable[[], object]) -> None:
    """Capture a shape, and at that moment do this in another thread, until it is done."""
    captures, done = executor.describe()["counts"]["captures"], []

    def capturing() -> None:
        assert any(stream.capture for context in bench.gpu.contexts for stream in context.streams) or moment not in RECORDING
        bench.partition.run(action)
        done.append(True)

    def compiling() -> None:
        bench.gpu.meanwhile(moment, capturing)

    bench.gpu.meanwhile(moment, compiling if moment == "IExecutionContext.execute_async_v3" else capturing)
    assert_right(executor, rows(5, 1))
    assert executor.describe()["counts"]["captures"] == captures + 1
    assert done == [True]
    assert_right(executor, rows(5, 2))


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_executor_is_closed_while_another_is_captured(bench: Bench, moment: str, caplog: pytest.LogCaptureFixture) -> None:
    """F77: closing waits for the partition's stream, which would invalidate a capture of that stream."""
    executor, other = bench.bind(), bench.bind()
    other.enqueue([Tensor.of(rows(2))])
    while_capturing(bench, executor, moment, other.close)
    assert caplog.messages == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_executor_runs_while_another_is_captured(bench: Bench, moment: str) -> None:
    """Its work does not become part of the other's graph, and its own new shapes are captured later."""
    executor, other = bench.bind(), bench.bind()
    assert_right(other, rows(4))
    while_capturing(bench, executor, moment, lambda: [assert_right(other, rows(4, seed)) for seed in range(3)])
    assert_right(other, rows(4, 9))


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_engine_is_bound_while_another_is_captured(bench: Bench, moment: str) -> None:
    """As when a model is loaded while its tenant is served: its own captures come after this one."""
    executor, bound = bench.bind(), []
    engine = bench.load(bench.plan())
    binding = Thread(target=lambda: bound.append(engine.bind(bench.partition)))
    while_capturing(bench, executor, moment, binding.start)
    binding.join()
    (other,) = bound
    assert_right(other, rows(2))
    other.close()


@pytest.mark.parametrize("moment", MOMENTS)
def test_another_tenant_pins_allocates_and_is_captured_while_one_is_captured(bench: Bench, moment: str) -> None:
    """In CUDA's global capture mode all of these calls fail in every thread during a capture, and invalidate it."""
    executor, other, done = bench.bind(), bench.device.carve([1]), []
    engine = bench.load(bench.plan())

    def work() -> None:
        memory = bench.memory(4096)
        assert bench.device.is_pinned(*memory.room[:2])
        binding.start()

    binding = Thread(target=lambda: done.append(engine.bind(other)))
    bench.gpu.meanwhile(moment, lambda: other.run(work))
    for seed in range(3):
        assert_right(executor, rows(5, seed))
    binding.join()
    other.run(lambda: assert_right(done[0], rows(3)))
    assert [each.describe()["graphs"] for each in (executor, *done)] == ["captured"] * 2
    for each in (executor, *done, other):
        each.close()


def test_the_simulation_refuses_unsafe_calls_during_a_capture_as_its_mode_says(bench: Bench) -> None:
    """cuStreamBeginCapture: of any thread in the global mode, else of the thread that captures."""
    stream, memory = bench.partition.stream.simulated, Memory(4096)
    for thread_local in (True, False):
        bench.gpu.begin_capture(stream, thread_local)
        try:
            bench.partition.run(lambda: bench.device.pin(*memory.room[:2]).close())
            refused = False
        except PartitionError as error:
            refused = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in str(error)
        assert refused != thread_local
        assert stream.capture.spoilt == refused
        with pytest.raises(PartitionError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
            bench.device.pin(*memory.room[:2])
        assert importlib.import_module("cuda.bindings.driver").cuStreamEndCapture(stream.handle)[1] is None
    bench.device.pin(*memory.room[:2]).close()


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_does_not_run_during_a_capture(bench: Bench, fails: bool) -> None:
    """It could free an engine that was never closed, in the thread that captures."""
    executor, seen = bench.bind(), []
    bench.gpu.meanwhile("cuStreamEndCapture", lambda: seen.append(gc.isenabled()))
    if fails:
        bench.gpu.fail("cuGraphInstantiate")
    assert gc.isenabled()
    assert_right(executor, rows(5, 1))
    assert (seen, gc.isenabled()) == ([False], True)


def test_a_capture_leaves_no_stream_behind(bench: Bench) -> None:
    """F66, F77."""
    (context,) = bench.gpu.contexts
    for call in ("launch", "cuGraphInstantiate", "cuStreamEndCapture"):
        executor = bench.bind()
        bench.gpu.fail(call)
        for _ in range(2):
            assert_right(executor, rows(5))
        assert executor.describe()["graphs"] == "native", call
        assert [stream.handle for stream in context.streams if not stream.closed] == [bench.partition.handle]
        executor.close()


def test_closing_a_graph_twice_destroys_it_once(bench: Bench) -> None:
    executor = bench.bind()
    (prepared,) = executor.shapes._ready.values()
    graph = prepared.graph
    prepared.close()
    graph.close()
    assert bench.gpu.log.count("cuGraphExecDestroy") == 1


def test_the_simulation_objects_to_what_this_avoids(bench: Bench) -> None:
    """A wait for a stream that is captured, and another thread's work on it."""
    stream = bench.partition.stream
    bench.gpu.begin_capture(stream.simulated, thread_local=True)
    with pytest.raises(CUDAError, match="STREAM_CAPTURE_UNSUPPORTED"):
        stream.sync()
    event = bench.device.make_current().create_event()
    with pytest.raises(Misuse, match="went into the graph that another one captured"):
        bench.partition.run(lambda: stream.record(event))
    stream.simulated.capture = bench.gpu.here.capture = None
    event.close()


def is_free() -> bool:
    """Whether the lock is free."""
    return "<unlocked " in repr(EXECUTION_LOCK)


@pytest.mark.parametrize(
    "moment", [COMPILING, "cuStreamBeginCapture", "IExecutionContext.execute_async_v3", "cuGraphInstantiate"]
)
def test_one_thread_at_a_time_compiles_or_captures(bench: Bench, moment: str) -> None:
    """Two at once crashed TensorRT-RTX 1.6.1: see `engines.cuda.locks.EXECUTION_LOCK`."""
    engine, held = bench.load(bench.plan()), []
    bench.gpu.meanwhile(moment, lambda: held.append(f" owner={get_ident()} " in repr(EXECUTION_LOCK)))
    executor = engine.bind(bench.partition)
    assert held == [True]
    assert is_free()
    moved = executor.rebind(bench.device.carve([1]))
    assert is_free()
    for each in (moved, executor, engine):
        each.close()
