"""`greenlane init`: what it writes can be served, and it replaces nothing."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from engines.tensorrt.api import TensorRT
from greenlane.__main__ import main
from partitions import open_device
from partitions.cpu import open_cpu
from server.config.file import load
from server.starting import configuration
from tests.end_to_end import repository
from tests.simulation import Gpu, installed
from tests.simulation.tensorrt import library

ROOT = Path(__file__).parents[2]


def test_what_is_written_is_a_configuration_with_its_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    assert main(["init", str(folder)]) == 0
    assert f"next: greenlane check {folder / 'greenlane.toml'}" in capsys.readouterr().out
    config = load(folder / "greenlane.toml")
    assert list(config.tenants) == ["acme", "globex"][: len(open_cpu().granules)]
    assert sorted(path.parent.parent.name for path in folder.rglob("model.onnx")) == ["identity", "stripes"]


def test_the_next_commands_can_be_pasted_where_the_command_is_not_on_the_path(
    tmp_path: Path,
) -> None:
    argv = [".venv/bin/greenlane", "init", str(tmp_path)]
    program = f"import sys; sys.argv = {argv!r}; from greenlane.__main__ import main; main()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "next: .venv/bin/greenlane check " in done.stdout


def test_the_next_commands_can_be_pasted_for_a_folder_with_a_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my models"
    assert main(["init", str(folder)]) == 0
    assert f"next: greenlane check '{folder}/greenlane.toml', greenlane --config '{folder}/greenlane.toml'\n" in (
        capsys.readouterr().out
    )


def test_an_empty_folder_for_models_gets_the_demos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models").mkdir()
    assert main(["init", str(tmp_path)]) == 0
    assert f"wrote {tmp_path}/greenlane.toml and {tmp_path}/models; next" in capsys.readouterr().out
    assert sorted(each.name for each in (tmp_path / "models").iterdir()) == ["identity", "stripes"]


def test_models_that_are_there_are_kept_and_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository.write(tmp_path / "models", "rows", repository.ROWS)
    before = sorted(tmp_path.rglob("*"))
    assert main(["init", str(tmp_path)]) == 0
    assert f"wrote {tmp_path / 'greenlane.toml'} for the models in {tmp_path / 'models'}; next: " in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "greenlane.toml"])
    config = load(tmp_path / "greenlane.toml")
    assert {tenant.models for tenant in config.tenants.values()} == {("*",)}


@pytest.mark.parametrize(("cores", "shares"), [(1, [1]), (2, [1, 1]), (5, [3, 2]), (64, [32, 32])])
def test_all_cores_of_the_machine_are_shared_out(cores: int, shares: list[int], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "greenlane.toml").write_text(configuration(cores))
    config = load(tmp_path / "greenlane.toml")
    assert list(config.counts("core", [1] * cores)[0].values()) == shares


def test_a_gpu_with_tensorrt_is_shared_out_in_sms_among_models_that_it_takes(tmp_path: Path, rtx: TensorRT) -> None:
    gpu = Gpu(index=0)
    with installed(gpu, library(gpu)):
        assert main(["init", str(tmp_path)]) == 0
        device = open_device("cuda")
    config = load(tmp_path / "greenlane.toml")
    assert [(each.sms, each.memory_bandwidth, each.pcie) for each in config.tenants.values()] == [
        (64, "auto", "auto"),
        (56, "auto", "auto"),
    ]
    config.fit(device.unit, device.granules)
    for name in ("identity", "stripes"):
        model = tmp_path / "models" / name / "1" / "model.onnx"
        subprocess.run([sys.executable, "-m", "engines.build", model, "-o", tmp_path / f"{name}.plan"], cwd=ROOT, check=True)


@pytest.mark.parametrize("there", ["greenlane.toml", "models"])
def test_what_is_there_stays(there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / there).write_text("mine")
    assert main(["init", str(tmp_path)]) == 1
    assert f"{tmp_path / there} exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["init", str(tmp_path / "file" / "new")]) == 1
    assert "greenlane init: " in capsys.readouterr().err


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 500, 1_000):  # There is room for nothing, then for some of the models' files.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            status = main(["init", str(tmp_path)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert status == 1
        assert capsys.readouterr().err == f"greenlane init: cannot write {tmp_path}: File too large\n"
        assert list(tmp_path.iterdir()) == []
    assert main(["init", str(tmp_path)]) == 0


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_documentation_shows_what_is_written(page: str) -> None:
    shown = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert configuration(2) in shown
