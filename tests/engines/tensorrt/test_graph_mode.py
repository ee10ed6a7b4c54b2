"""Which graphs an executor uses: the decision as a table, and executors that keep to it on a simulated GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import ExecutionFailed, ModelRefused, RuntimeSettings, Tensor
from engines.tensorrt.graph_mode import EngineTraits, GraphMode, decide, fall_back, obstacle
from partitions import DeviceLost
from tests.engines.simulated import AFFINE, ROWS, Bench, affine, assert_right, never_captured, opened, rows
from tests.engines.tensors import array, run
from tests.simulation import Gpu, Misuse
from tests.simulation.tensorrt import library
from tests.simulation.tensorrt_config import CudaGraphStrategy

MAX_READY_SETS = 64
FIXED = "fixed (float[2, 3] x) => (float[2, 3] y) { y = Add(x, x) }"

# Settings, traits, and the way: whether a graph of ours is captured, whether the library's own are used, what is warned of.
MATRIX: dict[str, tuple[dict[str, Any], dict[str, bool], bool, bool, str]] = {
    "F57: the library's own around the engine alone, with a word": (
        {"copies": "engine"}, {"native": True}, False, True, "though cuda_graph_strategy is 'disabled'",
    ),
    "F57: asked for, without a word": (
        {"copies": "engine", "cuda_graph_strategy": "whole_graph_capture"}, {"native": True}, False, True, "",
    ),
    "F58: ours around the engine alone where the library has none": ({"copies": "engine"}, {}, True, False, ""),
    "F59: ours over copies and engine, and none of the library's inside": ({}, {"native": True}, True, False, ""),
    "F59: even if those were asked for": (
        {"cuda_graph_strategy": "whole_graph_capture"}, {"native": True}, True, False, "",
    ),
    "F61: ours over copies and engine where the library has none": ({}, {}, True, False, ""),
    "F62: off, and the library's own asked for": (
        {"graphs": "off", "cuda_graph_strategy": "whole_graph_capture"}, {"native": True}, False, True, "",
    ),
    "F62: off, and the library has none": (
        {"graphs": "off", "cuda_graph_strategy": "whole_graph_capture"}, {}, False, False, "",
    ),
    "off": ({"graphs": "off"}, {"native": True}, False, False, ""),
    "F63: lazy kernels and dynamic inputs": (
        {"dynamic_shapes_kernel_specialization_strategy": "lazy"}, {"dynamic": True, "native": True}, False, True,
        "cannot be captured as a graph (its inputs are dynamic and its kernels 'lazy'",
    ),
    "F63: lazy kernels and fixed inputs": (
        {"dynamic_shapes_kernel_specialization_strategy": "lazy"}, {"native": True}, True, False, "",
    ),
    "F63: other kernels and dynamic inputs": ({}, {"dynamic": True}, True, False, ""),
    "streamed weights": ({}, {"streamed": 70, "native": True}, False, False, "(its weights are streamed), so each"),
    "streamed weights, copies around": (
        {"copies": "engine"}, {"streamed": 70, "native": True}, False, False, "(its weights are streamed), so each",
    ),
}  # fmt: skip


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Bench]:
    """Its library has no graphs of its own, and no other strategies."""
    gpu = Gpu()
    with opened(tmp_path, library(gpu, IRuntimeConfig=type("IRuntimeConfig", (), {})), gpu) as bench:
        yield bench
        bench.close()


def assert_many_right(bench: Bench, executor: Any, turns: int = 40) -> None:
    """Of several shapes, pinned and staged, more at a time than the ring holds."""
    data = [rows(1 + turn % 3, turn) for turn in range(turns)]
    inputs = [bench.pinned(each) if turn % 2 else [Tensor.of(each)] for turn, each in enumerate(data)]
    rooms = [bench.room() for _ in data]
    works = [executor.enqueue(given, room) for given, room in zip(inputs, rooms, strict=True)]
    for each, work in zip(data, works, strict=True):
        assert array(work.wait()[0]).tolist() == affine(each).tolist()


def strategy(bench: Bench) -> CudaGraphStrategy:
    """The library's own graphs in the one context there is."""
    (context,) = bench.gpu.executions
    return context.get_runtime_config().cuda_graph_strategy


