"""Which calls of the library leave pauses between loads of kernels, and which end those of others, on a simulated GPU."""

from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import copy_context

import pytest

from partitions.cuda.kernel_loads import KERNEL_LOADS, REST
from tests.engines.simulated import Bench, assert_right, rows
from tests.partitions.cuda.pacing import FakeLibrary, paced_process

RUN = "IExecutionContext.execute_async_v3"


@pytest.fixture
def library() -> Iterator[FakeLibrary]:
    with paced_process() as library:
        yield library


@pytest.fixture
def elsewhere(library: FakeLibrary) -> Iterator[FakeLibrary]:
    """Another model is being loaded in the background."""
    context, load = copy_context(), ExitStack()
    for block in (KERNEL_LOADS.background, KERNEL_LOADS.loading):
        context.run(lambda block=block: load.enter_context(block()))
    assert library.rest == REST
    yield library
    assert library.rest == REST, "something still counts as urgent"
    context.run(load.close)


def paces(bench: Bench, library: FakeLibrary, moment: str) -> list[int]:
    """The pace at each such call from now on, added to the list as they are made."""
    found: list[int] = []

    def note() -> None:
        found.append(library.rest)
        bench.gpu.meanwhile(moment, note)

    bench.gpu.meanwhile(moment, note)
    return found


def test_the_kernels_of_a_model_that_is_bound_in_the_background_are_loaded_with_pauses(
    bench: Bench, library: FakeLibrary
) -> None:
    engine, found = bench.load(bench.plan()), paces(bench, library, RUN)
    with KERNEL_LOADS.background():
        executor = engine.bind(bench.partition)
    assert REST in found
    assert library.rest == 0
    executor.close()


def test_a_model_that_is_bound_because_a_request_waits_ends_the_pauses_of_others(bench: Bench, elsewhere: FakeLibrary) -> None:
    engine, found = bench.load(bench.plan()), paces(bench, elsewhere, RUN)
    executor = engine.bind(bench.partition)
    assert set(found) == {0}
    executor.close()


def test_an_inference_without_a_graph_ends_the_pauses_and_one_with_a_graph_does_not(
    bench: Bench, elsewhere: FakeLibrary
) -> None:
    captured, plain = bench.bind(), bench.bind(graphs="off")
    for executor in (captured, plain):
        assert_right(executor, rows(2))
    known, found = len(elsewhere.rests), paces(bench, elsewhere, RUN)
    assert_right(captured, rows(2, 1))
    assert len(elsewhere.rests) == known
    assert_right(plain, rows(2, 1))
    assert found == [0]
    for executor in (captured, plain):
        executor.close()


def test_a_new_shape_ends_the_pauses(bench: Bench, elsewhere: FakeLibrary) -> None:
    executor = bench.bind()
    found = paces(bench, elsewhere, RUN)
    assert_right(executor, rows(5))
    assert set(found) == {0}


def test_what_is_freed_ends_the_pauses_also_in_the_background(bench: Bench, elsewhere: FakeLibrary) -> None:
    engine = bench.load(bench.plan())
    executor = engine.bind(bench.partition)
    with KERNEL_LOADS.background():
        for each in (executor, engine):
            known = len(elsewhere.rests)
            each.close()
            assert 0 in elsewhere.rests[known:]
