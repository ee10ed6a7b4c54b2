"""The cache of compiled kernels, from one engine to the next, on a simulated GPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest

from partitions import DeviceLost
from tests.contract import in_a_thread
from tests.engines.simulated import Bench, affine, assert_right, opened, rows
from tests.engines.tensors import run
from tests.simulation import Gpu, Misuse
from tests.simulation.tensorrt import library
from tests.simulation.tensorrt_config import COMPILING


def used(bench: Bench, path: Path, count: int = 3, **settings: Any) -> list[str]:
    """Load, bind, run and close, as one process does from start to end; returns the kernels that were compiled."""
    before = len(bench.gpu.compiled)
    engine = bench.load(path, **settings)
    executor = engine.bind(bench.partition)
    data = np.random.default_rng(count).random((count, 3), np.float32)
    assert run(executor, data)[0].tolist() == affine(data).tolist()
    executor.close()
    engine.close()
    return bench.gpu.compiled[before:]


@pytest.fixture
def path(bench: Bench) -> Path:
    return bench.plan()


def test_kernels_are_saved_in_the_plan_s_folder(path: Path, bench: Bench) -> None:
    """F48: those that were compiled after binding too."""
    assert len(used(bench, path)) == 2
    assert path.with_name("affine1.plan.cache").exists()
    assert used(bench, path) == []
    assert len(used(bench, path, count=4)) == 1
    assert used(bench, path, count=4) == []


def test_kernels_are_loaded_before_the_first_context_is_made(path: Path, bench: Bench) -> None:
    """F48."""
    used(bench, path)
    begun = len(bench.gpu.log)
    used(bench, path)
    calls = bench.gpu.log[begun:]
    assert calls.index("IRuntimeCache.deserialize") < calls.index("ICudaEngine.create_execution_context")


def test_kernels_are_saved_once_an_executor_is_bound(path: Path, bench: Bench) -> None:
    """F48: so that a process that is killed leaves them to the next."""
    executor = bench.load(path).bind(bench.partition)
    assert path.with_name("affine1.plan.cache").exists()
    executor.close()


@pytest.mark.parametrize(
    ("settings", "count", "compiled"),
    [({}, 1, 1), ({"cache_path": ""}, 1, 1), ({"graphs": "off"}, 3, 1), ({"graphs": "off", "cache_path": ""}, 3, 3)],
)
def test_executors_with_captured_graphs_share_a_cache_and_others_find_kernels_in_the_file(
    bench: Bench, settings: dict[str, Any], count: int, compiled: int
) -> None:
    """F53: without captured graphs each inference calls the library, and would wait while another executor compiles."""
    engine = bench.load(bench.plan(), **settings)
    partitions = [bench.device.carve([granule]) for granule in (1, 2, 3)]
    executors = [engine.bind(partition) for partition in partitions]
    caches = {context.get_runtime_config().get_runtime_cache() for context in bench.gpu.executions}
    assert len(caches) == bench.gpu.log.count("IRuntimeConfig.create_runtime_cache") == count
    assert len(bench.gpu.compiled) == compiled
    for each in (*executors, *partitions):
        each.close()


@pytest.mark.parametrize("settings", [{}, {"cache_path": ""}, {"graphs": "off"}])
def test_an_engine_is_bound_to_two_partitions_at_once(path: Path, bench: Bench, settings: dict[str, Any]) -> None:
    """F53: the second is bound after the first has compiled. Later one serves while the other one compiles.

    The simulation raises an error if two threads use a cache at once.
    """
    engine, other = bench.load(path, **settings), bench.device.carve([1])
    bound: list[Any] = []
    bench.gpu.meanwhile(COMPILING, lambda: bound.append(in_a_thread(lambda: engine.bind(other))[1]))
    executors = [engine.bind(bench.partition), bound[0].result(30)]
    compiled = len(bench.gpu.compiled)
    most = 2 if settings.get("graphs") else 1  # With a cache of its own, the second finds in the file what was saved in time.
    assert 1 <= compiled <= most
    bench.gpu.meanwhile(COMPILING, lambda: other.run(lambda: assert_right(executors[1], rows(2))))
    assert_right(executors[0], rows(5))
    other.run(lambda: assert_right(executors[1], rows(5)))
    assert compiled < len(bench.gpu.compiled) <= 2 * most
    for executor in executors:
        assert_right(executor, rows(4))
        executor.close()
    other.close()
    engine.close()
    assert used(bench, path, count=5) == [] or settings


@pytest.mark.parametrize("use", ["serialize", "_compile"])
def test_the_simulation_objects_to_a_cache_that_two_threads_use_at_once(bench: Bench, use: str) -> None:
    cache = bench.load(bench.plan()).plan.create_runtime_config().create_runtime_cache()
    arguments = ["another"] if use == "_compile" else []
    with ThreadPoolExecutor(1, initializer=bench.device.make_current) as thread:
        bench.gpu.meanwhile(COMPILING, lambda: thread.submit(getattr(cache, use), *arguments).result())
        with pytest.raises(Misuse, match="two threads used one cache of kernels at once"):
            cache._compile("one")
        thread.submit(getattr(cache, use), *arguments).result()


def test_a_replacement_context_has_the_kernels_too(path: Path, bench: Bench) -> None:
    """F45, F52: it has a cache of its own, which finds them in the file."""
    used(bench, path)
    bench.gpu.capturable = False
    begun = len(bench.gpu.log)
    assert used(bench, path) == []
    assert bench.gpu.log[begun:].count("ICudaEngine.create_execution_context") == 2
    assert bench.gpu.log[begun:].count("IRuntimeConfig.create_runtime_cache") == 2


def test_a_cache_is_closed_after_the_last_context_and_before_the_plan(bench: Bench) -> None:
    """F48, F54: what was compiled after binding is saved, and the plan outlives the library's cache."""
    engine = bench.load(bench.plan())
    executor = engine.bind(bench.partition)
    assert_right(executor, rows(4))
    plan, begun = ref(engine.plan), len(bench.gpu.log)
    engine.close()
    assert plan()
    executor.close()
    assert plan() is None
    calls = bench.gpu.log[begun:]
    assert calls.index("IExecutionContext.__del__") < calls.index("IRuntimeCache.serialize")


