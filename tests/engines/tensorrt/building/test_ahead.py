"""What children make of a model before it is loaded: real processes with a simulated GPU."""

import logging
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engines import Builds, CacheFolder, Cancelled, ModelRefused, RuntimeSettings, load_engine, make_ahead
from engines.model_files.onnx_file import source_digest

from ... import as_simulated
from ...simulated import AFFINE, Bench, assert_right, rows
from ...small import model

pytestmark = pytest.mark.usefixtures("forked_programs")
OFF = RuntimeSettings(verify="off")


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "greenlane.engines")


def builds(folder: Path, *command: str) -> Builds:
    return Builds(CacheFolder([folder / "cache"]), command=command or as_simulated.COMMAND, compiles=True)


def dying(folder: Path) -> tuple[str, ...]:
    """The command of a child that crashes; `died` says how often."""
    note = f"import os, sys; print(sys.argv[-1], file=open({str(folder / 'died')!r}, 'a'), flush=True)"
    return sys.executable, "-c", f"{note}; os.kill(os.getpid(), 11)"


def died(folder: Path, path: Path) -> int:
    return (folder / "died").read_text().splitlines().count(str(path))


def made(bench: Bench, by: Builds, path: Path, settings: RuntimeSettings = OFF, partition: Any = None) -> object:
    return make_ahead(path, bench.device, settings, None, by, partition or bench.partition)


def compilations(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The files whose kernels a child compiled."""
    return [match[1] for text in caplog.messages if (match := re.match(r".*/(.+): compiled its kernels in ", text))]


def test_a_model_whose_plan_and_kernels_were_made_ahead_needs_no_process_and_nothing_was_loaded(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, by = bench.artifact(structure="the same"), builds(tmp_path)
    made(bench, by, path)
    assert compilations(caplog) == [path.name]
    assert not {"Runtime.deserialize_cuda_engine", "ICudaEngine.create_execution_context"} & set(bench.gpu.log)
    without = builds(tmp_path, "/nonexistent")
    made(bench, without, path)
    with closing(load_engine(path, bench.device, OFF, builds=without).bind(bench.partition)) as executor:
        assert_right(executor, rows(2))
    assert bench.gpu.compiled == []
    assert compilations(caplog) == [path.name]


def test_kernels_of_one_structure_are_compiled_once_for_all_models_and_partitions(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths, by = [bench.artifact(structure="the same") for _ in range(2)], builds(tmp_path)
    with closing(bench.device.carve([1, 2])) as other, ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(made, bench, by, path, OFF, where) for path in paths for where in (bench.partition, other)]
        for each in asked:
            each.result(60)
    assert len(compilations(caplog)) == 1


def meeting(folder: Path) -> tuple[str, ...]:
    """The command of a child that waits for another one to be there."""
    (folder / "meet").mkdir()
    meet = (
        "import os, runpy, sys, time\n"
        f"there = {str(folder / 'meet')!r}\n"
        "open(os.path.join(there, str(os.getpid())), 'w').close()\n"
        "while len(os.listdir(there)) < 2: time.sleep(0.01)\n"
        "runpy.run_module('tests.engines.as_simulated', run_name='__main__')\n"
    )
    return sys.executable, "-c", meet


def test_processes_that_need_the_same_kernels_at_once_compile_them_once(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, command = bench.artifact(structure="the same"), meeting(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda by: made(bench, by, path), [builds(tmp_path, *command) for _ in range(2)]))
    assert len(compilations(caplog)) == 1


def test_several_models_are_worked_on_at_once(bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [bench.artifact(structure=structure) for structure in ("one", "another")]
    by = builds(tmp_path, *meeting(tmp_path))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda path: made(bench, by, path), paths))
    assert sorted(compilations(caplog)) == sorted(path.name for path in paths)


def test_a_child_that_died_is_not_tried_again_and_its_model_is_named(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, by = bench.artifact(structure="the same"), builds(tmp_path, *dying(tmp_path))
    with by.once():
        with pytest.raises(ModelRefused, match="the compilation was killed by signal 11"):
            made(bench, by, path)
        with closing(load_engine(path, bench.device, OFF, builds=by).bind(bench.partition)) as executor:
            assert_right(executor, rows(2))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in warnings if f"{path}: the compilation was killed by signal 11 (SIGSEGV)" in text]) == 1
    assert bench.gpu.compiled, "where the child died, kernels are compiled here"
    assert died(tmp_path, path) == 1


def test_what_failed_is_tried_again_by_a_later_load(tmp_path: Path, bench: Bench) -> None:
    path, by = tmp_path / "model.onnx", builds(tmp_path, *dying(tmp_path))
    path.write_bytes(model(AFFINE))

    def fail() -> int:
        with pytest.raises(ModelRefused, match="the build was killed by signal 11"):
            made(bench, by, path)
        return died(tmp_path, path)

    with by.once():
        assert [fail(), fail()] == [1, 1]
    assert fail() == 2


def test_references_are_computed_ahead_and_not_again(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, by = bench.artifact(structure="the same", source=source_digest(model(AFFINE), [])), builds(tmp_path)
    path.with_suffix(".onnx").write_bytes(model(AFFINE))
    asked: list[Any] = []
    compute = Builds.compute_reference
    monkeypatch.setattr(Builds, "compute_reference", lambda self, request: asked.append(request) or compute(self, request))
    kept = made(bench, by, path, RuntimeSettings())
    with closing(load_engine(path, bench.device, RuntimeSettings(), builds=by).bind(bench.partition)) as executor:
        assert executor.describe()["verified"] == {"right": len(asked[0].sets), "others": []}
    assert len(asked) == 1
    assert kept is not None


def test_nothing_is_made_of_a_bare_plan_or_where_builds_are_closed(bench: Bench, tmp_path: Path) -> None:
    by = builds(tmp_path, "/nonexistent")
    assert made(bench, by, bench.plan()) is None
    assert made(bench, by, bench.artifact()) is None, "what its kernels depend on is not known"
    with pytest.raises(ModelRefused, match=r"built with tensorrt_rtx 1\.0"):
        made(bench, by, bench.artifact(structure="the same", version="1.0"))
    by.close()
    with pytest.raises(Cancelled):
        made(bench, by, bench.artifact(structure="the same"))
