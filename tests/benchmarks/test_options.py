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
ISOLATION = "seconds", "rounds", "rate", "bound", "processes", "front-cores"
OVERHEAD = "rounds", "seconds", "in-flight", "beside", "pid"
CORES = "12-15 or 0,2, or 'tenants', or 'any'"
NO_CORES = "a", "1-", "-2", "3-1", "0,,1", ""
NO_CHECKOUT = "/none/.venv/bin/python does not exist; `scripts/install cpu` in /none makes it"
MINE = sorted(os.sched_getaffinity(0))


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
    ("command", "options", "message"),
    [
        *[("isolation", [f"--{name}", "0"], f"argument --{name}: '0'; expected ") for name in ISOLATION],
        *[("overhead", [f"--{name}", "0"], f"argument --{name}: '0'; expected ") for name in OVERHEAD],
        *[("isolation", [f"--client-cores={text}"], f"{text!r}; expected cores such as {CORES}") for text in NO_CORES],
        ("isolation", ["--client-cores", "100000-100001"], "may not be used by this process"),
        ("isolation", ["--only", "noise"], "'noise'; expected some of compute, transfer"),
        ("isolation", ["--inside", "--memory"], "--memory is for the experiment over HTTP"),
        ("isolation", ["--fence", "0.4"], "it takes --memory"),
        ("isolation", ["--mps"], "it takes --device cuda"),
        ("isolation", ["--fence", "0.4", "--memory", "--only", "memory-read,small"], "does not hold small"),
        ("change", ["--only", "quiet,repartitions"], "there is no repartitions; there are quiet, rows, repartition"),
        ("overhead", ["--only", "zzz"], "argument --only: no case has 'zzz' in its name; there are identity-json-1, "),
        ("overhead", ["--checkout", "/none"], f"argument --checkout: {NO_CHECKOUT}"),
        ("overhead", ["--greenlane", "/none"], f"argument --greenlane: {NO_CHECKOUT}"),
        ("overhead", ["--server-cores", ",".join(map(str, MINE))], f"--server-cores: expected some of {MINE}, and a core left"),
        ("overhead", ["--server-cores", "4095"], f"--server-cores: expected some of {MINE}, and a core left for the client"),
    ],
)
def test_an_option_is_refused_with_what_was_expected(
    command: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        _main(command)(options)
    assert message in " ".join(capsys.readouterr().err.split())


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
