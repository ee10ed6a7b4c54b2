"""The command `greenlane`: which subcommand runs, what is imported for it, and what it says of mistakes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from greenlane.__main__ import COMMANDS, HELP, main
from server.command_line import Options

HEAVY = ("numpy", "fastapi", "uvicorn", "onnxruntime", "server", "engines", "partitions")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """What the server was started with, instead of starting it."""
    started: list[Options] = []

    def run(options: Options) -> int:
        started.append(options)
        return 0

    monkeypatch.setattr("server.__main__.run", run)
    return started


def imported(code: str) -> set[str]:
    """The top-level modules that a new interpreter has imported after this code."""
    report = "import sys; sys.stderr.write(' '.join({name.partition('.')[0] for name in sys.modules}))"
    program = f"import atexit; atexit.register(lambda: exec({report!r})); {code}"
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr.split())


EMPTY = "check", "serve --config", "curve m --config", "verify m --config", "prove --config"
WRITTEN = "curve m --json", "verify m --json", "prove --json", "prove --html", "prove --keys"


@pytest.mark.parametrize("command", [*EMPTY, *WRITTEN])
def test_an_empty_name_of_a_file_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a shell's variable that is not set: the demo, or another file, would be served or measured, or nothing written."""
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), ""])
    assert ended.value.code in (2, 64)
    assert "empty; expected the name of a file" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"]])
def test_help_and_version_import_neither_the_server_nor_its_libraries(words: list[str]) -> None:
    assert not imported(f"from greenlane.__main__ import main; main({words!r})") & set(HEAVY)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_help_of_serve_and_check_does_not_import_the_web_framework(command: str) -> None:
    modules = imported(f"from greenlane.__main__ import main; main([{command!r}, '--help'])")
    assert "server" in modules
    assert not modules & {"fastapi", "uvicorn", "onnxruntime", "numpy"}


def test_import_greenlane_is_cheap() -> None:
    assert not imported("import greenlane") & set(HEAVY)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == HELP
    assert all(f"\n  {command} " in HELP for command in COMMANDS)
    assert max(map(len, HELP.splitlines())) <= 120


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_under_its_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: greenlane {command} ")
    assert "python -m" not in out
    assert "{program}" not in out


@pytest.mark.parametrize("first", [[], ["serve"]])
def test_serve_is_the_default_and_takes_the_options_of_python_m_server(first: list[str], ran: list[Options]) -> None:
    others = ["--port", "0", "--log-level", "debug", "--autopilot", "dry-run"]
    assert main([*first, "--config", "c.toml", "--host", "::1", *others]) == 0
    assert main(first) == 0
    assert ran == [Options(config="c.toml", host="::1", port=0, log_level="debug", autopilot="dry-run"), Options()]


def test_check_takes_a_file_by_its_name_or_as_other_commands_do(ran: list[Options]) -> None:
    assert main(["check", "c.toml"]) == 0
    assert main(["check", "--config", "c.toml"]) == 0
    assert ran == [Options(check="c.toml"), Options(check="c.toml")]


def test_check_takes_what_would_be_served_where_no_file_is_named(
    ran: list[Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GREENLANE_CONFIG", raising=False)
    Path("greenlane.toml").touch()
    assert main(["check"]) == 0
    monkeypatch.setenv("GREENLANE_CONFIG", "c.toml")
    assert main(["check"]) == 0
    assert ran == [Options(check="greenlane.toml"), Options(check="c.toml")]


@pytest.mark.parametrize("words", [[], ["a", "--config", "b"]])
def test_check_takes_one_file(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GREENLANE_CONFIG", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["check", *words])
    assert ended.value.code == 2
    assert "expected one FILE, as in: greenlane check greenlane.toml" in capsys.readouterr().err


def test_build_and_inspect_take_what_the_modules_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.plan").write_bytes(b"neither")
    assert main(["inspect", str(tmp_path / "m.plan")]) == 1
    assert "not an engine file" in capsys.readouterr().err
    assert main(["build", str(tmp_path / "m.onnx")]) == 1
    assert "m.onnx: No such file" in capsys.readouterr().err


def test_a_reader_that_has_left_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    """As with `greenlane check FILE | head`: more is printed than a pipe holds."""
    for number in range(600):
        (tmp_path / "models" / f"{number:0200}").mkdir(parents=True)
    config = tmp_path / "greenlane.toml"
    config.write_text('[models]\nrepository = "models"\n[device]\nbackend = "cpu"\n[tenants.acme]\ncores = 1\nmodels = ["*"]\n')
    command = [sys.executable, "-m", "greenlane", "check", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 120, "Python's own for output that could not be written"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("sevre", "'sevre' is not a command; did you mean 'serve'? (greenlane --help)"),
        (
            "x",
            f"'x' is not a command; expected one of {', '.join(COMMANDS)} (greenlane --help)",
        ),
    ],
)
def test_unknown_commands_are_refused_with_the_nearest(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"greenlane: {said}\n"


def test_a_file_in_place_of_a_command_is_refused_with_what_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.touch()
    assert main([str(path)]) == 2
    assert f"did you mean `greenlane check {path}` or `greenlane --config {path}`?" in capsys.readouterr().err
    for command in ("serve", "prove"):
        with pytest.raises(SystemExit) as ended:
            main([command, str(path)])
        assert ended.value.code == 2
        assert f"unexpected '{path}'; did you mean --config {path}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "absent.toml"], "unexpected 'absent.toml'; a configuration is given as --config FILE"),
        (["prove", "absent.toml"], "unexpected 'absent.toml'; a configuration is given as --config FILE"),
        (["--prot", "1"], "greenlane serve: error: unrecognized arguments: --prot 1"),
    ],
)
def test_words_that_a_command_does_not_know_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_module_and_script_are_the_same_command() -> None:
    script = Path(sys.executable).with_name("greenlane")
    for command in ([sys.executable, "-m", "greenlane"], [str(script)]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("greenlane ")


INTERRUPTED = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["greenlane", *sys.argv[1:]]
runpy.run_module("greenlane", run_name="__main__")
"""


@pytest.mark.parametrize(
    "words", [["check", "none.toml"], ["curve", "none.onnx"], ["prove"], ["verify", "none.onnx"], ["build", "n.onnx"]]
)
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(words: list[str]) -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, *words], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("words", [["--help"], ["check", "greenlane.toml"], ["init", "new"]])
def test_output_that_a_full_disk_does_not_take_is_an_error_in_one_line(tmp_path: Path, words: list[str]) -> None:
    init = [sys.executable, "-m", "greenlane", "init", "."]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run(init, cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "greenlane", *words]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 120
    assert "Traceback" not in ended.stderr
    assert ended.stderr.endswith("greenlane: output cannot be written: No space left on device\n")


def test_a_folder_that_is_gone_is_an_error_in_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir {gone}; {sys.executable} -m greenlane check {tmp_path / 'greenlane.toml'}"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(command, shell=True, cwd=gone, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "greenlane: the current folder is not there any more; change to another one\n"
