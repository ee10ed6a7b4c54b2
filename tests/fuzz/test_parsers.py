"""Some thousand inputs from atheris for each parser, and that it would find an error."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .parsers import PARSERS, seeds

RUNS = 10_000
"""For each parser: some seconds. At night, and by hand with `python -m tests.fuzz.guided`, it goes on for longer."""
BROKEN = """
import sys
from tests.fuzz import parsers  # Before, so that it is not instrumented, which takes seconds.
from tests.fuzz import guided
def plan(data):
    assert data[:2] != b"\\x89H", "the second byte"
guided.PARSERS["plan"] = plan
sys.exit(guided.main(["plan"]))
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
@pytest.mark.parametrize("limit", [f"--runs={RUNS}", pytest.param("--seconds=30", marks=pytest.mark.load)])
def test_any_bytes_are_taken_or_refused(tmp_path: Path, limit: str) -> None:
    done = fuzzed(tmp_path, "-m", "tests.fuzz.guided", limit)
    assert done.returncode == 0, done.stdout + done.stderr
    words = [line.split() for line in done.stderr.splitlines()]
    runs = [int(each[1]) for each in words if each[:1] == ["stat::number_of_executed_units:"]]
    assert [each[1] for each in words if each[:1] == ["=="]] == list(PARSERS)
    assert len(runs) == len(PARSERS)
    assert min(runs) >= RUNS


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
