"""The cache of kernels that the instances of an engine share, and engines that differ in their weights alone."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from engines import Builds, CacheFolder, load_engine
from engines.tensorrt.kernel_cache import RuntimeCache
from engines.tensorrt.shared_kernels import KernelCaches, SharedKernels
from tests.engines.simulated import AFFINE, Bench, affine, assert_right, rows
from tests.engines.tensorrt.test_data_dependent import FIVE, NONZERO
from tests.engines.tensors import run
from tests.simulation.errors import Misuse
from tests.simulation.tensorrt_config import COMPILING

DATA = rows(2)


class Library:
    """A library's cache that notes when it is gone."""

    def serialize(self) -> bytes:
        return b""

    def deserialize(self, blob: bytes, /) -> bool:
        return True


class Caches:
    """Opens caches and counts them."""

    def __init__(self) -> None:
        self.opened: list[RuntimeCache] = []

    def open(self) -> RuntimeCache:
        self.opened.append(RuntimeCache())
        self.opened[-1].materialize(Library)
        return self.opened[-1]


def is_closed(cache: RuntimeCache) -> bool:
    try:
        cache.materialize(Library)
    except RuntimeError:
        return True
    return False


def test_a_cache_is_opened_for_the_first_user_and_is_the_next_one_s_too() -> None:
    caches = Caches()
    kernels = SharedKernels(caches.open)
    assert caches.opened == []
    assert kernels.take() is kernels.take()
    assert len(caches.opened) == 1
    kernels.give_back()
    kernels.give_back()
    assert not is_closed(kernels.take())
    assert len(caches.opened) == 1


@pytest.mark.parametrize("users", [0, 1, 2])
def test_a_cache_is_closed_with_the_engine_after_its_last_user(users: int) -> None:
    caches = Caches()
    kernels = SharedKernels(caches.open)
    kernels.take()
    kernels.give_back()
    for _ in range(users):
        kernels.take()
    kernels.retire()
    for _ in range(users):
        assert not is_closed(caches.opened[0])
        kernels.give_back()
    assert is_closed(caches.opened[0])


def test_a_cache_of_several_engines_is_closed_with_the_last(bench: Bench) -> None:
    caches, shared = Caches(), KernelCaches()
    first, second = (shared.of("key", caches.open) for _ in range(2))
    assert first is second
    assert shared.of("another", caches.open) is not first
    first.take()
    first.give_back()
    first.retire()
    assert not is_closed(caches.opened[0])
    second.retire()
    assert is_closed(caches.opened[0])
    assert shared.of("key", caches.open) is not first, "its cache is closed"


def test_the_engine_to_make_caches_of_is_loaded_once_for_each_gpu() -> None:
    shared, loaded = KernelCaches(), list[int]()
    for gpu in (0, 1, 0):
        assert shared.maker(gpu, lambda gpu=gpu: loaded.append(gpu) or f"engine {gpu}") == f"engine {gpu}"  # type: ignore[misc]
    assert loaded == [0, 1]


def test_a_second_instance_deserializes_and_compiles_nothing_and_has_its_own_graphs(bench: Bench) -> None:
    """F53."""
    engine = bench.load(bench.plan())
    with closing(bench.device.carve([1])) as other:
        first, begun = engine.bind(bench.partition), len(bench.gpu.log)
        second = engine.bind(other)
        calls = bench.gpu.log[begun:]
        assert "ICudaEngine.create_execution_context" in calls
        assert not {"IRuntimeConfig.create_runtime_cache", "IRuntimeCache.deserialize", "compiling a kernel"} & set(calls)
        assert_right(first, rows(2))
        other.run(lambda: assert_right(second, rows(2)))
        second.close()
        first.close()
        engine.close()


def test_an_instance_with_data_dependent_outputs_has_a_cache_of_its_own(bench: Bench) -> None:
    """Each of its inferences calls the library."""
    engine = bench.load(bench.plan(NONZERO, FIVE))
    executors = [engine.bind(bench.device.carve([granule])) for granule in (1, 2)]
    caches = {context.get_runtime_config().get_runtime_cache() for context in bench.gpu.executions}
    assert len(caches) == 2
    for executor in executors:
        executor.close()


def test_kernels_are_not_saved_while_another_instance_compiles(bench: Bench) -> None:
    """The simulation raises an error if two threads use a cache at once."""
    engine, saved = bench.load(bench.plan()), list[Any]()
    with closing(bench.device.carve([1])) as other, ThreadPoolExecutor(1) as thread:
        first, second = engine.bind(bench.partition), engine.bind(other)
        bench.gpu.meanwhile("compiling a kernel", lambda: saved.append(thread.submit(second.instance.save)))
        assert_right(first, rows(5))
        saved[0].result(30)
        second.close()
        first.close()
        engine.close()


