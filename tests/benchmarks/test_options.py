"""Invalid options are refused before a command starts, with an error of one line."""

import importlib
import os
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from greenlane.options import count, port, positive, whole
from partitions import DeviceUnavailable

COMMANDS = ("isolation", "overhead")


@pytest.mark.parametrize(
    ("read", "taken", "refused", "expected"),
    [
        (count, {"12": 12}, ["0", "-1", "1.5", "", "x", "²"], "a whole number from 1 on"),
        (whole, {"0": 0, "12": 12}, ["-1", "1.5", "", "x", "²"], "a whole number from 0 on"),
        (port, {"1": 1, "65535": 65535}, ["0", "-1", "65536", "", "http"], "a port from 1 to 65535"),
        (positive, {"0.25": 0.25}, ["0", "-0.5", "nan", "", "x"], "a number above 0"),
        (positive, {}, ["inf"], "a number above 0 and up to 1e9"),
    ],
)
def test_a_number_is_read_or_refused_with_what_was_expected(
    read: Callable[[str], float], taken: dict[str, float], refused: list[str], expected: str
) -> None:
    assert {text: read(text) for text in taken} == taken
    for text in refused:
        with pytest.raises(ArgumentTypeError, match=f"^{text!r}; expected {expected}$"):
            read(text)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("isolation", ["--seconds", "--rounds", "--rate", "--bound", "--processes", "--front-cores"]),
        ("overhead", ["--rounds", "--seconds", "--in-flight", "--beside", "--pid"]),
    ],
)
def test_zero_seconds_rounds_and_clients_are_refused(
    command: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for option in options:
        with pytest.raises(SystemExit, match="2"):
            _main(command)([option, "0"])
        assert f"argument {option}: '0'; expected " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a", "1-", "-2", "3-1", "0,,1", ""])
def test_cores_are_numbers_and_ranges(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        _main("isolation")([f"--client-cores={text}"])
    message = f"argument --client-cores: {text!r}; expected cores such as 12-15 or 0,2, or 'tenants', or 'any'"
    assert message in " ".join(capsys.readouterr().err.split())


def test_unknown_cases_are_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        _main("overhead")(["--only", "zzz"])
    assert "argument --only: no case has 'zzz' in its name; there are identity-json-1, " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--checkout", "--greenlane"])
def test_a_checkout_without_a_virtual_environment_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        _main("overhead")([option, str(tmp_path)])
    message = f"argument {option}: {tmp_path}/.venv/bin/python does not exist; `scripts/install cpu` in {tmp_path} makes it"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--asgi"], "--asgi: --checkout runs `python -m server` only"),
        (["--beside", "80"], "argument --beside: not allowed with argument --checkout"),
    ],
)
def test_a_checkout_is_compared_as_python_m_server_and_with_nothing_else(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    with pytest.raises(SystemExit, match="2"):
        _main("overhead")(["--checkout", str(tmp_path), *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("which", ["all", "absent"])
def test_server_cores_leave_one_for_the_client(which: str, capsys: pytest.CaptureFixture[str]) -> None:
    mine = os.sched_getaffinity(0)
    with pytest.raises(SystemExit, match="2"):
        _main("overhead")(["--server-cores", ",".join(map(str, mine)) if which == "all" else "4095"])
    assert f"--server-cores: expected some of {sorted(mine)}, and a core left for the client" in capsys.readouterr().err


def test_an_unavailable_device_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _main("isolation")(["--device", "cuda"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("isolation: ")
    assert "DeviceUnavailable" not in message


def test_an_unavailable_device_is_an_error_of_one_line_with_inside(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(kind: str) -> None:
        raise DeviceUnavailable(f"{kind} is not there")

    monkeypatch.setattr("benchmarks.inside.open_device", refuse)
    assert _main("isolation")(["--inside", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "isolation: cuda is not there\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_dependency_is_an_error_of_one_line_with_the_install_command(command: str) -> None:
    hide = "import runpy, sys; sys.modules['onnx'] = sys.modules['matplotlib'] = None; "
    run = f"runpy.run_module('benchmarks.{command}', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", hide + run], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    message = "this needs greenlane[test]: scripts/install cpu,rtx,test (matplotlib, onnx not found)\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


def _main(command: str) -> Callable[[list[str]], int]:
    return importlib.import_module(f"benchmarks.{command}").main