def test_kernels_are_kept_in_a_folder_or_a_file_or_nowhere(bench: Bench) -> None:
    path, folder = bench.plan(), bench.folder / "kernels"
    folder.mkdir()
    for settings in ({"cache_path": folder}, {"cache_path": bench.folder / "file"}):
        assert len(used(bench, path, **settings)) == 2
        assert used(bench, path, **settings) == []
    for _ in range(2):
        assert len(used(bench, path, cache_path="")) == 2
    assert (folder / "affine1.plan.cache").exists()
    assert (bench.folder / "file").exists()
    assert not path.with_name("affine1.plan.cache").exists()


def test_another_plan_under_the_same_name_has_its_own_kernels(path: Path, bench: Bench) -> None:
    """F51: they are kept by what the plan is, not by what it is called."""
    used(bench, path)
    path.write_bytes(bench.plan("other (float[n, 3] x) => (float[n, 3] y) <float three = {3}> "
                                "{ t = Add(x, x) u = Sub(t, three) y = Identity(u) }").read_bytes())  # fmt: skip
    assert len(used(bench, path)) == 2
    assert used(bench, path) == []


def test_two_gpus_of_one_kind_keep_their_kernels_beside_each_other(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """As the device processes of one server do, which have one folder."""
    path, first = bench.plan(), bench.gpu.uuid
    assert len(used(bench, path)) == 2
    bench.device.uuid = bench.gpu.uuid = "GPU-2"
    assert len(used(bench, path)) == 2
    bench.device.uuid = bench.gpu.uuid = first
    assert used(bench, path) == []
    bench.device.uuid = bench.gpu.uuid = "GPU-2"
    assert used(bench, path) == []
    assert caplog.messages == []


def test_a_cache_that_the_library_refuses_is_replaced_with_a_warning(
    path: Path, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """F51."""
    used(bench, path)
    bench.gpu.uuid = "with another driver"
    assert len(used(bench, path)) == 2
    assert len(caplog.messages) == 1
    assert "do not fit this library, driver and GPU; starting empty" in caplog.messages[0]
    assert used(bench, path) == []


def test_a_damaged_file_is_a_warning_and_replaced(path: Path, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """F51."""
    path.with_name("affine1.plan.cache").write_bytes(b"damaged")
    assert len(used(bench, path)) == 2
    assert {message.partition(": the")[0] for message in caplog.messages} == {f"{path}: {path}.cache"}
    assert used(bench, path) == []


def test_a_folder_that_cannot_be_written_to_costs_one_warning_and_nothing_else(
    path: Path, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """F49, F55: though it is tried whenever an executor is bound or closed."""
    path.with_name("affine1.plan.cache.lock").mkdir()
    engine = bench.load(path)
    for _ in range(3):
        engine.bind(bench.partition).close()
    engine.close()
    assert len(caplog.messages) == 1
    assert f"{path}.cache: the kernel cache was not saved: " in caplog.messages[0]


@pytest.mark.parametrize(
    "call", ["IRuntimeConfig.create_runtime_cache", "IRuntimeCache.serialize", "IRuntimeCache.deserialize"]
)
def test_a_cache_that_the_library_fails_with_costs_a_warning_and_nothing_else(
    path: Path, bench: Bench, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F49."""
    used(bench, path)
    bench.gpu.fail(call)
    used(bench, path, count=5)
    assert len(caplog.messages) == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY: as scripted" in caplog.messages[0]


def test_a_cache_that_the_library_does_not_take_costs_one_warning(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.gpu.takes_caches = False
    engine = bench.load(bench.plan())
    for _ in range(2):
        engine.bind(bench.partition).close()
    engine.close()
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "runs without a kernel cache: the library refused it"
    ]


def test_a_library_without_a_cache_keeps_nothing(tmp_path: Path) -> None:
    gpu = Gpu()
    with opened(tmp_path, library(gpu, IRuntimeConfig=type("IRuntimeConfig", (), {})), gpu) as bench:
        path = bench.plan()
        for _ in range(2):
            assert len(used(bench, path)) == 2
        assert not path.with_name("affine1.plan.cache").exists()
        bench.close()


def test_kernels_are_saved_by_a_thread_that_cuda_has_not_seen(path: Path, bench: Bench) -> None:
    executor = bench.load(path).bind(bench.partition)
    assert_right(executor, rows(3))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(executor.close).result()
        thread.submit(executor.engine.close).result()
    assert used(bench, path) == []


def test_an_executor_of_a_lost_device_is_closed_though_nothing_can_be_saved(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    engine = bench.load(bench.plan())
    executor = engine.bind(bench.partition)
    bench.gpu.lose("CUDA_ERROR_UNKNOWN")
    for close in (executor.close, engine.close):
        with pytest.raises(DeviceLost):
            close()
    assert engine.plan is None
    assert len(caplog.messages) == 1
    assert "the kernel cache was not saved: CUDA_ERROR_UNKNOWN" in caplog.messages[0]
