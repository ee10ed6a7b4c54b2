"""What the driver of a simulated GPU takes for kernels and graphs, and at which executor it counts."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from engines import Builds, Step, chain, load_engine
from engines.base import MEMORY
from engines.memory import added, shared_by, shared_memory
from engines.model_files.cache_folder import CacheFolder
from partitions.cuda import driver_memory
from tests.engines.simulated import AFFINE, Bench, assert_right, never_captured, rows
from tests.engines.tensors import run
from tests.simulation.gpu import DRIVER_STEP, MIB
from tests.simulation.tensorrt_config import COMPILING

KERNEL = 4 * MIB
GRAPH = 2 * MIB
AGAIN = AFFINE.replace("{3}", "{5}")
LOOK = "nvmlDeviceGetComputeRunningProcesses_v3"


@pytest.fixture
def bench(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Of which kernels and graphs show, as whole steps of which nothing is left. Threads wait for each other on busy machines
    too.
    """
    monkeypatch.setattr(driver_memory, "PATIENCE", 60.0)
    monkeypatch.setattr(driver_memory, "TURN", 60.0)
    gpu = bench.gpu
    gpu.kernel_bytes, gpu.graph_bytes, gpu.driver_uses = KERNEL, GRAPH, DRIVER_STEP
    return bench


def bound(bench: Bench, warm_up: tuple[int, ...] = (2,)) -> Any:
    return bench.load(bench.plan(), warm_up=warm_up).bind(bench.partition)


def kernels(executor: Any) -> int:
    return added(shared_memory(executor).values()).get("kernels", 0)


def graphs(executor: Any) -> int:
    return int(executor.memory.get("graphs", 0))


def parts(executor: Any) -> tuple[int, int, int]:
    """Kernels, graphs, and what was not measured."""
    said = executor.describe().get("driver_memory", {})
    assert said.get("kernels", 0) == kernels(executor)
    assert said.get("graphs", 0) == graphs(executor)
    return kernels(executor), graphs(executor), said.get("unmeasured", 0)


def prepare(executor: Any, count: int) -> None:
    future = executor.preparing([(count, 3)])
    assert future
    future.result(30)


def test_each_set_of_shapes_has_a_kernel_and_a_graph(bench: Bench) -> None:
    with closing(bound(bench)) as executor:
        assert parts(executor) == (KERNEL, GRAPH, 0)
        assert {"kernels", "graphs"} <= set(MEMORY)
        assert_right(executor, rows(5))
        assert parts(executor) == (2 * KERNEL, 2 * GRAPH, 0)
    assert (executor.memory, dict(executor.shared_memory)) == ({}, {})


def test_shapes_that_are_compiled_in_the_background_count_too(bench: Bench) -> None:
    with closing(bound(bench)) as executor:
        prepare(executor, 5)
        assert parts(executor) == (2 * KERNEL, 2 * GRAPH, 0)


def test_an_inference_asks_for_nothing(bench: Bench) -> None:
    with closing(bound(bench)) as executor:
        begun = len(bench.gpu.log)
        for seed in range(3):
            assert_right(executor, rows(2, seed))
        assert LOOK not in bench.gpu.log[begun:]
        assert_right(executor, rows(5))
        assert bench.gpu.log[begun:].count(LOOK) == 4, "two for the kernel and two for the graph"


def test_without_graphs_nothing_is_asked_after_the_first_inference(bench: Bench) -> None:
    executor = never_captured(bench)
    begun = len(bench.gpu.log)
    assert_right(executor, rows(2))
    assert LOOK not in bench.gpu.log[begun:]
    assert parts(executor) == (2 * KERNEL, 0, 0), "those from when it was to be captured are there too"


def test_small_ones_that_fit_into_what_the_driver_has_leave_the_part_out(bench: Bench) -> None:
    bench.gpu.kernel_bytes = bench.gpu.graph_bytes = 1000
    bench.gpu.driver_uses = 0
    with closing(bound(bench)) as executor:
        assert "graphs" not in executor.memory
        assert executor.shared_memory == {}
        assert "driver_memory" not in executor.describe()


def test_a_driver_that_does_not_say_leaves_the_part_out_and_says_so(bench: Bench) -> None:
    bench.gpu.has_pool = False
    with closing(bound(bench)) as executor:
        assert "graphs" not in executor.memory
        assert executor.describe()["driver_memory"] == {"unmeasured": 2}


