"""The command line, as far as it ends by itself."""

from pathlib import Path

import pytest

from server.__main__ import main
from tests.end_to_end import repository

CONFIG = """
[models]
repository = "models"

[models.rows]
max_batch = 2

[tenants.acme]
granules = 1
models = ["rows", "missing"]
keys_sha256 = ["{digest}"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    repository.write(tmp_path / "models", "rows", repository.ROWS)
    (tmp_path / "models" / "rows" / "two").mkdir()
    (tmp_path / "greenlane.toml").write_text(CONFIG.format(digest="a" * 64))
    return tmp_path


def test_check_prints_every_problem_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "greenlane.toml").read_text()
    (folder / "greenlane.toml").write_text(text.replace("granules", "granuels").replace("models =", "model ="))
    assert main(["check", str(folder / "greenlane.toml")]) == 2
    told = capsys.readouterr().err
    assert "tenants.acme.granuels: unknown key; did you mean 'granules'?" in told
    assert "tenants.acme.model: unknown key" in told


@pytest.mark.parametrize("command", [["check", "{}"], ["--config", "{}"]])
def test_a_plan_that_does_not_fit_ends_with_the_arithmetic(
    folder: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "greenlane.toml"
    path.write_text(path.read_text().replace("granules = 1", "granules = 4096"))
    assert main([word.format(path) for word in command]) == 2
    assert "acme 4096 = 4096 granules, but the device has" in capsys.readouterr().err


def test_a_share_in_units_of_another_device_names_the_key_to_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "greenlane.toml"
    path.write_text(path.read_text().replace("granules = 1", "sms = 8"))
    assert main(["check", str(path)]) == 2
    assert "tenants.acme.sms" in capsys.readouterr().err


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "check" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--port", "80000"], ["--port", "-1"], ["--host", ""]])
def test_an_address_that_means_another_is_refused(option: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(option)
    assert ended.value.code == 2
