"""Profiles, auxiliary streams, memory and weights of engines on a simulated GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import ExecutionFailed, ModelRefused, Tensor, TensorMismatch
from engines.model_files.profiles import Profile, Range
from tests.engines.simulated import AFFINE, ROWS, Bench, affine, assert_right, opened, rows
from tests.engines.tensors import array, run
from tests.simulation import Gpu, Misuse
from tests.simulation.plans import Ranges
from tests.simulation.tensorrt import library

SMALL: Ranges = {"x": [(1, 3), (2, 3), (4, 3)]}
LARGE: Ranges = {"x": [(3, 3), (6, 3), (9, 3)]}


@pytest.fixture
def executor(bench: Bench) -> Iterator[Any]:
    """Of two profiles."""
    executor = bench.load(bench.plan(AFFINE, SMALL, LARGE)).bind(bench.partition)
    yield executor
    executor.close()


# Profiles.


def taken(executor: Any, count: int) -> int:
    """The profile that this many rows are run with."""
    return int(executor.shapes.find(((count, 3),)).prepared.context.profile)


def test_each_shape_runs_with_the_preferred_profile_or_the_first_that_fits(bench: Bench, executor: Any) -> None:
    """F72."""
    counts = [1, 4, 5, 3, 9, 2, 4]
    for turn, count in enumerate(counts):
        assert_right(executor, rows(count, turn))
    assert [taken(executor, count) for count in counts] == [0, 0, 1, 0, 1, 0, 0]


def test_two_profiles_in_turn_keep_their_graphs_and_nothing_is_switched(bench: Bench, executor: Any) -> None:
    """F65, F72: the simulation objects to a graph of another profile."""
    for count in (2, 8):
        assert_right(executor, rows(count))
    begun, graphs = len(bench.gpu.log), list(bench.gpu.graphs)
    for turn in range(5):
        for count in (2, 8):
            assert_right(executor, rows(count, turn))
    calls = bench.gpu.log[begun:]
    assert calls.count("cuGraphLaunch") == 10
    assert not {call for call in calls if call.startswith("IExecutionContext")}
    assert bench.gpu.graphs == graphs


def test_shapes_of_two_profiles_in_flight_together_each_have_their_own_numbers(bench: Bench, executor: Any) -> None:
    """F20: their contexts share the memory of inputs and outputs."""
    data = [rows(2 if turn % 2 else 8, turn) for turn in range(12)]
    works = [executor.enqueue(bench.pinned(each), bench.room()) for each in data]
    assert [array(work.wait()[0]).tolist() for work in works] == [affine(each).tolist() for each in data]


def test_every_profile_was_run_before_an_engine_is_bound(bench: Bench, executor: Any) -> None:
    """The shape to begin with is run last, so that its graph is not evicted."""
    assert [kernel.partition(" ")[2] for kernel in bench.gpu.compiled] == ["((6, 3),)", "((2, 3),)"]
    launched = bench.gpu.log.count("cuGraphLaunch")
    assert_right(executor, rows(2))
    assert bench.gpu.log.count("cuGraphLaunch") == launched + 1


def test_warm_up_usual_captures_the_usual_shapes_before_bind_returns(bench: Bench) -> None:
    """A shape that nothing was ready for would compile its kernels while its tenant waits."""
    executor = bench.bind(AFFINE, SMALL, warm_up="usual")
    assert [kernel.partition(" ")[2] for kernel in bench.gpu.compiled] == ["((1, 3),)", "((4, 3),)", "((2, 3),)"]
    for count in (1, 2, 4):
        launched = bench.gpu.log.count("cuGraphLaunch")
        assert_right(executor, rows(count))
        assert bench.gpu.log.count("cuGraphLaunch") == launched + 1


def test_shapes_that_no_profile_holds_are_refused_with_every_range(bench: Bench) -> None:
    """F25, F72: a shape between two profiles is refused when it is enqueued, with no effect on later inferences."""
    apart: Ranges = {"x": [(8, 3), (8, 3), (9, 3)]}
    engine = bench.load(bench.plan(AFFINE, SMALL, apart))
    assert engine.signature.inputs[0].limits == ((1, 9), (3, 3))
    executor = engine.bind(bench.partition)
    before = repr(executor)
    with pytest.raises(TensorMismatch, match=r"fits x 6x3; .* profile 0: x 1x3\.\.2x3\.\.4x3; profile 1: x 8x3\.\.8x3\.\.9x3"):
        run(executor, rows(6))
    assert repr(executor) == before, "no run"
    assert_right(executor, rows(2))
    assert_right(executor, rows(9))
    executor.close()


def test_a_profile_that_was_asked_for_is_the_only_one(bench: Bench) -> None:
    """F73: it is in force, and the stream waited for, before anything runs."""
    engine = bench.load(bench.plan(AFFINE, SMALL, LARGE), profile=1)
    assert engine.signature.inputs[0].limits == ((3, 9), (3, 3))
    begun = len(bench.gpu.log)
    executor = engine.bind(bench.partition)
    calls = bench.gpu.log[begun:]
    switched = calls.index("IExecutionContext.set_optimization_profile_async")
    assert "Stream.sync" in calls[switched : calls.index("IExecutionContext.execute_async_v3")]
    for count in (3, 9):
        assert_right(executor, rows(count))
    with pytest.raises(TensorMismatch, match=r"dimension 0 of shape \[2, 3\] is 2; the engine was built for 3 to 9"):
        run(executor, rows(2))
    assert list(executor.instance.contexts) == [1]
    executor.close()


def test_a_profile_that_does_not_exist_is_refused(bench: Bench) -> None:
    with pytest.raises(ModelRefused, match=r"affine1\.plan: profile 2 is asked for, but it has 2, numbered from 0"):
        bench.load(bench.plan(AFFINE, SMALL, LARGE), profile=2)


def test_a_profile_that_the_library_refuses_fails_the_bind_only_once(bench: Bench) -> None:
    engine, before = bench.load(bench.plan(AFFINE, SMALL, LARGE)), bench.holdings()
    bench.gpu.fail("IExecutionContext.set_optimization_profile_async")
    with pytest.raises(ModelRefused, match="profile 1: CUDA_ERROR_OUT_OF_MEMORY"):
        engine.bind(bench.partition)
    assert bench.holdings() == before
    executor = engine.bind(bench.partition)
    for count in (9, 1, 9):
        assert_right(executor, rows(count))
    executor.close()


@pytest.mark.parametrize("number", range(1, 6))
def test_a_wait_that_fails_while_a_profile_is_switched_fails_the_bind_only_once(bench: Bench, number: int) -> None:
    """The context is freed once the switch has ended: the simulation complains of one that is freed before."""
    before, engine = bench.holdings(), bench.load(bench.plan(AFFINE, SMALL, LARGE))
    bench.gpu.fail("Stream.sync", number)
    with pytest.raises(ModelRefused, match="CUDA_ERROR_OUT_OF_MEMORY"):
        engine.bind(bench.partition)
    executor = engine.bind(bench.partition)
    for count in (9, 1, 9):
        assert_right(executor, rows(count))
    executor.close()
    engine.close()
    assert bench.holdings() == before


def tuned(bench: Bench, *profiles: tuple[int | None, bool]) -> Any:
    """An engine whose profiles, of the same ranges, are for these numbers of SMs."""
    ranges = {"x": Range(*ROWS["x"])}
    path = bench.artifact(profiles=tuple(Profile(ranges, sms, how) for sms, how in profiles))
    return bench.load(path)


def test_fewer_multiprocessors_than_a_profile_is_for_are_warned_of_once_a_partition(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """F76."""
    engine = tuned(bench, (48, True))
    for granules in ([1], [2], [1], range(1, 7)):
        partition = bench.device.carve(granules)
        executor = engine.bind(partition)
        partition.run(lambda executor=executor: [assert_right(executor, rows(count)) for count in (1, 2, 3)])
        executor.close()
        partition.close()
    assert len(caplog.messages) == 2
    assert "affine1.plan: profile 0 is tuned for 48 SMs and runs on 8 of <CudaPartition granules [1]" in caplog.messages[0]
    assert "granules [2]" in caplog.messages[1]


def test_a_profile_that_was_not_tuned_is_logged_as_meant_for_its_sms(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """F76."""
    tuned(bench, (16, False)).bind(bench.partition).close()
    assert "profile 0 is meant for 16 SMs and runs on 8" in caplog.text


def test_an_executor_says_how_many_sms_its_partition_lacks_for_the_profile_in_use(bench: Bench) -> None:
    """F76. A profile that nothing runs with lacks nothing."""
    engine, whole = tuned(bench, (48, True)), bench.device.carve(range(1, 7))
    executor = engine.bind(bench.partition)
    assert executor.describe()["missing_sms"] == 48 - 8
    moved = executor.rebind(whole)
    assert "missing_sms" not in moved.describe()
    fitting = tuned(bench, (48, True), (8, True)).bind(bench.partition)
    assert "missing_sms" not in fitting.describe()
    for each in (executor, moved, fitting):
        each.close()
    bench.close_engines()
    whole.close()


@pytest.mark.parametrize(("granules", "profile"), [([1], 1), ([1, 2], 2), ([1, 2, 3], 2), (range(1, 7), 0)])
def test_a_partition_begins_with_the_profile_for_its_size(bench: Bench, granules: Any, profile: int) -> None:
    engine, partition = tuned(bench, (48, True), (8, True), (16, True)), bench.device.carve(granules)
    executor = engine.bind(partition)
    assert taken(executor, 2) == profile
    executor.close()
    partition.close()


def test_an_idle_instance_is_reused_with_the_profile_for_this_partition_size(bench: Bench) -> None:
    engine = tuned(bench, (48, True), (8, True))
    for granules, profile in (([1], 1), (range(1, 7), 0), ([1], 1)):
        partition = bench.device.carve(granules)
        executor = engine.bind(partition)
        assert taken(executor, 2) == profile
        executor.close()
        partition.close()


def test_a_context_waits_for_the_switch_of_its_profile_so_that_it_can_be_let_go_of(bench: Bench) -> None:
    """F73: the switch is work on a stream, and what comes next may fail."""
    engine, before = bench.load(bench.plan(AFFINE, ROWS, {"x": [(1, 3), (9, 3), (20, 3)]}), profile=1), bench.holdings()
    bench.gpu.fail("Device.allocate")
    with pytest.raises(ModelRefused, match="CUDA_ERROR_OUT_OF_MEMORY"):
        engine.bind(bench.partition)
    assert bench.holdings() == before


# Auxiliary streams.


def test_auxiliary_streams_are_the_partition_s_own_and_go_with_the_executor(bench: Bench) -> None:
    """F75, F77."""
    engine = bench.load(bench.plan(aux_streams=2))
    (green,) = bench.gpu.contexts
    executor = engine.bind(bench.partition)
    assert sum(not stream.closed for stream in green.streams) == 3
    for seed in range(3):
        assert_right(executor, rows(5, seed))
    begun = len(bench.gpu.log)
    executor.close()
    calls = bench.gpu.log[begun:]
    assert calls.index("cuGraphExecDestroy") < calls.index("cuStreamDestroy")
    assert sum(not stream.closed for stream in green.streams) == 1


def test_the_next_executor_s_auxiliary_streams_are_of_its_own_partition(bench: Bench) -> None:
    """F75: although it reuses the last one's context; the simulation objects to streams of another partition."""
    engine = bench.load(bench.plan(aux_streams=2))
    for granule in (1, 2, 1):
        partition = bench.device.carve([granule])
        executor = engine.bind(partition)
        partition.run(lambda executor=executor: [assert_right(executor, rows(count)) for count in (2, 5, 6)])
        executor.close()
        partition.close()
    assert bench.gpu.log.count("ICudaEngine.create_execution_context") == 1


