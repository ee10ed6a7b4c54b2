"""The comparison of workers with the launch loop and without, over a fake libcuda."""

import json
from pathlib import Path

import pytest

from benchmarks.launch_loop import __main__ as command
from tests.launchable import needs_a_compiler


@needs_a_compiler
def test_the_whole_comparison_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "loop.json"
    arguments = ["--device", "fake", "--models", "tiny", "--seconds", "0.02", "--rounds", "1", "--output", str(output)]
    assert command.main(arguments) == 0
    found = json.loads(output.read_text())
    assert {row["section"] for row in found["medians"]} == set(command.SECTIONS)
    assert [row["flaw"] for row in found["rows"] if row["flaw"]] == []
    assert found["failures"] == []
    assert "closed: tiny" in capsys.readouterr().out