def test_engines_of_one_structure_share_their_kernels(bench: Bench, tmp_path: Path) -> None:
    small = bench.load(bench.plan("small (float[1] x) => (float[1] y) { y = Add(x, x) }", {"x": [(1,)] * 3})).plan
    builds = Builds(CacheFolder([tmp_path / "cache"]))
    builds.kernels.maker(bench.device.index, lambda: small)

    def load(text: str, structure: str = "layers") -> Any:
        engine = load_engine(bench.artifact(text, structure=structure), bench.device, builds=builds)
        return engine.bind(bench.partition)

    one = load(AFFINE)
    whole = kernels(one)
    other, apart = load(AGAIN), load(AFFINE, "other layers")
    assert whole
    assert kernels(one) == kernels(other) == kernels(apart) == whole
    assert added(shared_by([one, other]).values()) == {"kernels": whole}
    assert added(shared_by([one, other, apart]).values()) == {"kernels": 2 * whole}
    one.close()
    one.engine.close()
    assert kernels(other) == whole, "the kernels stay for the other"
    for executor in (other, apart):
        executor.close()
        executor.engine.close()
    assert bench.device.driver_memory.kept == 2 * whole + 3 * GRAPH


def test_two_instances_of_an_engine_share_their_kernels(bench: Bench) -> None:
    engine = bench.load(bench.plan(), warm_up=(2,))
    with closing(bench.device.carve([1])) as other:
        with closing(engine.bind(bench.partition)) as first, closing(engine.bind(other)) as second:
            assert shared_memory(first) == shared_memory(second)
            assert parts(second) == (KERNEL, GRAPH, 0)
        engine.close()


def test_an_alternate_adds_its_graphs(bench: Bench, wide: Any) -> None:
    with closing(bound(bench)) as home:
        assert_right(home, rows(5))
        with closing(home.alternate(wide)) as other:
            assert other.describe()["adds"] == {"graphs": 2 * GRAPH}
            assert shared_memory(other) == shared_memory(home)
            assert graphs(home) == 2 * GRAPH


def test_an_alternate_whose_graphs_fit_beside_those_of_its_home_adds_nothing(bench: Bench, wide: Any) -> None:
    with closing(bound(bench)) as home:
        bench.gpu.driver_has += 10 * MIB
        with closing(home.alternate(wide)) as other:
            assert other.describe()["adds"] == {}
        assert graphs(home) == GRAPH


def test_an_alternate_with_an_instance_of_its_own_adds_all(bench: Bench, wide: Any) -> None:
    bench.gpu.capturable = False
    engine = bench.load(bench.plan(), graphs="on", warm_up=(2,))
    with closing(engine.bind(bench.partition)) as home, closing(home.alternate(wide)) as other:
        assert home.describe()["graphs"] == "native"
        adds = other.describe()["adds"]
        assert isinstance(adds, dict)
        assert adds == added([other.memory, *other.shared_memory.values()])
        assert adds["kernels"] == KERNEL * len(other.shared_memory)


def test_a_graph_that_cannot_be_made_counts_for_nothing(bench: Bench) -> None:
    with closing(bound(bench)) as executor:
        bench.gpu.fail("cuGraphInstantiate")
        assert_right(executor, rows(5))
        assert parts(executor)[1] == 0, "it goes on without graphs"


def test_graphs_of_an_override_count_while_it_lasts(bench: Bench) -> None:
    with closing(bound(bench)) as executor:
        with executor.overriding(copies="engine"):
            assert_right(executor, rows(2))
            assert graphs(executor) == 2 * GRAPH
        assert graphs(executor) == GRAPH


def test_an_ensemble_counts_the_kernels_of_its_steps_and_one_graph(bench: Bench) -> None:
    first, second = bench.load(bench.plan()), bench.load(bench.plan())
    steps = [Step(first, {"x": "x"}, {"y": "t"}), Step(second, {"x": "t"}, {"y": "y"})]
    engine = chain(steps, ["y"])
    with closing(engine), closing(engine.bind(bench.partition)) as executor:
        said = executor.describe()
        assert len(shared_memory(executor)) == 2
        assert kernels(executor) == 2 * KERNEL * len(said["shapes"])  # type: ignore[arg-type]
        assert graphs(executor) == GRAPH * len(said["shapes"])  # type: ignore[arg-type]


