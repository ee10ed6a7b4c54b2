"""Invalid options are refused before a command starts, with an error of one line."""

import importlib
import os
import shutil
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import client
from greenlane.options import count, port, positive, whole
from partitions import DeviceUnavailable

COMMANDS = ("isolation", "overhead")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "²"])
def test_a_count_is_a_whole_number_from_1_on(text: str) -> None:
    assert count("12") == 12
    with pytest.raises(ArgumentTypeError, match=f"^{text!r}; expected a whole number from 1 on$"):
        count(text)


@pytest.mark.parametrize("text", ["-1", "1.5", "", "x", "²"])
def test_a_whole_number_may_be_0(text: str) -> None:
    assert [whole("0"), whole("12")] == [0, 12]
    with pytest.raises(ArgumentTypeError, match=f"^{text!r}; expected a whole number from 0 on$"):
        whole(text)


@pytest.mark.parametrize("text", ["0", "-1", "65536", "", "http"])
def test_a_port_is_one_of_tcp(text: str) -> None:
    assert [port("1"), port("65535")] == [1, 65535]
    with pytest.raises(ArgumentTypeError, match=f"^{text!r}; expected a port from 1 to 65535$"):
        port(text)


@pytest.mark.parametrize("text", ["0", "-0.5", "nan", "inf", "", "x"])
def test_a_positive_number_is_above_0_and_has_an_end(text: str) -> None:
    assert positive("0.25") == 0.25
    most = " and up to 1e9" if text == "inf" else ""
    with pytest.raises(ArgumentTypeError, match=f"^{text!r}; expected a number above 0{most}$"):
        positive(text)


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


@pytest.mark.parametrize(("command", "option"), [("isolation", "--front-cores"), ("overhead", "--pid")])
@pytest.mark.parametrize("number", ["-1", "1.5", "many"])
def test_counts_are_whole_numbers_from_0(command: str, option: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        _main(command)([option, number])
    assert f"argument {option}: {number!r}; expected a whole number from " in capsys.readouterr().err


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


def test_the_client_that_sends_the_requests_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert client.client() == "wrk (/usr/bin/wrk)"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert client.client() == "the built-in client, as wrk is not installed"


def test_the_help_has_the_bounds_of_inside(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        _main("isolation")(["--help"])
    message = " ".join(capsys.readouterr().out.split())
    assert "--inside has bounds of its own: 1.1, with three aggressors 1.2, of mlp 1.5" in message


def _main(command: str) -> Callable[[list[str]], int]:
    return importlib.import_module(f"benchmarks.{command}").main
