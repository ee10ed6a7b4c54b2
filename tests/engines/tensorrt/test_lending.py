"""What an executor lends so that its graphs can be launched without the interpreter, over a simulated GPU."""

import ctypes
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engines import ExecutionFailed, Recipe
from tests.engines.simulated import AFFINE, Bench, assert_right, never_captured, rows

BATCHES = {"x": [(1, 3), (2, 3), (8, 3)]}
TWO_ROWS = ((2, 3),)


class Borrower:
    """Counts how often it is asked to give back."""

    def __init__(self) -> None:
        self.recalls = 0

    def recall(self) -> None:
        self.recalls += 1


@pytest.fixture
def borrower() -> Borrower:
    return Borrower()


@pytest.fixture(autouse=True)
def lending(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with functions for a driver that has none; handles of the simulated GPU are objects and become numbers."""
    module = importlib.import_module("engines.tensorrt.lending")
    monkeypatch.setattr(module, "driver_functions", lambda: (11, 12, 13))
    monkeypatch.setattr(module, "number", id)
    return module


@pytest.fixture
def executor(bench: Bench) -> Iterator[Any]:
    executor = bench.bind(AFFINE, BATCHES)
    yield executor
    executor.close()


def ready(executor: Any, count: int = 2) -> None:
    """Make shapes of so many rows ready."""
    assert_right(executor, rows(count))


def lent(executor: Any, borrower: Borrower, shapes: Any = TWO_ROWS) -> Recipe:
    recipe = executor.lend(shapes, borrower.recall)
    assert recipe is not None
    return recipe  # type: ignore[no-any-return]


def number_at(address: int) -> Any:
    return ctypes.c_uint64.from_address(address)


def test_a_recipe_says_what_the_executor_itself_does(bench: Bench, executor: Any, borrower: Borrower) -> None:
    (x,), room = bench.pinned(rows(2)), bench.room()
    executor.enqueue([x], room).wait()
    recipe = lent(executor, borrower)
    counted, length = number_at(recipe.counted).value, len(recipe.events)
    tables = np.frombuffer((ctypes.c_char * (length * 2 * 24)).from_address(recipe.tables), np.uint64).reshape(length, 2, 3)
    place, answer = recipe.addresses
    assert tables[(counted - 1) % length].tolist() == [[x.address, place, 24], [answer, room.address, 24]]
    assert (recipe.launch, recipe.record, recipe.query) == (11, 12, 13)
    assert recipe.outputs == TWO_ROWS


def test_the_executor_goes_on_behind_what_was_launched_by_a_recipe(bench: Bench, executor: Any, borrower: Borrower) -> None:
    """The device counts what is launched there too; sixteen later it is the same table's turn."""
    ready(executor)
    recipe = lent(executor, borrower)
    number_at(recipe.counted).value += 16
    before = number_at(recipe.counted).value
    for seed in range(20):
        assert_right(executor, rows(2, seed))
    assert number_at(recipe.counted).value == before + 20


def test_shapes_that_are_not_ready_are_not_lent(executor: Any, borrower: Borrower) -> None:
    assert executor.lend(((5, 3),), borrower.recall) is None
    ready(executor, 5)
    assert executor.lend(((5, 3),), borrower.recall) is not None


def test_nothing_is_lent_without_graphs_and_where_the_copy_engines_copy(bench: Bench, borrower: Borrower) -> None:
    executors = [never_captured(bench), bench.bind(AFFINE, BATCHES, copies="engine")]
    for executor in executors:
        ready(executor)
        assert executor.lend(TWO_ROWS, borrower.recall) is None
        executor.close()


def test_nothing_is_lent_without_a_driver(
    executor: Any, borrower: Borrower, lending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(executor)
    monkeypatch.setattr(lending, "driver_functions", lambda: None)
    assert executor.lend(TWO_ROWS, borrower.recall) is None


def test_what_is_lent_is_taken_back_before_an_override_and_at_its_end(executor: Any, borrower: Borrower) -> None:
    ready(executor)
    lent(executor, borrower)
    with executor.overriding(graphs="off"):
        assert borrower.recalls == 1
        assert executor.lend(TWO_ROWS, borrower.recall) is None
    assert borrower.recalls == 2
    assert executor.lend(TWO_ROWS, borrower.recall) is not None


def test_what_is_lent_is_taken_back_before_graphs_are_destroyed(bench: Bench, borrower: Borrower) -> None:
    executor = bench.bind(AFFINE, BATCHES)
    ready(executor)
    recipe = lent(executor, borrower)
    graph = executor._shapes.find(TWO_ROWS).prepared.graph
    there: list[bool] = []
    executor._loans.borrow(lambda: there.append(graph.handle is not None))
    executor.close()
    assert there == [True]
    assert recipe.outputs == TWO_ROWS


def test_an_eviction_takes_back_what_is_lent_and_spares_what_was_launched(
    bench: Bench, borrower: Borrower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("engines.tensorrt.shapes"), "MAX_READY_SETS", 3)
    executor = bench.bind(AFFINE, BATCHES, warm_up=(2,))
    ready(executor, 3)
    recipe = lent(executor, borrower)
    number_at(recipe.launched).value += 1
    before = borrower.recalls
    for count in (4, 5):
        ready(executor, count)
    assert borrower.recalls > before
    assert {shapes[0][0] for shapes in executor._shapes.ready_sets()} == {2, 4, 5}
    executor.close()


def test_padded_inferences_launched_by_a_recipe_are_counted(bench: Bench, borrower: Borrower) -> None:
    executor = bench.bind(AFFINE, BATCHES, batch_padding=True, warm_up="usual")
    recipe = lent(executor, borrower, ((5, 3),))
    assert recipe.outputs == ((5, 3),)
    before = executor.describe()["counts"]["padded"]
    number_at(recipe.launched).value += 7
    assert executor.describe()["counts"]["padded"] == before + 7
    executor.close()


def test_a_closed_executor_lends_nothing(bench: Bench, borrower: Borrower) -> None:
    executor = bench.bind()
    executor.close()
    with pytest.raises(ExecutionFailed, match="takes nothing more"):
        executor.lend(TWO_ROWS, borrower.recall)
