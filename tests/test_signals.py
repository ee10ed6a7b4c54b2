"""Tests that send signals pass in the background of a shell and under nohup too, where signals are ignored."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
STARTS = """
import signal, subprocess, sys

def test_a_child_has_default_actions():
    code = "import signal; print(*[signal.getsignal(number) for number in (1, 2, 3)])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"{signal.SIG_DFL} <built-in function default_int_handler> {signal.SIG_DFL}"), said
"""


def ignore() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


def test_programs_that_tests_start_have_default_actions_where_signals_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "test_starts.py").write_text(STARTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    plugins = "-p", "no:cacheprovider", "-p", "tests.conftest", "-c", str(tmp_path / "pytest.ini")
    command = [sys.executable, "-m", "pytest", *plugins, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=ignore, timeout=100)
    assert done.returncode == 0, done.stdout
