"""F59 to F61: models one after another as one engine, on the simulated GPU in one captured graph, on a CPU in turn."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engines import (
    Cancelled,
    Engine,
    ExecutionFailed,
    ModelRefused,
    RuntimeSettings,
    Step,
    Tensor,
    TensorMismatch,
    TensorSpec,
    chain,
    load_engine,
)
from engines.base import Trimming
from partitions import open_cpu
from tests import models
from tests.engines.simulated import ROWS, Bench, affine, rows
from tests.engines.tensorrt.test_data_dependent import NONZERO
from tests.engines.tensorrt.test_shapes import Held
from tests.engines.tensors import Array, array, run
from tests.simulation.plans import Ranges

LOGGER = "greenlane.engines"
HALVE = (
    "halve (float[m, 3] a) => (float[m, 3] half, float[m, 3] same) <float two = {2}> { half = Div(a, two) same = Identity(a) }"
)
HALF_ROWS: Ranges = {"a": [(0, 3), (2, 3), (8, 3)]}
ADD = "add (float[k, 3] left, float[k, 3] right) => (float[k, 3] sum) { sum = Add(left, right) }"
ADD_ROWS: Ranges = {"left": [(0, 3), (2, 3), (8, 3)], "right": [(0, 3), (2, 3), (8, 3)]}
AFFINE = "affine (float[n, 3] x) => (float[n, 3] y) <float three = {3}> { t = Add(x, x) y = Sub(t, three) }"


def steps(first: Engine, second: Engine, third: Engine) -> list[Step]:
    """IMAGE to y to half; and half and IMAGE to OUT."""
    return [
        Step(first, {"x": "IMAGE"}, {"y": "middle"}),
        Step(second, {"a": "middle"}, {"half": "half"}),
        Step(third, {"left": "half", "right": "IMAGE"}, {"sum": "OUT"}),
    ]


def expected(data: Array) -> Array:
    return affine(data) / 2 + data


class Kit:
    """Loads the three models for a partition."""

    def __init__(self, engines: Sequence[Engine], partition: Any) -> None:
        self.engines = list(engines)
        self.partition = partition

    def chain(self, outputs: Sequence[str] = ("OUT",), **settings: Any) -> Engine:
        return chain(steps(*self.engines), outputs, RuntimeSettings(**settings) if settings else None)


@pytest.fixture
def gpu(bench: Bench) -> Kit:
    plans = (bench.plan(AFFINE, ROWS), bench.plan(HALVE, HALF_ROWS), bench.plan(ADD, ADD_ROWS))
    return Kit([bench.load(plan) for plan in plans], bench.partition)


@pytest.fixture
def cpu(tmp_path: Path) -> Iterator[Kit]:
    with closing(open_cpu()) as device, closing(device.carve([0])) as partition:
        texts = (AFFINE, HALVE, ADD)
        yield Kit([load_engine(models.save(tmp_path / f"{text.split()[0]}.onnx", text)) for text in texts], partition)


@pytest.fixture(params=["gpu", "cpu"])
def kit(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_f59_each_model_of_a_chain_gets_the_outputs_of_those_before(kit: Kit) -> None:
    engine = kit.chain()
    assert [spec.name for spec in engine.signature.inputs] == ["IMAGE"]
    assert [spec.name for spec in engine.signature.outputs] == ["OUT"]
    with closing(engine.bind(kit.partition)) as executor:
        for turn in range(6):
            data = rows(1 + turn % 3, turn)
            assert run(executor, data)[0].tolist() == expected(data).tolist()
        assert executor.engine is engine
        assert "\n" not in repr(executor) + repr(engine)
    engine.close()


def test_an_alternate_of_a_chain_takes_turns_with_it_and_says_what_it_adds(kit: Kit) -> None:
    with closing(kit.chain().bind(kit.partition)) as executor, closing(executor.alternate(kit.partition)) as other:
        for turn in range(6):
            data = rows(1 + turn % 3, turn)
            assert run((executor, other)[turn % 2], data)[0].tolist() == expected(data).tolist()
        assert "adds" not in executor.describe()
        assert other.describe()["adds"] == ({} if "tensorrt" in executor.engine.platform else other.memory)
        executor.close()
        assert run(other, rows(2))[0].tolist() == expected(rows(2)).tolist()


def test_f59_tensors_between_models_can_be_outputs_of_the_chain(kit: Kit) -> None:
    with closing(kit.chain(["half", "OUT", "middle"]).bind(kit.partition)) as executor:
        data = rows(2)
        outputs = [array(tensor).tolist() for tensor in executor.enqueue([Tensor.of(data)]).wait()]
        assert outputs == [each.tolist() for each in (affine(data) / 2, expected(data), affine(data))]
        executor.engine.close()


def test_f59_many_in_flight_waited_for_in_any_order_each_have_their_own_data(kit: Kit) -> None:
    with closing(kit.chain().bind(kit.partition)) as executor:
        given = [rows(1 + turn % 4, turn) for turn in range(20)]
        works = [executor.enqueue([Tensor.of(data)]) for data in given]
        for data, work in reversed(list(zip(given, works, strict=True))):
            assert array(work.wait()[0]).tolist() == expected(data).tolist()
            assert array(work.wait()[0]).tolist() == expected(data).tolist()
        executor.engine.close()


def test_f59_invalid_shapes_are_refused_and_the_next_inference_is_right(kit: Kit) -> None:
    with closing(kit.chain().bind(kit.partition)) as executor:
        for wrong in ([], [Tensor.of(np.zeros((2, 4), np.float32))], [Tensor.of(rows(2)), Tensor.of(rows(2))]):
            with pytest.raises(TensorMismatch):
                executor.enqueue(wrong)
        assert run(executor, rows(2))[0].tolist() == expected(rows(2)).tolist()
    with pytest.raises(ExecutionFailed, match="takes nothing more; bind the engine again"):
        executor.enqueue([Tensor.of(rows(2))])
    executor.engine.close()


def test_f59_a_chain_moves_and_takes_overrides_as_any_executor(kit: Kit) -> None:
    executor = kit.chain().bind(kit.partition)
    moved = executor.rebind(kit.partition)
    executor.close()
    with moved.overriding(graphs="off"):
        assert run(moved, rows(3))[0].tolist() == expected(rows(3)).tolist()
    assert run(moved, rows(3))[0].tolist() == expected(rows(3)).tolist()
    assert moved.preparing([(3, 3)]) is None
    assert moved.describe()["graphs"] in ("captured", "none")
    moved.close()
    moved.engine.close()


def test_f59_a_chain_is_one_graph_without_copies_between_models(gpu: Kit, bench: Bench) -> None:
    with closing(gpu.chain(graphs="required").bind(gpu.partition)) as executor:
        run(executor, rows(2))
        bench.gpu.log.clear()
        run(executor, rows(2, 1))
        calls = [call for call in bench.gpu.log if call in ("cuGraphLaunch", "launch", "cuMemcpyAsync") or "execute" in call]
        assert calls == ["cuGraphLaunch"]
        (graph,) = {id(graph): graph for graph in bench.gpu.graphs}.values()
        assert len(graph.operations) == 5  # Copies in, three engines, copies out.
        executor.engine.close()


def test_f59_closing_a_chain_leaves_its_engines_which_also_run_alone(gpu: Kit, bench: Bench) -> None:
    before = bench.holdings()
    engine = gpu.chain()
    engine.bind(gpu.partition).close()
    engine.bind(gpu.partition).close()
    engine.close()
    assert bench.holdings() == before
    with closing(gpu.engines[0].bind(gpu.partition)) as alone:
        assert run(alone, rows(2))[0].tolist() == affine(rows(2)).tolist()


def test_a_chain_is_no_step_of_another_one(gpu: Kit) -> None:
    engine = gpu.chain()
    with pytest.raises(ModelRefused, match="a chain cannot be a step of another one; name its steps instead"):
        chain([Step(engine, {"IMAGE": "i"}, {"OUT": "o"})], ["o"])
    engine.close()


def test_f60_where_graphs_are_required_the_engine_that_cannot_be_captured_is_named(bench: Bench) -> None:
    lazy = bench.load(bench.plan(HALVE, HALF_ROWS), dynamic_shapes_kernel_specialization_strategy="lazy")
    others = [bench.load(bench.plan(text, ranges)) for text, ranges in ((AFFINE, ROWS), (ADD, ADD_ROWS))]
    kit, before = Kit([others[0], lazy, others[1]], bench.partition), bench.holdings()
    why = r"graphs are required, but it cannot be captured as one: halve1\.plan: its inputs are dynamic and its kernels 'lazy'"
    with pytest.raises(ModelRefused, match=why):
        kit.chain(graphs="required").bind(bench.partition)
    assert bench.holdings() == before


def test_f60_a_chain_that_cannot_be_captured_runs_without_a_graph_with_one_warning(
    bench: Bench, gpu: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    bench.gpu.capturable = False
    with closing(gpu.chain().bind(gpu.partition)) as executor:
        for seed in range(3):
            assert run(executor, rows(2, seed))[0].tolist() == expected(rows(2, seed)).tolist()
        assert executor.describe()["graphs"] == "none"
        executor.engine.close()
    (message,) = caplog.messages
    assert "affine1.plan + halve2.plan + add3.plan: cannot be captured as a graph" in message


def test_f60_a_size_that_depends_on_data_is_refused_with_engine_and_output(bench: Bench) -> None:
    first = bench.load(bench.plan(NONZERO, {"x": [(1,), (5,), (9,)]}))
    engine = chain([Step(first, {"x": "IN"}, {"y": "PLACES"})], ["PLACES"])
    before = bench.holdings()
    with pytest.raises(ModelRefused, match=r"the size of output 'y' of nonzero1\.plan depends on data"):
        engine.bind(bench.partition)
    assert bench.holdings() == before
    engine.close()


def test_a_shape_that_a_later_model_refuses_raises_its_error(bench: Bench) -> None:
    small: Ranges = {"a": [(1, 3), (2, 3), (4, 3)]}
    plans = (bench.plan(AFFINE, ROWS), bench.plan(HALVE, small), bench.plan(ADD, ADD_ROWS))
    executor: Any = chain(steps(*map(bench.load, plans)), ["OUT"]).bind(bench.partition)
    with pytest.raises((TensorMismatch, ExecutionFailed), match="'a'"):
        run(executor, rows(6))
    assert run(executor, rows(4))[0].tolist() == expected(rows(4)).tolist()
    executor.close()
    executor.engine.close()


@pytest.fixture
def named(bench: Bench) -> Kit:
    """As `gpu`, with plans that kept the names of their dimensions; the second takes the smallest batches."""
    ranges: tuple[Ranges, ...] = ({"x": [(1, 3), (4, 3), (32, 3)]}, {"a": [(2, 3), (4, 3), (8, 3)]}, ADD_ROWS)
    plans = [bench.artifact(text, each) for text, each in zip((AFFINE, HALVE, ADD), ranges, strict=True)]
    return Kit([bench.load(plan) for plan in plans], bench.partition)


def test_shapes_that_are_new_are_prepared_while_others_are_served(named: Kit, bench: Bench) -> None:
    before = bench.holdings()
    with closing(named.chain().bind(named.partition)) as executor:
        run(executor, rows(4))
        preparing: Any = executor
        future = preparing.preparing([(5, 3)])
        assert future is not None
        assert run(executor, rows(4))[0].tolist() == expected(rows(4)).tolist()
        future.result(30)
        assert preparing.preparing([(5, 3)]) is None
        captures = len(bench.gpu.graphs)
        for seed in range(2):
            for count in (5, 4):
                assert run(executor, rows(count, seed))[0].tolist() == expected(rows(count, seed)).tolist()
        assert len(bench.gpu.graphs) == captures
        moved = executor.rebind(named.partition)
        executor.close()
        assert run(moved, rows(5))[0].tolist() == expected(rows(5)).tolist()
        assert len(bench.gpu.graphs) == captures
        moved.close()
        engine = executor.engine
    engine.close()
    assert bench.holdings() == before


def test_prepared_shapes_run_while_others_are_compiled(named: Kit, bench: Bench) -> None:
    with closing(named.chain().bind(named.partition)) as executor:
        preparing: Any = executor
        preparing.preparing([(5, 3)]).result(30)
        held = Held(bench, "IExecutionContext.set_input_shape")
        future = preparing.preparing([(6, 3)])
        held.wait()
        works = [executor.enqueue([Tensor.of(rows(5, seed))]) for seed in range(3)]
        held.release()
        future.result(30)
        for seed, work in enumerate(works):
            assert array(work.wait()[0]).tolist() == expected(rows(5, seed)).tolist()
        executor.engine.close()


def test_a_preparation_that_fails_costs_its_own_shapes_and_nothing_else(named: Kit, bench: Bench) -> None:
    with closing(named.chain().bind(named.partition)) as executor:
        preparing: Any = executor
        preparing.preparing([(5, 3)]).result(30)
        bench.gpu.fail("IExecutionContext.execute_async_v3")
        with pytest.raises(ExecutionFailed, match=r"running affine1\.plan"):
            preparing.preparing([(6, 3)]).result(30)
        for count in (4, 5, 6):
            assert run(executor, rows(count))[0].tolist() == expected(rows(count)).tolist()
        executor.engine.close()


def test_the_chain_takes_as_many_rows_as_every_step_does(named: Kit) -> None:
    engine = named.chain()
    assert engine.signature.inputs[0].limits == ((2, 8), (3, 3))
    with closing(engine.bind(named.partition)) as executor:
        for count in (1, 9):
            with pytest.raises(TensorMismatch, match=r"'IMAGE': dimension 0 .* the engine was built for 2 to 8"):
                run(executor, rows(count))
    engine.close()


def test_a_chain_is_ready_for_usual_shapes_and_pads_to_them(named: Kit, bench: Bench) -> None:
    with closing(named.chain(warm_up="usual", batch_padding=True).bind(named.partition)) as executor:
        said = executor.describe()
        assert sorted(shapes[0][0] for shapes in said["shapes"]) == [2, 4, 8]  # type: ignore[attr-defined]
        graphs = len(bench.gpu.graphs)
        for count in (3, 5, 7):
            assert run(executor, rows(count))[0].tolist() == expected(rows(count)).tolist()
        assert len(bench.gpu.graphs) == graphs
        assert executor.describe()["counts"]["padded"] == 3  # type: ignore[index]
        executor.engine.close()


def test_a_chain_is_ready_for_the_warm_up_shapes(named: Kit) -> None:
    with closing(named.chain(warm_up=(3, (("IMAGE", (6, 3)),))).bind(named.partition)) as executor:
        assert sorted(shapes[0][0] for shapes in executor.describe()["shapes"]) == [3, 6]  # type: ignore[attr-defined]
        executor.engine.close()
    with pytest.raises(ModelRefused, match="warm_up: input 'IMAGE': dimension 0"):
        named.chain(warm_up=(9,)).bind(named.partition)


def test_a_step_that_is_narrowed_narrows_the_chain(cpu: Kit) -> None:
    chosen = steps(*cpu.engines)
    signature = cpu.engines[1].signature
    fixed = replace(signature, inputs=(replace(signature.inputs[0], dims=(4, 3)),))
    chosen[1] = replace(chosen[1], signature=fixed, label="step 'halve'")
    engine = chain(chosen, ["OUT"])
    assert engine.signature.inputs[0].dims == (4, 3)
    assert engine.signature.outputs[0].dims == (4, 3)
    with closing(engine.bind(cpu.partition)) as executor:
        assert run(executor, rows(4))[0].tolist() == expected(rows(4)).tolist()
        with pytest.raises(TensorMismatch, match="expected 4"):
            run(executor, rows(3))
    chosen[2] = replace(chosen[2], signature=replace(cpu.engines[2].signature, inputs=_of_rows(cpu.engines[2], 5)))
    with pytest.raises(ModelRefused, match=r"step 2: dimension 0 of input '(left|right)' is 5, but 4 elsewhere"):
        chain(chosen, ["OUT"])


def _of_rows(engine: Engine, count: int) -> tuple[TensorSpec, ...]:
    return tuple(replace(spec, dims=(count, 3)) for spec in engine.signature.inputs)


def test_limits_that_no_input_meets_are_refused(cpu: Kit) -> None:
    chosen = steps(*cpu.engines)
    for index, limits in ((0, (1, 2)), (1, (3, 4))):
        signature = cpu.engines[index].signature
        narrowed = replace(signature, inputs=(replace(signature.inputs[0], limits=(limits,)),))
        chosen[index] = replace(chosen[index], signature=narrowed)
    with pytest.raises(ModelRefused, match="dimension 0 of input 'IMAGE' would have to be 3 or more and 2 or less"):
        chain(chosen, ["OUT"])


def test_named_dimensions_of_a_later_step_s_inputs_are_unified(cpu: Kit) -> None:
    """The batch of both is one, so the chain's requests can be joined."""
    engine = chain(
        [
            Step(cpu.engines[1], {"a": "IMAGE"}, {"half": "half"}),
            Step(cpu.engines[2], {"left": "MORE", "right": "half"}, {"sum": "OUT"}),
        ],
        ["OUT"],
    )
    assert [spec.dims[0] for spec in (*engine.signature.inputs, *engine.signature.outputs)] == ["m", "m", "m"]


