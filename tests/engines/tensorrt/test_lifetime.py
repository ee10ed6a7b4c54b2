"""F15: an executor or engine that is not closed is released once nothing refers to it any more, works in flight included."""

import gc
import importlib
import logging
import subprocess
import sys
import weakref
from pathlib import Path
from textwrap import dedent
from threading import Event
from typing import Any

import numpy as np
import pytest

from engines import Tensor, load_engine
from tests.contract import in_a_thread
from tests.engines.simulated import Bench, affine, assert_right, rows
from tests.engines.tensorrt.test_data_dependent import FIVE, NONZERO, answer, expected, sparse
from tests.engines.tensors import array

LOGGER = "greenlane.engines"


def forget_in_flight(bench: Bench, engine: Any) -> Any:
    """The output memory of an inference that is still on its stream when its executor and its work were collected."""
    memory = bench.memory(4096)
    engine.bind(bench.partition).enqueue(bench.pinned(rows(2)), memory.room)
    return memory


def test_f15_the_last_reference_waits_for_the_stream_and_gives_everything_back(bench: Bench) -> None:
    engine = bench.load(bench.plan())
    engine.bind(bench.partition).close()
    idle = bench.holdings()
    memory = forget_in_flight(bench, engine)
    assert memory.bytes[:24].view(np.float32).tolist() == affine(rows(2)).ravel().tolist()
    assert bench.holdings() == idle
    assert len(bench.gpu.executions) == 1


def test_f15_an_inference_in_one_line_is_right_if_its_outputs_sizes_depend_on_data(bench: Bench) -> None:
    """F32: its work alone keeps the executor, with the memory in which the outputs are staged. Two lines, as pytest keeps what
    stands in an assertion.
    """
    engine, data = bench.load(bench.plan(NONZERO, FIVE)), sparse(5, 1, 3)
    for _ in range(3):
        work = engine.bind(bench.partition).enqueue([Tensor.of(data)])
        assert answer(work) == expected(data)


def test_f15_the_next_executor_has_the_instance_of_one_that_was_forgotten(bench: Bench) -> None:
    engine = bench.load(bench.plan())
    for turn in range(3):
        assert array(engine.bind(bench.partition).enqueue([Tensor.of(rows(2, turn))]).wait()[0]).tolist() == (
            affine(rows(2, turn)).tolist()
        )
    assert bench.gpu.log.count("ICudaEngine.create_execution_context") == 1


def test_f15_an_engine_that_was_forgotten_frees_contexts_then_the_cache(bench: Bench) -> None:
    """F54: the cache is saved then."""
    before = bench.holdings()
    executor: Any = load_engine(bench.plan(), bench.device).bind(bench.partition)
    executor.preparing([(5, 3)]).result(30)
    bench.gpu.log.clear()
    del executor
    gc.collect()
    assert bench.holdings() == before
    log = bench.gpu.log
    assert log.index("Stream.sync") < log.index("cuGraphExecDestroy") < log.index("IExecutionContext.__del__")
    assert log.index("IExecutionContext.__del__") < log.index("IRuntimeCache.serialize")


def test_f15_a_cycle_with_executor_and_engine_is_freed_in_the_same_order(bench: Bench) -> None:
    before = bench.holdings()
    gc.disable()
    try:
        executor: Any = load_engine(bench.plan(), bench.device).bind(bench.partition)
        cycle: list[Any] = [executor, executor.engine]
        cycle.append(cycle)
        forgotten = weakref.ref(executor)
        del executor, cycle
        assert forgotten()
        gc.collect()
    finally:
        gc.enable()
    assert bench.holdings() == before


def test_f15_an_engine_that_is_collected_first_releases_its_executors_first(bench: Bench) -> None:
    executor = bench.bind()
    left: list[int] = []
    lifetime: Any = importlib.import_module("engines.tensorrt.lifetime")
    lifetime.close_collected(executor.engine.pool, lambda: left.append(len(bench.gpu.executions)))
    assert left == [0]


def test_f15_a_closed_executor_is_not_released_again(bench: Bench) -> None:
    engine = bench.load(bench.plan())
    executor = engine.bind(bench.partition)
    executor.close()
    bench.gpu.log.clear()
    del executor
    gc.collect()
    assert bench.gpu.log == []