def test_binding_pins_no_memory_for_inputs_and_outputs(bench: Bench) -> None:
    """Pinning holds a lock of the driver for milliseconds: all tenants' launches wait for it. Copy tables are small."""
    executor = bench.bind()
    assert bench.gpu.log.count("LegacyPinnedMemoryResource.allocate") == 2
    assert_right(executor, rows(2))


# Engines of one structure.

AGAIN = AFFINE.replace("{3}", "{5}")


class Trained:
    """Engines of one structure whose weights differ. The small engine is there already, as if it had been built."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self._bench = bench
        self._folder = folder
        small = bench.load(bench.plan("small (float[1] x) => (float[1] y) { y = Add(x, x) }", {"x": [(1,)] * 3})).plan
        self.builds = Builds(CacheFolder([folder]))
        self.builds.kernels.maker(bench.device.index, lambda: small)
        self.executors: list[Any] = []

    def calls(self, text: str, structure: str = "layers") -> set[str]:
        """What is called to bind such an engine, of which it is the last executor."""
        engine = load_engine(self._bench.artifact(text, structure=structure), self._bench.device, builds=self.builds)
        begun = len(self._bench.gpu.log)
        self.executors.append(engine.bind(self._bench.partition))
        return {"IRuntimeConfig.create_runtime_cache", COMPILING} & set(self._bench.gpu.log[begun:])

    def free(self, index: int) -> None:
        """Close an executor and its engine."""
        executor = self.executors.pop(index)
        executor.close()
        executor.engine.close()

    def close(self) -> None:
        while self.executors:
            self.free(0)


@pytest.fixture
def trained(bench: Bench, tmp_path: Path) -> Iterator[Trained]:
    with closing(Trained(bench, tmp_path / "cache")) as opened:
        yield opened


def test_an_engine_that_differs_in_its_weights_finds_the_kernels_of_the_other(bench: Bench, trained: Trained) -> None:
    assert trained.calls(AFFINE) == {"IRuntimeConfig.create_runtime_cache", COMPILING}
    assert trained.calls(AGAIN) == set()
    one, other = trained.executors
    assert run(one, DATA)[0].tolist() == affine(DATA).tolist()
    assert run(other, DATA)[0].tolist() == (2 * DATA - 5).tolist()
    assert trained.calls(AFFINE, "other layers") == {"IRuntimeConfig.create_runtime_cache", COMPILING}


def test_its_weights_are_freed_while_others_use_the_kernels_that_it_compiled(bench: Bench, trained: Trained) -> None:
    """The simulation raises an error if the cache is saved after the engine was freed that it was made of."""
    trained.calls(AFFINE)
    plan = ref(trained.executors[0].engine.plan)
    trained.calls(AGAIN)
    trained.free(0)
    assert plan() is None
    assert trained.calls(AFFINE) == set()
    assert_right(trained.executors[1], rows(7))


def test_the_next_process_finds_them_for_any_of_these_engines(bench: Bench, trained: Trained, tmp_path: Path) -> None:
    trained.calls(AFFINE)
    trained.free(0)
    with closing(Trained(bench, tmp_path / "cache")) as following:
        assert following.calls(AGAIN) == {"IRuntimeConfig.create_runtime_cache"}


def test_without_the_small_engine_each_engine_has_its_own_cache(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "greenlane.engines")
    builds = Builds(CacheFolder([tmp_path / "cache"]), command=["/nonexistent"])
    for text in (AFFINE, AGAIN):
        engine = load_engine(bench.artifact(text, structure="layers"), bench.device, builds=builds)
        bench.engines.append(engine)
        begun = len(bench.gpu.log)
        with closing(engine.bind(bench.partition)) as executor:
            assert run(executor, DATA)
        assert "IRuntimeConfig.create_runtime_cache" in bench.gpu.log[begun:]
    said = [message for message in caplog.messages if "do not share their kernels" in message]
    assert len(said) == 1
    assert "no process can be started to build it" in said[0]


def test_the_simulation_objects_to_a_cache_that_outlives_its_engine(bench: Bench) -> None:
    engine = bench.load(bench.plan())
    cache = engine.plan.create_runtime_config().create_runtime_cache()
    cache.serialize()
    engine.close()
    with pytest.raises(Misuse, match="after the engine was freed"):
        cache.serialize()