def test_on_a_cpu_a_work_is_cancelled_before_or_after_it_ended(cpu: Kit) -> None:
    with closing(cpu.chain().bind(cpu.partition)) as executor:
        first, second = (executor.enqueue([Tensor.of(rows(2, seed))]) for seed in range(2))
        first.cancel()
        with pytest.raises(Cancelled):
            first.wait()
        assert array(second.wait()[0]).tolist() == expected(rows(2, 1)).tolist()
        second.cancel()
        assert array(second.wait()[0]).tolist() == expected(rows(2, 1)).tolist()


def test_on_a_cpu_a_chain_runs_its_warm_up_shapes(cpu: Kit, caplog: pytest.LogCaptureFixture) -> None:
    with closing(cpu.chain(warm_up=(1, 4)).bind(cpu.partition)) as executor:
        assert executor.describe()["shapes"] == [[[1, 3]], [[4, 3]]]
        assert run(executor, rows(4))[0].tolist() == expected(rows(4)).tolist()
        with closing(executor.rebind(cpu.partition)) as moved, closing(cpu.engines[0].bind(cpu.partition)) as alone:
            first: Any = moved
            assert [int(re.findall(r"(\d+) run", repr(each))[0]) for each in (first.executors[0], alone)] == [3, 1]
            assert moved.describe()["shapes"] == executor.describe()["shapes"]
            assert run(moved, rows(4))[0].tolist() == expected(rows(4)).tolist()
    with pytest.raises(ModelRefused, match="warm_up: the model has no input 'z'"):
        cpu.chain(warm_up=((("z", (1, 3)),),))
    assert not caplog.messages


