"""The cache of compiled kernels, from one engine to the next, on a simulated GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.simulated import Bench, affine, opened
from tests.engines.tensors import run
from tests.simulation import Gpu
from tests.simulation.tensorrt import library


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with opened(tmp_path) as bench:
        yield bench
        bench.close()


def used(bench: Bench, path: Path, count: int = 3, **settings: Any) -> list[str]:
    """Load, bind, run and close, as a process does in its life; the kernels that this compiled."""
    before = len(bench.gpu.compiled)
    engine = bench.load(path, **settings)
    executor = engine.bind(bench.partition)
    data = np.random.default_rng(count).random((count, 3), np.float32)
    assert run(executor, data)[0].tolist() == affine(data).tolist()
    executor.close()
    engine.close()
    return bench.gpu.compiled[before:]


def test_kernels_are_kept_beside_the_plan_for_the_next_time(bench: Bench) -> None:
    """F48: those that were compiled after binding too."""
    path = bench.plan()
    assert len(used(bench, path)) == 2
    assert path.with_name("affine1.plan.cache").exists()
    assert used(bench, path) == []
    assert len(used(bench, path, count=4)) == 1
    assert used(bench, path, count=4) == []


def test_they_are_loaded_before_the_first_context_is_made(bench: Bench) -> None:
    """F48."""
    path = bench.plan()
    used(bench, path)
    begun = len(bench.gpu.log)
    used(bench, path)
    calls = bench.gpu.log[begun:]
    assert calls.index("IRuntimeCache.deserialize") < calls.index("ICudaEngine.create_execution_context")


def test_they_are_saved_once_an_executor_is_bound(bench: Bench) -> None:
    """F48: so that a process that is killed leaves them to the next."""
    path = bench.plan()
    executor = bench.load(path).bind(bench.partition)
    assert path.with_name("affine1.plan.cache").exists()
    executor.close()


def test_executors_of_an_engine_share_them(bench: Bench) -> None:
    """F52, F53: the library's cache is made once for all of them."""
    engine = bench.load(bench.plan())
    executors = [engine.bind(bench.device.carve([granule])) for granule in (1, 2, 3)]
    assert len(bench.gpu.compiled) == 1
    assert bench.gpu.log.count("IRuntimeConfig.create_runtime_cache") == 1
    for executor in executors:
        executor.close()
        executor._partition.close()
    engine.close()


def test_a_context_that_takes_over_has_them_too(bench: Bench) -> None:
    """F45, F52."""
    path = bench.plan()
    used(bench, path)
    bench.gpu.capturable = False
    assert used(bench, path) == []


def test_they_are_kept_in_a_folder_in_a_file_or_nowhere(bench: Bench) -> None:
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


def test_another_plan_under_the_same_name_has_its_own(bench: Bench) -> None:
    """F51: they are kept by what the plan is, not by what it is called."""
    path = bench.plan()
    used(bench, path)
    path.write_bytes(bench.plan("other (float[n, 3] x) => (float[n, 3] y) <float three = {3}> "
                                "{ t = Add(x, x) u = Sub(t, three) y = Identity(u) }").read_bytes())  # fmt: skip
    assert len(used(bench, path)) == 2
    assert used(bench, path) == []


def test_those_of_another_gpu_are_compiled_anew_and_both_are_kept(bench: Bench) -> None:
    path = bench.plan()
    name = bench.gpu.name
    used(bench, path)
    bench.device.name = bench.gpu.name = "Another GPU"
    assert len(used(bench, path)) == 2
    bench.device.name = bench.gpu.name = name
    assert used(bench, path) == []


def test_what_the_library_refuses_is_a_warning_and_replaced(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """F51."""
    path, name = bench.plan(), bench.gpu.name
    used(bench, path)
    bench.gpu.name = "With another driver"
    assert len(used(bench, path)) == 2
    assert len(caplog.messages) == 1
    assert "do not fit this library, driver and GPU; starting empty" in caplog.messages[0]
    assert used(bench, path) == []
    bench.gpu.name = name


def test_a_damaged_file_is_a_warning_and_replaced(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """F51."""
    path = bench.plan()
    path.with_name("affine1.plan.cache").write_bytes(b"damaged")
    assert len(used(bench, path)) == 2
    assert {message.partition(": the")[0] for message in caplog.messages} == {f"{path}.cache"}
    assert used(bench, path) == []


def test_a_folder_that_cannot_be_written_to_costs_one_warning_and_nothing_else(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """F49, F55: though it is tried whenever an executor is bound, and in the end."""
    path = bench.plan()
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
    bench: Bench, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F49."""
    path = bench.plan()
    used(bench, path)
    bench.gpu.fail(call)
    used(bench, path, count=5)
    assert len(caplog.messages) == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY: as told" in caplog.messages[0]


def test_a_cache_that_the_library_does_not_take_costs_one_warning(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.gpu.takes_caches = False
    engine = bench.load(bench.plan())
    for _ in range(2):
        engine.bind(bench.partition).close()
    engine.close()
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "runs without a kernel cache: the library does not take it"
    ]


def test_a_library_without_a_cache_keeps_nothing(tmp_path: Path) -> None:
    gpu = Gpu()
    with opened(tmp_path, library(gpu, IRuntimeConfig=type("IRuntimeConfig", (), {})), gpu) as bench:
        path = bench.plan()
        for _ in range(2):
            assert len(used(bench, path)) == 2
        assert not path.with_name("affine1.plan.cache").exists()
        bench.close()


def test_an_engine_is_closed_by_a_thread_that_cuda_has_not_seen_and_after_the_device_was_lost(bench: Bench) -> None:
    path = bench.plan()
    engine = bench.load(path)
    engine.bind(bench.partition).close()
    bench.gpu.lose("CUDA_ERROR_UNKNOWN")
    engine.close()
    assert engine.plan is None
