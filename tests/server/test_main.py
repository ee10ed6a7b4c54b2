"""The command line, as far as it ends by itself."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.__main__ import main
from server.command_line import configuration_file
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


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """The loggers, put back as they were."""
    before = [(logger, logger.handlers, logger.level) for logger in map(logging.getLogger, ("greenlane", "uvicorn"))]
    yield
    for logger, handlers, level in before:
        logger.handlers, logger.propagate = handlers, True
        logger.setLevel(level)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    repository.write(tmp_path / "models", "rows", repository.ROWS)
    (tmp_path / "models" / "rows" / "two").mkdir()
    (tmp_path / "greenlane.toml").write_text(CONFIG.format(digest="a" * 64))
    return tmp_path


def test_a_named_configuration_comes_first_then_the_environments_then_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GREENLANE_CONFIG", raising=False)
    assert configuration_file(None) is None
    (tmp_path / "greenlane.toml").mkdir()
    assert configuration_file(None) is None
    (tmp_path / "greenlane.toml").rmdir()
    (tmp_path / "greenlane.toml").touch()
    assert configuration_file(None) == "greenlane.toml"
    monkeypatch.setenv("GREENLANE_CONFIG", "other.toml")
    assert [configuration_file(None), configuration_file("c.toml")] == ["other.toml", "c.toml"]


def test_check_prints_every_problem_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "greenlane.toml").read_text()
    (folder / "greenlane.toml").write_text(text.replace("granules", "granuels").replace("models =", "model ="))
    assert main(["check", str(folder / "greenlane.toml")]) == 2
    printed = capsys.readouterr().err
    assert "tenants.acme.granuels: unknown key; did you mean 'granules'?" in printed
    assert "tenants.acme.model: unknown key" in printed


COMMANDS = [["check", "{}"], ["--config", "{}"], ["check", "--config", "{}"], ["--config", "{}", "check"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_plan_that_does_not_fit_ends_with_the_arithmetic(
    folder: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "greenlane.toml"
    text = path.read_text().replace("granules = 1", "granules = 4096")
    path.write_text(f"[server]\nport = 0\n{text}")  # Another program may listen on the default one.
    assert main([word.format(path) for word in command]) == 2
    assert "greenlane.toml: tenants.acme.granules 4096 = 4096 cores, but the device has" in capsys.readouterr().err


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
def test_an_empty_host_is_refused(option: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(option)
    assert ended.value.code == 2


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command line says of these words."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("python -m server: error: ")


@pytest.mark.parametrize("port", ["99999", "-1", "http", "9" * 5000])
def test_a_port_out_of_range_is_refused_with_the_range(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, f"--port={port}") == f"argument --port: {port}; expected 0 to 65535"


def test_a_file_in_place_of_a_command_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder / "greenlane.toml")
    assert refused(capsys, path) == f"{path!r} is not a command; did you mean --config {path}?"


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "chekc", "c.toml") == "'chekc' is not a command; did you mean 'check'?"
    assert refused(capsys, "run") == "'run' is not a command; expected check"


@pytest.mark.parametrize("words", ["check", "check a --config b", "check a --port 1", "check a --host b", "check a b"])
def test_a_check_takes_one_file_and_nothing_else(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *words.split()) in (
        "check takes one FILE and no other options, as in: check greenlane.toml",
        "unrecognized arguments: b",
    )


def test_ctrl_c_during_a_check_ends_it_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("server.check.check", interrupted)
    assert main(["check", "greenlane.toml"]) == 130


def test_ctrl_c_while_the_event_loop_starts_says_nothing_of_what_it_was_to_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio.Runner, "__enter__", interrupted)
    with warnings.catch_warnings(record=True, action="always") as said:
        assert main(["--config", str(folder / "greenlane.toml"), "--port", "0"]) == 130
    assert [str(each.message) for each in said if "never awaited" in str(each.message)] == []


SLOW = """
import sys, time
if sys.argv[0] == "-c":
    raise ImportError("the forkserver, which goes on without it, and ends as the main process has")
print("importing", flush=True)
time.sleep(60)
"""


def test_sigint_while_the_server_is_imported_ends_it_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text(SLOW)
    words = [sys.executable, "-m", "server"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as popen:
        assert popen.stdout
        assert popen.stdout.readline() == "importing\n"
        popen.send_signal(signal.SIGINT)
        _, said = popen.communicate(timeout=30)
    assert (popen.returncode, said) == (-signal.SIGINT, "")
