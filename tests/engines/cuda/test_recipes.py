"""The recipes by which an executor's graphs can be launched without the interpreter, over a simulated GPU."""

import ctypes
import importlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engines import DATATYPES, ExecutionFailed, Recipe, Step, Tensor, chain
from tests.engines.simulated import AFFINE, Bench, affine, assert_right, never_captured, rows

BATCHES = {"x": [(1, 3), (2, 3), (8, 3)]}
TWO_ROWS = ((2, 3),)


class Launcher:
    """Counts how often its recipes were revoked."""

    def __init__(self) -> None:
        self.revocations = 0

    def revoke(self) -> None:
        self.revocations += 1


@pytest.fixture
def launcher() -> Launcher:
    return Launcher()


@pytest.fixture(autouse=True)
def recipes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with functions for a driver that has none; handles of the simulated GPU are objects and become numbers."""
    module = importlib.import_module("engines.cuda.recipes")
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


def recipe_of(executor: Any, launcher: Launcher, shapes: Any = TWO_ROWS) -> Recipe:
    recipe = executor.recipe(shapes, launcher.revoke)
    assert recipe is not None
    return recipe  # type: ignore[no-any-return]


def number_at(address: int) -> Any:
    return ctypes.c_uint64.from_address(address)


def test_a_recipe_says_what_the_executor_itself_does(bench: Bench, executor: Any, launcher: Launcher) -> None:
    (x,), room = bench.pinned(rows(2)), bench.room()
    executor.enqueue([x], room).wait()
    recipe = recipe_of(executor, launcher)
    counted, length = number_at(recipe.counted).value, len(recipe.events)
    tables = np.frombuffer((ctypes.c_char * (length * 2 * 24)).from_address(recipe.tables), np.uint64).reshape(length, 2, 3)
    place, answer = recipe.addresses
    assert tables[(counted - 1) % length].tolist() == [[x.address, place, 24], [answer, room.address, 24]]
    assert (recipe.launch, recipe.record, recipe.query) == (11, 12, 13)
    assert recipe.outputs == TWO_ROWS


def test_the_executor_goes_on_behind_what_was_launched_by_a_recipe(bench: Bench, executor: Any, launcher: Launcher) -> None:
    """The device counts what is launched there too; sixteen later it is the same table's turn."""
    ready(executor)
    recipe = recipe_of(executor, launcher)
    number_at(recipe.counted).value += 16
    before = number_at(recipe.counted).value
    for seed in range(20):
        assert_right(executor, rows(2, seed))
    assert number_at(recipe.counted).value == before + 20


def test_shapes_that_are_not_ready_have_no_recipe(executor: Any, launcher: Launcher) -> None:
    assert executor.recipe(((5, 3),), launcher.revoke) is None
    ready(executor, 5)
    assert executor.recipe(((5, 3),), launcher.revoke) is not None


def test_there_is_no_recipe_without_graphs_and_where_the_copy_engines_copy(bench: Bench, launcher: Launcher) -> None:
    executors = [never_captured(bench), bench.bind(AFFINE, BATCHES, copies="engine")]
    for executor in executors:
        ready(executor)
        assert executor.recipe(TWO_ROWS, launcher.revoke) is None
        executor.close()


