"""Programs that are forked from a process with the server in it run as if Python had been started for them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .forked import Forked, instead

SAYS = """
import json, os, signal, sys
print(json.dumps([__name__, sys.argv, sys.path[0], os.getcwd(), dict(os.environ), os.getppid(), sys.stdin.read()]))
print(os.getsid(0) == os.getpid(), file=sys.stderr)
print(sorted(os.listdir("/proc/self/fd")), signal.getsignal(signal.SIGINT) is signal.default_int_handler, file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("session", [False, True])
def test_a_forked_program_runs_as_a_started_one_does(tmp_path: Path, session: bool) -> None:
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["start_new_session"] = session
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")} | {"A": "b"}
    said = []
    for start in subprocess.Popen, Forked:
        with start([sys.executable, str(script), "one", "--two"], cwd=tmp_path, env=environment, **pipes) as program:  # type: ignore[call-overload]
            out, log = program.communicate("typed")
            said.append([*json.loads(out), log, program.returncode])
    for started, forked in zip(*said, strict=True):
        assert forked == started
    assert said[1][5:7] == [os.getpid(), "typed"]


def test_a_module_is_run_by_its_name() -> None:
    with Forked([sys.executable, "-m", "server", "--help"], stdout=subprocess.PIPE, text=True) as program:
        said, _ = program.communicate()
    assert "python -m server" in said
    assert program.returncode == 0


def test_python_is_started_for_what_cannot_be_forked(tmp_path: Path) -> None:
    code = "import sys; print('server.app' in sys.modules, sys.path[0])"
    script = tmp_path / "says.py"
    script.write_text(code)
    read, write = os.pipe()
    with instead():
        ways: list[tuple[list[str], dict[str, Any]]] = [
            ([str(script)], {}),
            (["-c", code], {}),
            ([str(script)], {"pass_fds": [read]}),
        ]
        said = [
            subprocess.run([sys.executable, *words], capture_output=True, text=True, **given).stdout for words, given in ways
        ]
    assert said == [f"True {tmp_path}\n", "False \n", f"False {tmp_path}\n"]
    os.close(read)
    os.close(write)


def test_the_folder_that_a_module_is_run_in_is_on_its_path_unless_it_is_not_safe(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text("print('found')")
    words = [["-m", "says"], ["-P", "-m", "says"]]
    with instead():
        said = [subprocess.run([sys.executable, *each], cwd=tmp_path, capture_output=True, text=True).stdout for each in words]
    assert said == ["found\n", ""]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_forked_program_ends_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import signal\nprint(flush=True)\nsignal.pause()")
    with Forked([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        program.stdout.readline()
        program.send_signal(number)
        assert program.wait(30) == -number