def test_a_replacement_context_has_the_auxiliary_streams_too(bench: Bench) -> None:
    """F45, F75."""
    bench.gpu.capturable = False
    executor = bench.load(bench.plan(aux_streams=2)).bind(bench.partition)
    for seed in range(3):
        assert_right(executor, rows(5, seed))
    executor.close()


def test_auxiliary_streams_that_cannot_be_created_refuse_the_model(bench: Bench) -> None:
    path, before = bench.plan(aux_streams=2), bench.holdings()
    for call, nth in (("cuStreamGetGreenCtx", 2), ("cuGreenCtxStreamCreate", 2)):
        engine = bench.load(path)
        bench.gpu.fail(call, nth)
        with pytest.raises(ModelRefused, match=r"making a stream on <CudaPartition .*CUDA_ERROR_OUT_OF_MEMORY"):
            engine.bind(bench.partition)
        engine.close()
        assert bench.holdings() == before
        assert sum(not stream.closed for stream in bench.gpu.contexts[0].streams) == 1


def test_streams_of_several_partitions_are_an_error(tmp_path: Path) -> None:
    """F75: with the words of a library that knows green contexts, which is TensorRT from 11.4 on."""
    gpu = Gpu()
    with opened(tmp_path, library(gpu, "tensorrt", "11.4"), gpu) as bench:
        executor, other = bench.load(bench.plan(aux_streams=1)).bind(bench.partition), bench.device.carve([1])
        (context,) = bench.gpu.executions
        context.set_aux_streams([other.handle])
        with pytest.raises(ExecutionFailed, match="the streams are not all of the same green context"):
            run(executor, rows(5))
        executor.close()
        other.close()
        bench.close()


