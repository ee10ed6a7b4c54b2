"""Tests are run to the end also if a process that runs them ends early."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = 40
PASSES = """
def test_passes():
    pass
"""
ENDS_ONCE = """
import os
import time
from pathlib import Path

def test_ends_its_process_once():
    ended = Path(__file__).with_name("ended")
    if not ended.exists():
        time.sleep(1)  # Until the other processes have done all other files.
        ended.touch()
        os._exit(1)
"""


def test_all_tests_run_when_a_process_ends_that_has_done_many_files(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for number in range(FILES):
        text = PASSES * 2 if number != FILES - 2 else PASSES + ENDS_ONCE
        (tmp_path / f"test_{number:02}.py").write_text(text.replace("passes", "first", 1))
    plugins = "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "tests.workers", "-c", str(tmp_path / "pytest.ini")
    split = "--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder", "--max-worker-restart=1"
    command = [sys.executable, "-m", "pytest", *plugins, *split, str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 1
    assert "crashed while running" in ran.stdout
    assert f"1 failed, {2 * FILES} passed" in ran.stdout