def test_there_is_no_recipe_without_a_driver(
    executor: Any, launcher: Launcher, recipes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(executor)
    monkeypatch.setattr(recipes, "driver_functions", lambda: None)
    assert executor.recipe(TWO_ROWS, launcher.revoke) is None


def test_recipes_are_revoked_before_an_override_and_at_its_end(executor: Any, launcher: Launcher) -> None:
    ready(executor)
    recipe_of(executor, launcher)
    with executor.overriding(graphs="off"):
        assert launcher.revocations == 1
        assert executor.recipe(TWO_ROWS, launcher.revoke) is None
    assert launcher.revocations == 2
    assert executor.recipe(TWO_ROWS, launcher.revoke) is not None


def test_recipes_are_revoked_before_graphs_are_destroyed(bench: Bench, launcher: Launcher) -> None:
    executor = bench.bind(AFFINE, BATCHES)
    ready(executor)
    recipe = recipe_of(executor, launcher)
    (graph,) = bench.gpu.graphs
    there: list[bool] = []
    executor.recipe(TWO_ROWS, lambda: there.append(graph in bench.gpu.graphs))
    executor.close()
    assert there == [True]
    assert bench.gpu.graphs == []
    assert recipe.outputs == TWO_ROWS


def test_an_eviction_revokes_recipes_and_spares_what_was_launched(
    bench: Bench, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("engines.tensorrt.shapes"), "MAX_READY_SETS", 3)
    executor = bench.bind(AFFINE, BATCHES, warm_up=(2,))
    ready(executor, 3)
    recipe = recipe_of(executor, launcher)
    number_at(recipe.launched).value += 1
    before = launcher.revocations
    for count in (4, 5):
        ready(executor, count)
    assert launcher.revocations > before
    assert {count for ((count, _),) in executor.describe()["shapes"]} == {2, 4, 5}


def test_padded_inferences_launched_by_a_recipe_are_counted(bench: Bench, launcher: Launcher) -> None:
    executor = bench.bind(AFFINE, BATCHES, batch_padding=True, warm_up="usual")
    recipe = recipe_of(executor, launcher, ((5, 3),))
    assert recipe.outputs == ((5, 3),)
    before = executor.describe()["counts"]["padded"]
    number_at(recipe.launched).value += 7
    assert executor.describe()["counts"]["padded"] == before + 7


def launch(executor: Any, recipe: Recipe, count: int, source: int, target: int) -> None:
    """As the launch loop does, up to the completion of this inference."""
    number, nbytes = number_at(recipe.counted), count * 12
    tables = np.frombuffer((ctypes.c_char * (len(recipe.events) * 2 * 24)).from_address(recipe.tables), np.uint64)
    place, answer = recipe.addresses
    tables.reshape(-1, 2, 3)[number.value % len(recipe.events)] = [[source, place, nbytes], [answer, target, nbytes]]
    executor.shapes.find(((count, 3),)).prepared.graph.launch(executor.stream)
    number.value += 1
    executor.stream.record(executor._events[(number.value - 1) % len(recipe.events)])
    executor._events[(number.value - 1) % len(recipe.events)].sync()


@pytest.mark.parametrize("seed", range(3))
def test_recipes_of_alternates_are_launched_and_both_enqueued_in_any_order(bench: Bench, launcher: Launcher, seed: int) -> None:
    wide, chance = bench.device.carve([0, 1, 2], [1, 2]), random.Random(seed)
    home = bench.bind(AFFINE, BATCHES)
    ready(home)
    executors = [home, home.alternate(wide)]
    recipes = [recipe_of(executor, launcher) for executor in executors]
    assert recipes[0].counted == recipes[1].counted
    assert all(mine != theirs for mine, theirs in zip(recipes[0][4:7], recipes[1][4:7], strict=True))
    for turn in range(60):
        which, data, room = chance.randrange(2), rows(2, turn), bench.room(256)
        if chance.random() < 0.5:
            assert_right(executors[which], data)
            continue
        ((x,), target) = bench.pinned(data), room.address
        launch(executors[which], recipes[which], 2, x.address, target)
        assert Tensor((2, 3), target, 24).array(DATATYPES["FP32"]).tolist() == affine(data).tolist()
    for executor in executors:
        executor.close()
    assert launcher.revocations == 2
    bench.close_engines()
    wide.close()


def test_an_ensemble_is_launched_by_a_recipe_as_one_model(bench: Bench, launcher: Launcher) -> None:
    first, second = (bench.load(bench.artifact(AFFINE, BATCHES)) for _ in range(2))
    whole = chain([Step(first, {"x": "IN"}, {"y": "between"}), Step(second, {"x": "between"}, {"y": "OUT"})], ["OUT"])
    executor: Any = whole.bind(bench.partition)
    data, room = rows(2), bench.room(256)
    executor.enqueue(bench.pinned(data), room).wait()
    recipe = recipe_of(executor, launcher)
    for seed in range(20):
        data = rows(2, seed)
        ((x,), target) = bench.pinned(data), room.address
        launch(executor, recipe, 2, x.address, target)
        assert Tensor((2, 3), target, 24).array(DATATYPES["FP32"]).tolist() == affine(affine(data)).tolist()
    executor.close()
    assert launcher.revocations
    whole.close()


def test_a_closed_executor_has_no_recipe(bench: Bench, launcher: Launcher) -> None:
    executor = bench.bind()
    executor.close()
    with pytest.raises(ExecutionFailed, match="takes nothing more"):
        executor.recipe(TWO_ROWS, launcher.revoke)