def test_the_simulation_objects_to_another_partition_s_stream(bench: Bench) -> None:
    """F75: TensorRT-RTX 1.6 knows no green contexts, runs part of the inference on the other's SMs and says nothing."""
    executor, other = bench.load(bench.plan(aux_streams=1)).bind(bench.partition), bench.device.carve([1])
    (context,) = bench.gpu.executions
    context.set_aux_streams([other.handle])
    with pytest.raises(Misuse, match="on other SMs"):
        run(executor, rows(5))
    executor.close()
    other.close()


def test_the_simulation_objects_to_auxiliary_streams_of_the_library_s_own(bench: Bench) -> None:
    """F75."""
    executor = bench.load(bench.plan(aux_streams=2)).bind(bench.partition)
    (context,) = bench.gpu.executions
    context.set_aux_streams([])
    with pytest.raises(Misuse, match="run on all SMs"):
        run(executor, rows(5))
    executor.close()


# Memory.


def test_contexts_use_the_instance_s_memory_if_the_settings_say_so(bench: Bench) -> None:
    """F45: for the context that takes over after a capture failed as well."""
    engine, before = bench.load(bench.plan(), allocation_strategy="user_managed"), bench.holdings()
    executor = engine.bind(bench.partition)
    assert_right(executor, rows(4))
    bench.gpu.fail("cuGraphInstantiate")
    for seed in range(3):
        assert_right(executor, rows(5, seed))
    executor.close()
    engine.close()
    assert bench.holdings() == before


