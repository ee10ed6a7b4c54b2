"""The engine on a simulated TensorRT 10.11 and 11.4, which lack much of what TensorRT-RTX has."""

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from engines import ModelRefused, Tensor
from tests.engines.simulated import AFFINE, ROWS, Bench, assert_right, rows
from tests.engines.tensorrt.test_data_dependent import FIVE, NONZERO, answer, expected, sparse
from tests.simulation.plans import Ranges

MORE: Ranges = {"x": [(1, 3), (9, 3), (20, 3)]}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"allocation_strategy": "user_managed"},
        {"allocation_strategy": "on_profile_change"},
        {"graphs": "off"},
        {"copies": "engine"},
    ],
    ids=str,
)
def test_results_are_right_with_two_profiles_in_every_graph_mode(full: Bench, settings: dict[str, Any]) -> None:
    before, engine = full.holdings(), full.load(full.plan(AFFINE, ROWS, MORE), **settings)
    executor = engine.bind(full.partition)
    for count, seed in ((2, 0), (2, 1), (2, 2), (20, 3), (2, 4)):
        assert_right(executor, rows(count, seed))
    executor.close()
    engine.close()
    gc.collect()
    assert full.holdings() == before


def test_copies_and_engine_are_one_graph_of_ours(full: Bench) -> None:
    executor = full.bind()
    for seed in range(3):
        assert_right(executor, rows(5, seed))
    begun = len(full.gpu.log)
    assert_right(executor, rows(5, 3))
    assert "cuGraphLaunch" in full.gpu.log[begun:]
    assert "IExecutionContext.execute_async_v3" not in full.gpu.log[begun:]
    executor.close()


def test_inferences_without_a_graph_do_not_wait_while_another_partition_opens_its_instance(full: Bench) -> None:
    """The library has no cache of kernels, so there is nothing that two threads must not use at once."""
    engine = full.load(full.plan())
    with closing(full.device.carve([1])) as other, ThreadPoolExecutor(1) as thread:
        first = engine.bind(full.partition)
        full.gpu.capturable = False
        assert_right(first, rows(5))
        assert first.describe()["graphs"] == "none"
        served = list[object]()

        def serve() -> None:
            served.append(thread.submit(full.partition.run, lambda: assert_right(first, rows(5, 1))).result(10))

        full.gpu.meanwhile("ICudaEngine.create_execution_context", serve)
        second = engine.bind(other)
        assert len(served) == 1
        second.close()
        first.close()


def test_weights_are_streamed_without_a_graph(full: Bench) -> None:
    executor = full.load(full.plan(streamable=1000), weight_streaming_budget=1).bind(full.partition)
    assert_right(executor, rows(4))
    assert executor.describe()["graphs"] == "none"
    executor.close()


@pytest.mark.parametrize("copies", ["sm", "engine"])
def test_f32_outputs_whose_size_depends_on_data_have_the_shapes_that_the_data_give(full: Bench, copies: str) -> None:
    """F32, F67: with several in flight and auxiliary streams, and never as a graph."""
    data = [sparse(5, 1, 3), sparse(5), sparse(9, *range(9)), sparse(1, 0)] * 5
    executor = full.load(full.plan(NONZERO, FIVE, aux_streams=1), copies=copies).bind(full.partition)
    works = [executor.enqueue([Tensor.of(each)]) for each in data]
    assert [answer(work) for work in works] == [expected(each) for each in data]
    assert executor.describe()["graphs"] == "none"
    executor.close()


def test_f67_graphs_that_are_required_of_data_dependent_outputs_are_refused(full: Bench) -> None:
    """F67."""
    with pytest.raises(ModelRefused, match="the size of output 'y' depends on data"):
        full.bind(NONZERO, FIVE, graphs="required")


@pytest.mark.parametrize(
    "setting",
    [{"cuda_graph_strategy": "whole_graph_capture"}, {"dynamic_shapes_kernel_specialization_strategy": "lazy"}],
    ids=str,
)
def test_a_strategy_of_the_other_library_is_a_warning(full: Bench, setting: dict[str, str]) -> None:
    """F42."""
    with pytest.warns(UserWarning, match=rf"TensorRT 1[01]\..* has no {next(iter(setting))}"):
        executor = full.bind(**setting)
    assert_right(executor, rows(4))
    executor.close()


def test_auxiliary_streams_are_the_partition_s_own(full: Bench) -> None:
    """F75."""
    executor = full.load(full.plan(aux_streams=2)).bind(full.partition)
    (green,) = full.gpu.contexts
    assert sum(not stream.closed for stream in green.streams) == 3
    for seed in range(3):
        assert_right(executor, rows(5, seed))
    executor.close()
    assert sum(not stream.closed for stream in green.streams) == 1
