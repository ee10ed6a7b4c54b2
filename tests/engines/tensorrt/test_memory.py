"""What engines and executors on a simulated GPU say that they take of its memory."""

from contextlib import closing
from typing import Any

from engines import Step, chain
from engines.memory import added
from tests.engines.simulated import AFFINE, Bench
from tests.simulation.plans import Ranges

SMALL: Ranges = {"x": [(1, 3), (2, 3), (4, 3)]}
LARGE: Ranges = {"x": [(3, 3), (6, 3), (9, 3)]}
ROW = 3 * 4
CONTEXT = 4096


def test_an_executor_takes_a_context_for_each_profile_and_tensors_of_the_largest(bench: Bench) -> None:
    engine = bench.load(bench.plan(AFFINE, SMALL, LARGE))
    assert engine.executor_memory["contexts"] == 2 * CONTEXT
    assert engine.executor_memory["buffers"] == 9 * ROW  # A bare plan does not say the shapes of its outputs.
    with closing(engine.bind(bench.partition)) as executor:
        assert executor.memory == {"contexts": 2 * CONTEXT, "buffers": 2 * 9 * ROW}


def test_weights_are_what_the_library_says(bench: Bench) -> None:
    with closing(bench.load(bench.plan())) as engine:
        assert engine.memory["weights"] == engine.plan.get_engine_stat()
    assert engine.memory == {}


def test_weights_are_the_plan_s_size_where_the_library_does_not_say(full: Bench) -> None:
    path = full.plan()
    engine = full.load(path)
    said = engine.plan.get_engine_stat() if hasattr(engine.plan, "get_engine_stat") else path.stat().st_size
    assert engine.memory["weights"] == said


def test_of_streamed_weights_those_that_stay_on_the_gpu_count(bench: Bench) -> None:
    path = bench.plan(streamable=100)
    whole = bench.load(path, weight_streaming_budget=100).memory["weights"]
    streaming = bench.load(path, weight_streaming_budget=30)
    assert streaming.memory["weights"] == whole - 70
    assert streaming.bind(bench.partition).streamed == 70
    assert bench.load(path, weight_streaming_budget=100).bind(bench.partition).streamed == 0


def test_an_instance_that_is_kept_for_the_next_executor_counts_at_the_engine(bench: Bench) -> None:
    engine: Any = bench.load(bench.plan())
    alone = dict(engine.memory)
    executor = engine.bind(bench.partition)
    taken = dict(executor.memory)
    assert engine.memory == alone
    executor.close()
    assert executor.memory == {}
    assert engine.memory == added([alone, taken])
    with closing(engine.bind(bench.partition)):
        assert engine.memory == alone


def test_contexts_that_compile_new_shapes_count_once_there_are_any(bench: Bench) -> None:
    engine = bench.load(bench.plan(), warm_up=(2,))
    with closing(engine.bind(bench.partition)) as executor:
        assert executor.memory["contexts"] == CONTEXT
        preparing = executor.preparing([(5, 3)])
        assert preparing
        preparing.result()
        assert executor.memory["contexts"] == 3 * CONTEXT


def test_an_ensemble_streams_the_weights_of_all_its_steps(bench: Bench) -> None:
    path = bench.plan(streamable=100)
    first, second = (bench.load(path, weight_streaming_budget=budget) for budget in (30, 80))
    engine = chain([Step(first, {"x": "x"}, {"y": "t"}), Step(second, {"x": "t"}, {"y": "y"})], ["y"])
    with closing(engine), closing(engine.bind(bench.partition)) as executor:
        assert executor.streamed == 70 + 20


def test_an_ensemble_takes_contexts_for_each_step_and_no_weights(bench: Bench) -> None:
    first, second = bench.load(bench.plan()), bench.load(bench.plan())
    engine = chain([Step(first, {"x": "x"}, {"y": "t"}), Step(second, {"x": "t"}, {"y": "y"})], ["y"])
    with closing(engine), closing(engine.bind(bench.partition)) as executor:
        assert not sum(engine.memory.values())
        assert executor.memory["contexts"] == engine.executor_memory["contexts"] == 2 * CONTEXT