# Weights.


@pytest.mark.parametrize(("asked", "budget"), [(100, 100), (0, 0), (9999, 1000), (None, 1000)])
def test_weights_are_streamed_within_the_budget_that_was_set_before_any_context(
    bench: Bench, asked: int | None, budget: int
) -> None:
    """F74: the simulation objects to one that is set later."""
    engine = bench.load(bench.plan(streamable=1000), weight_streaming_budget=asked)
    assert engine.plan.weight_streaming_budget_v2 == budget
    executor = engine.bind(bench.partition)
    for seed in range(3):
        assert_right(executor, rows(4, seed))
    assert (executor.describe()["counts"]["captures"] == 0) == (budget < 1000)
    executor.close()


def test_streamed_weights_exclude_graphs(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """F74."""
    engine = bench.load(bench.plan(streamable=1000), weight_streaming_budget=1)
    engine.bind(bench.partition).close()
    assert "affine1.plan: cannot be captured as a graph (its weights are streamed), so each inference costs more" in caplog.text


def test_the_engine_file_s_weight_budget_holds_unless_settings_have_one(bench: Bench) -> None:
    """F74."""
    path = bench.artifact(options={"weight_streaming_budget": 300}, streamable=1000)
    assert bench.load(path).plan.weight_streaming_budget_v2 == 300
    assert bench.load(path, weight_streaming_budget=200).plan.weight_streaming_budget_v2 == 200


def test_a_budget_for_weights_that_cannot_be_streamed_is_refused(bench: Bench) -> None:
    """F74."""
    why = r"affine1\.plan: a weight_streaming_budget of 5 bytes has no effect: it was not built to stream weights"
    with pytest.raises(ModelRefused, match=why):
        bench.load(bench.plan(), weight_streaming_budget=5)


def test_profiles_for_what_is_built_already_are_refused(bench: Bench) -> None:
    with pytest.raises(ModelRefused, match=r"affine1\.plan: it is built already, so build_profiles have no effect"):
        bench.load(bench.plan(), build_profiles=((("x", ((1, 3), (2, 3), (4, 3))),),))


def test_a_library_that_streams_no_weights_is_not_asked_to(tmp_path: Path) -> None:
    gpu = Gpu()
    lacking = type("ICudaEngine", (), {})
    with opened(tmp_path, library(gpu, ICudaEngine=lacking), gpu) as bench:
        engine = bench.load(bench.plan(streamable=1000))
        assert engine.plan.weight_streaming_budget_v2 == 1000
        bench.close()


# Lives.


def test_there_is_no_context_before_an_engine_is_bound_and_one_afterwards(bench: Bench) -> None:
    """F44, F47: settings are the engine's from the start, and another load begins with the defaults."""
    path = bench.plan()
    engine = bench.load(path, copies="engine")
    assert len(bench.gpu.executions) == 0
    executor = engine.bind(bench.partition)
    for count in (1, 2, 3):
        assert_right(executor, rows(count))
    assert bench.gpu.log.count("ICudaEngine.create_execution_context") == 1
    executor.close()
    assert bench.load(path).loaded.settings.copies == "sm"


def test_an_engine_that_was_closed_is_not_bound(bench: Bench) -> None:
    engine = bench.load(bench.plan())
    engine.close()
    engine.close()
    with pytest.raises(ModelRefused, match=r"affine1\.plan: the engine is closed; load it again"):
        engine.bind(bench.partition)


def test_several_executors_of_one_engine_are_in_flight_together(bench: Bench) -> None:
    """F23: each has a context, graphs and memory of its own."""
    engine = bench.load(bench.plan())
    executors = [engine.bind(bench.partition) for _ in range(3)]
    data = [rows(2, seed) for seed in range(30)]
    works = [executors[turn % 3].enqueue([Tensor.of(each)]) for turn, each in enumerate(data)]
    assert [array(work.wait()[0]).tolist() for work in works] == [affine(each).tolist() for each in data]
    for executor in executors:
        executor.close()
