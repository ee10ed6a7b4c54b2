"""Kernels that another process compiles: a real process with a simulated GPU."""

import logging
import sys
from contextlib import closing
from pathlib import Path

import pytest

from engines import RuntimeSettings, load_engine
from engines.errors import Cancelled
from engines.model_files.cache_folder import CacheFolder
from engines.tensorrt.building.builds import Builds

from ... import as_simulated
from ...simulated import Bench, assert_right, rows

pytestmark = pytest.mark.usefixtures("forked_programs")
DIES = "import os, signal, sys; print('my last words', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
USUAL = RuntimeSettings(warm_up="usual")


def compiling(folder: Path, *command: str, compiles: bool = True) -> Builds:
    return Builds(CacheFolder([folder / "cache"]), command=command, compiles=compiles)


def test_kernels_are_compiled_in_a_child_and_only_loaded_here(bench: Bench, tmp_path: Path) -> None:
    plan, builds = bench.plan(), compiling(tmp_path, *as_simulated.COMMAND)
    with closing(load_engine(plan, bench.device, USUAL, builds=builds).bind(bench.partition)) as executor:
        assert_right(executor, rows(2))
        assert executor.describe()["kernels"]["found"] > 0
    assert bench.gpu.compiled == []


def test_no_process_is_started_if_the_kernels_are_cached(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = bench.plan()
    load_engine(plan, bench.device, builds=compiling(tmp_path, *as_simulated.COMMAND)).bind(bench.partition).close()
    dying = compiling(tmp_path, sys.executable, "-c", DIES)
    load_engine(plan, bench.device, builds=dying).bind(bench.partition).close()
    assert caplog.messages == []


def test_where_the_other_process_dies_kernels_are_compiled_here_and_the_log_says_why(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = bench.plan()
    builds = compiling(tmp_path, sys.executable, "-c", DIES)
    with closing(load_engine(plan, bench.device, builds=builds).bind(bench.partition)) as executor:
        assert_right(executor, rows(2))
    assert bench.gpu.compiled
    (warning,) = {record.getMessage() for record in caplog.records if "compilation was killed" in record.getMessage()}
    assert "was killed by signal 11 (SIGSEGV)" in warning
    assert "my last words" in warning
    assert "they are compiled when the model is bound" in warning


def test_where_the_other_process_refuses_the_reason_is_logged(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan was deleted before the process reads it."""
    plan = bench.plan()
    engine = load_engine(plan, bench.device, builds=compiling(tmp_path, *as_simulated.COMMAND))
    plan.unlink()
    engine.bind(bench.partition).close()
    engine.close()
    assert bench.gpu.compiled
    assert any("its kernels were not compiled" in message and plan.name in message for message in caplog.messages)


def test_an_engine_whose_builds_are_closed_is_not_bound(bench: Bench, tmp_path: Path) -> None:
    builds = compiling(tmp_path, *as_simulated.COMMAND)
    engine = load_engine(bench.plan(), bench.device, builds=builds)
    builds.close()
    with pytest.raises(Cancelled, match="cancelled, as this process is ending"):
        engine.bind(bench.partition)
    engine.close()


def test_kernels_are_compiled_in_process_if_builds_do_not_compile(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "greenlane.engines")
    builds = compiling(tmp_path, sys.executable, "-c", DIES, compiles=False)
    load_engine(bench.plan(), bench.device, builds=builds).bind(bench.partition).close()
    assert bench.gpu.compiled
    assert not any("compil" in message for message in caplog.messages if "in process" in message)