def test_on_a_cpu_a_warm_up_that_a_step_refuses_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The step takes at least four rows, which its file does not say."""
    text = "pick (float[n, 3] x) => (float[1, 3] y) <int64[1] at = {3}> { y = Gather(x, at) }"
    engine = load_engine(models.save(tmp_path / "pick.onnx", text))
    with closing(open_cpu()) as device, closing(device.carve([0])) as partition:
        chained = chain([Step(engine, {"x": "IN"}, {"y": "OUT"})], ["OUT"], RuntimeSettings(warm_up=(2,)))
        with closing(chained.bind(partition)) as executor:
            assert run(executor, rows(4))[0].tolist() == rows(4)[3:].tolist()
    assert "failed, so the first request pays for it" in caplog.messages[-1]
    assert caplog.messages[-1].startswith("<SequenceEngine")


def test_on_a_cpu_graphs_that_are_required_are_refused(cpu: Kit) -> None:
    with pytest.raises(ModelRefused, match="runs its models in turn"):
        cpu.chain(graphs="required").bind(cpu.partition)


@pytest.mark.parametrize(
    ("edit", "outputs", "why"),
    [
        (lambda steps: [], ["OUT"], "a chain of no steps"),
        (lambda steps: steps, [], "a chain without outputs"),
        (lambda steps: steps, ["IMAGE"], "no step gives 'IMAGE'"),
        (lambda steps: steps[::-1], ["OUT"], "step 0: input 'left' takes 'half', which only a later step gives"),
        (
            lambda steps: [Step(steps[0].engine, {}, {"y": "m"})],
            ["m"],
            "step 0: no tensor is given for input 'x'; the model's",
        ),
        (lambda steps: [Step(steps[0].engine, {"x": "i"}, {"z": "m"})], ["m"], "step 0: the model has no 'z'; there are y"),
        (lambda steps: [Step(steps[0].engine, {"x": "i"}, {"y": "i"})], ["i"], "which only a later step gives"),
        (lambda steps: [*steps, steps[0]], ["OUT"], "step 3: output 'y' gives 'middle', which there is already"),
        (
            lambda steps: [Step(steps[1].engine, {"a": "i"}, {"half": "m", "same": "m"})],
            ["m"],
            "step 0: two outputs give one tensor",
        ),
    ],
)
def test_steps_that_do_not_fit_together_are_refused_with_the_step_and_the_tensor(
    cpu: Kit, edit: Any, outputs: list[str], why: str
) -> None:
    with pytest.raises(ModelRefused, match=why):
        chain(edit(steps(*cpu.engines)), outputs)


def test_types_and_ranks_are_compared(cpu: Kit, tmp_path: Path) -> None:
    whole = load_engine(models.save(tmp_path / "whole.onnx", "whole (int64[n, 3] x) => (int64[n, 3] y) { y = Add(x, x) }"))
    with pytest.raises(ModelRefused, match=r"step 1: input 'x' is INT64 \[-1, 3\], but 'middle' is FP32 \[-1, 3\]"):
        chain([steps(*cpu.engines)[0], Step(whole, {"x": "middle"}, {"y": "OUT"})], ["OUT"])


def test_each_step_that_keeps_memory_gives_it_back(cpu: Kit) -> None:
    """Each step shows it by the inference that it runs for that."""
    with closing(cpu.chain().bind(cpu.partition)) as executor:
        executor.enqueue([Tensor.of(np.zeros((1 << 21, 3), np.float32))]).wait()
        before = repr(executor)
        cast(Trimming, executor).trim(0, idle=True)
        assert before.count(" 2 runs") == repr(executor).count(" 3 runs") == len(cpu.engines)
