"""A few seconds of atheris for each parser, and that it would find an error."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .parsers import PARSERS, seeds

SECONDS = 3
"""For each parser. By hand `python -m tests.fuzz.guided PARSER` goes on for longer, and with other seeds."""
BROKEN = """
from tests.fuzz import guided
def plan(data):
    assert data[:2] != b"\\x89H", "the second byte"
guided.PARSERS["plan"] = plan
guided.main(["plan", "--seconds", "60"])
"""
ROOT = Path(__file__).parents[2]
needs_atheris = pytest.mark.skipif(
    not find_spec("atheris") and "CI" not in os.environ, reason="needs atheris, which this platform lacks"
)


def fuzzed(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own, which ends with it, and writes what it finds to the folder."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


@needs_atheris
@pytest.mark.parametrize("parser", PARSERS)
def test_any_bytes_are_taken_or_refused(tmp_path: Path, parser: str) -> None:
    done = fuzzed(tmp_path, "-m", "tests.fuzz.guided", parser, "--seconds", str(SECONDS))
    assert done.returncode == 0, done.stdout + done.stderr
    runs = next(line for line in done.stderr.splitlines() if line.startswith("stat::number_of_executed_units:"))
    assert int(runs.split()[1]) > 1_000


@pytest.mark.parametrize("parser", PARSERS)
def test_it_begins_with_inputs_that_are_right(parser: str) -> None:
    for data in seeds(parser):
        PARSERS[parser](data)


@needs_atheris
def test_an_error_is_found_and_its_bytes_are_kept(tmp_path: Path) -> None:
    done = fuzzed(tmp_path, "-c", BROKEN)
    assert done.returncode != 0
    assert "AssertionError: the second byte" in done.stdout + done.stderr
    assert [path.read_bytes()[:2] for path in tmp_path.glob("crash-*")] == [b"\x89H"]