@pytest.mark.parametrize(("settings", "traits", "capture", "native", "notice"), MATRIX.values(), ids=list(MATRIX))
def test_the_graph_mode_depends_on_settings_engine_and_library(
    settings: dict[str, Any], traits: dict[str, bool], capture: bool, native: bool, notice: str
) -> None:
    """F57, F58, F59, F61, F62, F63."""
    way = decide(RuntimeSettings(**settings), EngineTraits(**traits))
    assert (way.capture, way.native) == (capture, native)
    assert notice in way.note
    assert bool(notice) == bool(way.note)


@pytest.mark.parametrize("traits", [EngineTraits(streamed=70), EngineTraits(dynamic=True, native=True)])
def test_graphs_that_are_required_and_cannot_be_are_refused_with_the_reason(traits: EngineTraits) -> None:
    """F60."""
    settings = RuntimeSettings(graphs="required", dynamic_shapes_kernel_specialization_strategy="lazy")
    with pytest.raises(ModelRefused, match="graphs are required, but it cannot be captured as one: its ") as refused:
        decide(settings, traits)
    assert obstacle(settings, traits) in str(refused.value)


def test_a_graph_mode_describes_itself() -> None:
    ways = [GraphMode(capture=True, native=False), GraphMode(capture=False, native=True), fall_back(EngineTraits(), "why")]
    assert list(map(str, ways)) == ["captured graphs", "native graphs", "no graphs"]


@pytest.mark.parametrize("copies", ["sm", "engine", "auto"])
@pytest.mark.parametrize("graphs", ["on", "off", "required"])
@pytest.mark.parametrize("wanted", ["disabled", "whole_graph_capture"])
def test_results_are_right_in_every_graph_mode(bench: Bench, copies: str, graphs: str, wanted: str) -> None:
    """F20, F64: and a context with graphs of its own is never captured, to which the simulation would object."""
    executor = bench.bind(copies=copies, graphs=graphs, cuda_graph_strategy=wanted)
    assert_many_right(bench, executor)
    assert_many_right(bench, executor)
    assert ("0 captures" in repr(executor)) == (copies == "engine" or graphs == "off")


@pytest.mark.parametrize("copies", ["sm", "engine", "auto"])
def test_the_numbers_are_right_with_a_library_that_has_no_graphs(plain: Bench, copies: str) -> None:
    """F58, F61."""
    executor = plain.bind(copies=copies)
    assert_many_right(plain, executor)
    assert "3 captures" in repr(executor)
    executor.close()


def test_copies_by_the_engines_use_the_library_s_graphs_with_one_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """F57."""
    engine = bench.load(bench.plan(), copies="engine")
    for granule in (1, 2):
        partition = bench.device.carve([granule])
        executor = engine.bind(partition)
        assert strategy(bench) is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        executor.close()
        partition.close()
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "graphs are on and copies 'engine', so TensorRT's own graphs are used though cuda_graph_strategy is 'disabled'"
    ]
    assert bench.gpu.log.count("cuGraphLaunch") == 0
    assert "launch" not in bench.gpu.log


def test_copies_by_the_engines_need_no_nvrtc(bench: Bench) -> None:
    bench.gpu.nvrtc = False
    executor = bench.bind(copies="engine")
    assert_many_right(bench, executor)