@pytest.mark.parametrize("action", ["bind", "rebind", "close"])
def test_f15_an_executor_collected_during_a_capture_is_released_later(bench: Bench, action: str) -> None:
    engine = bench.load(bench.plan())
    other = engine.bind(bench.partition)
    dropped = [engine.bind(bench.partition)]
    graphs = len(bench.gpu.graphs)
    bench.gpu.log.clear()
    bench.gpu.meanwhile("cuStreamEndCapture", dropped.clear)
    assert_right(other, rows(7))
    log = bench.gpu.log
    captured = log[log.index("cuStreamBeginCapture") : log.index("cuStreamEndCapture") + 1]
    assert not {"Stream.sync", "cuGraphExecDestroy", "Buffer.close"} & set(captured)
    assert len(bench.gpu.graphs) == graphs + 1
    executors = (
        [other]
        if action == "close"
        else [other, getattr(engine, action)(*([other] if action == "rebind" else []), bench.partition)]
    )
    kept = sum(len(executor.describe()["shapes"]) for executor in executors)
    for executor in executors if action == "close" else ():
        executor.close()
        kept = 0
    assert len(bench.gpu.graphs) == kept
    for executor in executors:
        executor.close()


def test_f15_collecting_an_executor_does_not_wait_for_shapes_being_prepared(bench: Bench) -> None:
    engine = bench.load(bench.plan())
    executor = engine.bind(bench.partition)
    began, go_on = Event(), Event()

    def hold() -> None:
        began.set()
        go_on.wait(30)

    bench.gpu.meanwhile("cuStreamBeginCapture", hold)
    future = executor.preparing([(5, 3)])
    assert began.wait(30)
    del executor
    gc.collect()
    assert not future.done()
    go_on.set()
    future.result(30)
    engine.bind(bench.partition).close()
    assert not bench.gpu.graphs


def test_f15_a_thread_that_captures_a_graph_of_its_own_may_collect_one(bench: Bench) -> None:
    """In the thread's relaxed capture mode CUDA allows calls that may wait for the device; its own is restored afterwards."""
    engine = bench.load(bench.plan())
    executor = engine.bind(bench.partition)
    bench.gpu.log.clear()
    del executor
    log = bench.gpu.log
    exchanges = [place for place, call in enumerate(log) if call == "cuThreadExchangeStreamCaptureMode"]
    assert exchanges[0] == 0
    assert exchanges[-1] == len(log) - 1
    assert bench.gpu.here.mode == 0


def test_f15_a_failure_to_free_is_a_warning_and_the_rest_is_freed(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    engine = bench.load(bench.plan())
    executor = engine.bind(bench.partition)
    bench.gpu.fail("cuGraphExecDestroy")
    del executor
    (message,) = caplog.messages
    assert (
        "freeing an executor that was not closed failed: closing <TensorRTExecutor affine1.plan>: CUDA_ERROR_OUT_OF_MEMORY"
        in message
    )
    assert not bench.gpu.events
    again = engine.bind(bench.partition)
    assert_right(again, rows(2))
    again.close()
    bench.gpu.graphs.clear()


def test_f15_an_executor_can_be_collected_in_a_thread_that_cuda_has_not_seen(bench: Bench) -> None:
    engine = bench.load(bench.plan())
    held = [engine.bind(bench.partition)]
    in_a_thread(held.clear)[1].result(30)
    assert not bench.gpu.graphs


ENDING = """
    import atexit, sys
    from pathlib import Path
    from tests.simulation import Gpu

    gpu = Gpu()

    @atexit.register
    def report() -> None:  # After what was registered later, so after all finalizers.
        log = gpu.log[began:]
        order = [log.index(call) for call in ("Stream.sync", "cuGraphExecDestroy", "IExecutionContext.__del__")]
        order += [len(log) - log[::-1].index(call) for call in ("IExecutionContext.__del__", "IRuntimeCache.serialize")]
        print(order == sorted(order), len(gpu.graphs), len(gpu.executions), len(gpu.events))

    from tests.engines.simulated import opened, rows
    from engines import Tensor, load_engine
    with opened(Path(sys.argv[1]), gpu=gpu) as bench:
        executor = bench.bind()
        executor.preparing([(5, 3)]).result(30)
        works = [executor.enqueue([Tensor.of(rows(count))]) for count in (2, 5)]
        began = len(gpu.log)
"""


def test_f15_open_executors_and_engines_are_freed_in_order_at_exit(tmp_path: Path) -> None:
    """F54: the cache is saved then, after the last context was freed."""
    command = [sys.executable, "-c", dedent(ENDING), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True 0 0 0\n", "")