# What others do meanwhile.


def in_another_thread(bench: Bench, action: Any) -> Any:
    def work() -> None:
        bench.device.make_current()
        action()

    def meanwhile() -> None:
        thread = Thread(target=work)
        thread.start()
        thread.join()

    return meanwhile


def test_an_engine_that_another_thread_loads_meanwhile_waits(bench: Bench) -> None:
    other, loads = bench.plan(), list[Any]()
    with ThreadPoolExecutor(1) as thread:
        bench.gpu.meanwhile(COMPILING, lambda: loads.append(thread.submit(bench.load, other)))
        with closing(bound(bench)) as executor:
            loads[0].result(30)
            assert parts(executor) == (KERNEL, GRAPH, 0)


def test_beside_another_change_it_is_unknown_and_all_answers_are_right(bench: Bench) -> None:
    with bench.device.driver_memory.changing(), closing(bound(bench)) as executor:
        assert parts(executor) == (0, 0, 2)
        data = rows(2)
        assert run(executor, data)[0].tolist() == (2 * data - np.float32(3)).tolist()


def test_the_driver_s_free_memory_falls_by_kernels_and_graphs(bench: Bench) -> None:
    engine = bench.load(bench.plan(), warm_up=(2,))
    with closing(engine.bind(bench.partition)) as executor:
        before = bench.gpu.reported_free
        assert_right(executor, rows(5))
        assert before - bench.gpu.reported_free == KERNEL + GRAPH
        before = bench.gpu.reported_free
    engine.close()
    assert bench.gpu.driver_uses == DRIVER_STEP
    assert before <= bench.gpu.reported_free < before + KERNEL, "the driver keeps what is freed"


@pytest.mark.parametrize("seed", range(5))
def test_what_counts_and_what_was_kept_is_what_the_driver_has(bench: Bench, seed: int) -> None:
    """Whatever is loaded, moved, compiled and freed, in whatever order."""
    chance, gpu = np.random.default_rng(seed), bench.gpu
    gpu.kernel_bytes, gpu.graph_bytes = 3 * MIB + 5, MIB + 7
    before, paths = gpu.driver_has, [bench.plan() for _ in range(3)]
    places = [bench.device.carve([granule]) for granule in range(1, 5)]
    executors = list[Any]()

    def load() -> None:
        engine = bench.load(paths[chance.integers(3)], warm_up=(2,))
        executors.append(engine.bind(places[chance.integers(4)]))

    def move() -> None:
        executor = executors.pop(chance.integers(len(executors)))
        executors.append(executor.rebind(places[chance.integers(4)]))
        executor.close()

    def compile_more() -> None:
        prepare_if_new(executors[chance.integers(len(executors))], int(chance.integers(1, 8)))

    def free() -> None:
        executor = executors.pop(chance.integers(len(executors)))
        executor.close()
        executor.engine.close()
        bench.engines.remove(executor.engine)

    for _ in range(40):
        (load if len(executors) < 2 else (load, move, compile_more, free)[chance.integers(4)])()
        counted = sum(map(graphs, executors)) + added(shared_by(executors).values()).get("kernels", 0)
        assert counted + bench.device.driver_memory.kept == gpu.driver_has - before
        assert all(parts(executor)[2] == 0 for executor in executors)
    while executors:
        free()
    for place in places:
        place.close()


def prepare_if_new(executor: Any, count: int) -> None:
    if future := executor.preparing([(count, 3)]):
        future.result(30)


def test_tenants_that_bind_their_models_at_once_are_all_measured(bench: Bench) -> None:
    """As at the start of a server."""
    gpu = bench.gpu
    before, paths = gpu.driver_has, [bench.plan() for _ in range(8)]
    places = [bench.device.carve([granule]) for granule in range(1, 5)]

    def start(number: int) -> list[Any]:
        place = places[number]
        place.attach()
        return [bench.load(path, warm_up=(2,)).bind(place) for path in paths[number::4]]

    with ThreadPoolExecutor(4) as threads:
        executors = [executor for bound in threads.map(start, range(4)) for executor in bound]
    assert [parts(executor) for executor in executors] == [(KERNEL, GRAPH, 0)] * 8
    assert gpu.driver_has - before == 8 * (KERNEL + GRAPH)
    for executor in executors:
        executor.close()
    bench.close_engines()
    for place in places:
        place.close()
