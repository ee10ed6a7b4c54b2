"""The cache of kernels that the instances of an engine share."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from engines.tensorrt.kernel_cache import MemoryStore, RuntimeCache
from engines.tensorrt.shared_kernels import SharedKernels
from tests.engines.simulated import Bench, assert_right, rows
from tests.engines.tensorrt.test_data_dependent import FIVE, NONZERO


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
        self.opened.append(RuntimeCache(MemoryStore()))
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
    kernels.retire()


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
    executor.close()