def test_each_inference_s_copies_are_chosen_by_its_size(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways in turn on one ring: each counts only its own."""
    monkeypatch.setattr(bench.copies, "SM_COPY_LIMIT", 3 * 24)
    executor = bench.bind(copies="auto")
    for turn in range(40):
        data, before = rows(1 + turn % 5, turn), bench.gpu.log.count("cuMemcpyAsync")
        assert run(executor, data)[0].tolist() == affine(data).tolist()
        assert bench.gpu.log.count("cuMemcpyAsync") - before == (2 if len(data) > 3 else 0)


def test_without_graphs_nothing_is_captured(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """F62."""
    executor = bench.bind(graphs="off")
    assert_many_right(bench, executor)
    assert "cuStreamBeginCapture" not in bench.gpu.log
    assert strategy(bench) is CudaGraphStrategy.DISABLED
    assert not [message for message in caplog.messages if "graph" in message]


@pytest.mark.parametrize(("text", "ranges", "captures"), [(AFFINE, ROWS, "0 captures"), (FIXED, {}, "1 captures")])
def test_lazy_kernels_are_captured_only_where_nothing_is_dynamic(
    bench: Bench, text: str, ranges: Any, captures: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F63: else the library's own graphs are used, with a warning that names the engine and the reason."""
    executor = bench.bind(text, ranges, dynamic_shapes_kernel_specialization_strategy="lazy")
    run(executor, rows(2))
    assert captures in repr(executor)
    assert [".plan: cannot be captured as a graph (its inputs are dynamic" in m for m in caplog.messages] == [True] * bool(
        ranges
    )
    assert (strategy(bench) is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE) == bool(ranges)


def test_an_engine_that_cannot_be_captured_is_not_bound_where_graphs_are_required(bench: Bench) -> None:
    """F60."""
    before = bench.holdings()
    for settings in ({"dynamic_shapes_kernel_specialization_strategy": "lazy"}, {}):
        bench.gpu.capturable = False
        with pytest.raises(ModelRefused, match=r"affine\d\.plan: graphs are required, but it cannot be captured as one: "):
            bench.bind(graphs="required", **settings)
        bench.close_engines()
        assert bench.holdings() == before


def test_a_shape_that_cannot_be_captured_fails_where_graphs_are_required(bench: Bench) -> None:
    """F60."""
    executor = bench.bind(graphs="required")
    bench.gpu.fail("cuStreamBeginCapture")
    with pytest.raises(ExecutionFailed, match=r"running affine1\.plan: graphs are required, .*CUDA_ERROR_OUT_OF_MEMORY"):
        run(executor, rows(5))
    assert_many_right(bench, executor)
    assert run(executor, rows(5))[0].tolist() == affine(rows(5)).tolist()


def test_another_context_takes_over_when_a_capture_fails(bench: Bench) -> None:
    """F45, F60, F65: every setting is applied again, no kernel is compiled again, and no graph of the old context is left.

    Its kernel cache is not the one of the engine's other executors, as it calls the library in each inference.
    """
    executor = bench.bind(allocation_strategy="on_profile_change")
    (before,) = [each.get_runtime_config().get_runtime_cache() for each in bench.gpu.executions]
    begun = len(bench.gpu.log)
    bench.gpu.fail("cuGraphInstantiate")
    run(executor, rows(4))
    calls = [call for call in bench.gpu.log[begun:] if call.startswith(("ICuda", "IRuntimeC", "IExecutionContext.__del"))]
    assert calls[-1] == "IExecutionContext.__del__"
    assert strategy(bench) is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    (context,) = bench.gpu.executions
    assert context.get_runtime_config().get_execution_context_allocation_strategy().name == "ON_PROFILE_CHANGE"
    assert context.get_runtime_config().get_runtime_cache() is not before
    assert len(bench.gpu.compiled) == len(set(bench.gpu.compiled))
    assert bench.gpu.graphs == []
    assert_many_right(bench, executor)


def test_a_context_without_graphs_of_its_own_is_kept_when_a_capture_fails(
    plain: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """F60."""
    executor = plain.bind()
    run(executor, rows(4))
    plain.gpu.fail("cuGraphInstantiate")
    assert_many_right(plain, executor)
    run(executor, rows(4))
    assert_many_right(plain, executor)
    assert plain.gpu.log.count("ICudaEngine.create_execution_context") == 1
    assert [message.endswith("so each inference costs more") for message in caplog.messages] == [True]
    executor.close()


def test_without_a_native_context_the_old_one_continues_without_graphs(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    executor = bench.bind()
    run(executor, rows(4))
    bench.gpu.fail("cuGraphInstantiate")
    bench.gpu.fail("ICudaEngine.create_execution_context")
    assert_many_right(bench, executor)
    run(executor, rows(4))
    assert_many_right(bench, executor)
    assert caplog.messages[-1].endswith("created no context: CUDA_ERROR_OUT_OF_MEMORY: as scripted; each inference costs more")


# Graphs of ours.


def test_graphs_are_bounded_and_the_least_recently_used_goes_first(bench: Bench) -> None:
    text = "wide (float[n, 3] x) => (float[n, 3] y) { y = Add(x, x) }"
    executor = bench.bind(text, {"x": [(1, 3), (1, 3), (99, 3)]})
    for count in range(1, MAX_READY_SETS + 1):
        run(executor, rows(count))
    assert len(bench.gpu.graphs) == MAX_READY_SETS
    run(executor, rows(1))  # Now 2 is the least recently used one.
    works = [executor.enqueue(bench.pinned(rows(count)), bench.room()) for count in (2, 1, 90)]
    assert len(bench.gpu.graphs) == MAX_READY_SETS
    run(executor, rows(91))  # And now 3.
    assert [array(work.wait()[0]).tolist() for work in works] == [(2 * rows(count)).tolist() for count in (2, 1, 90)]
    captured = bench.gpu.log.count("cuGraphInstantiate")
    for count, more in ((1, 0), (2, 0), (90, 0), (5, 0), (3, 1)):
        run(executor, rows(count))
        assert bench.gpu.log.count("cuGraphInstantiate") - captured == more, count
    assert len(bench.gpu.graphs) == MAX_READY_SETS
    executor.close()
    assert bench.gpu.graphs == []


FAULTS = {
    "TensorRT": "IExecutionContext.execute_async_v3",
    "copies": "launch",
    "begin": "cuStreamBeginCapture",
    "end": "cuStreamEndCapture",
    "instantiate": "cuGraphInstantiate",
}


@pytest.mark.parametrize("call", FAULTS.values(), ids=list(FAULTS))
def test_a_shape_that_cannot_be_captured_runs_without_a_graph_with_one_warning(
    bench: Bench, executor: Any, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F60: the warning names the engine and the reason, and the library's own graphs take over."""
    compiling = call == FAULTS["TensorRT"]  # It is run once before it is captured; another test has that.
    bench.gpu.fail(call, 1 + compiling, error="CUDA_ERROR_NOT_PERMITTED")
    for seed in range(4):
        assert_right(executor, rows(3, seed))
    for seed in range(4):
        assert_right(executor, rows(5, seed))
    assert len(caplog.messages) == 1
    assert "affine1.plan: cannot be captured as a graph (" in caplog.messages[0]
    assert "CUDA_ERROR_NOT_PERMITTED: as scripted" in caplog.messages[0]
    assert bench.gpu.graphs == []
    assert executor.describe()["counts"]["fallbacks"] == 1
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


def test_works_without_graphs_follow_each_other_without_a_wait(bench: Bench) -> None:
    """F20, F13: the context is not called while it has work in flight."""
    executor = never_captured(bench)
    data = [rows(2, seed) for seed in range(5)]
    works = [executor.enqueue(bench.pinned(each), bench.room()) for each in data]
    (context,) = bench.gpu.executions
    assert context.in_flight == 5
    assert [array(work.wait()[0]).tolist() for work in works] == [affine(each).tolist() for each in data]


def test_a_lost_device_is_no_capture_that_failed(bench: Bench, executor: Any, caplog: pytest.LogCaptureFixture) -> None:
    bench.gpu.fail("cuGraphInstantiate", error="CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(DeviceLost, match="CUDA_ERROR_LAUNCH_FAILED"):
        run(executor, rows(3))
    assert caplog.messages == []
    with pytest.raises(DeviceLost):
        executor.close()


def test_the_simulation_objects_to_graphs_inside_a_graph(bench: Bench) -> None:
    """F64."""
    executor = bench.bind(copies="engine", cuda_graph_strategy="whole_graph_capture")
    stream = bench.partition.stream.simulated
    bench.gpu.begin_capture(stream, thread_local=True)
    with pytest.raises(Misuse, match="a context with graphs of its own was captured"):
        executor.instance.contexts[0].execute(bench.partition.stream)
    stream.capture = bench.gpu.here.capture = None
