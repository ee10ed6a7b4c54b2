"""Slow files of tests begin first, and tests are run to the end also if a process that runs them ends early."""

import os
import subprocess
import sys
from pathlib import Path

from .workers import SLOWEST

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
END_TOGETHER = """
import os
import time
from pathlib import Path

def test_ends_its_process_when_the_other_one_does():
    mine = Path(__file__).with_suffix(".began")
    if not mine.exists():
        mine.touch()
        while len(list(mine.parent.glob("*.began"))) < 2:
            time.sleep(0.01)
        os._exit(1)
"""
ONE_COLLECTS_LATE = """
import os
import time
from pathlib import Path

NAME = os.environ.get("PYTEST_XDIST_WORKER")  # The processes in place of those that ended are gw3 and gw4.
STARTED, RAN = (Path(__file__).with_name(name) for name in ("gw4 started", "gw3 ran"))

def wait_for(path):
    ends = time.monotonic() + 20
    while not path.exists() and time.monotonic() < ends:
        time.sleep(0.01)

def pytest_collection():
    if NAME == "gw4":
        STARTED.touch()
        wait_for(RAN)
    if NAME == "gw3":
        wait_for(STARTED)
        time.sleep(0.5)

def pytest_runtest_setup():
    if NAME == "gw3":
        RAN.touch()
    if NAME == "gw2":
        wait_for(RAN)
"""


def run_split(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What pytest says where it runs this folder's tests with the plugin."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    plugins = "-p", "no:cacheprovider", "-p", "xdist.plugin", "-p", "tests.workers", "-c", str(folder / "pytest.ini")
    command = [sys.executable, "-m", "pytest", *plugins, "--dist=loadfile", *options, str(folder)]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # Importing the others takes each process a second.
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=200)


def test_slow_files_begin_first_and_then_those_of_many_tests(tmp_path: Path) -> None:
    for name in ("test_few.py", SLOWEST[1], SLOWEST[0]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(PASSES)
    (tmp_path / "test_many.py").write_text(PASSES + PASSES.replace("passes", "passes_too"))
    ran = run_split(tmp_path, "--numprocesses=1", "--verbose")
    assert ran.returncode == 0, ran.stdout
    passed = [line.split()[-1].split("::")[0] for line in ran.stdout.splitlines() if "PASSED" in line]
    begun = [str((ROOT / path).resolve().relative_to(tmp_path)) for path in dict.fromkeys(passed)]
    assert begun == [*SLOWEST[:2], "test_many.py", "test_few.py"]
    assert [line for line in ran.stdout.splitlines() if line in begun] == begun


def test_the_slow_files_are_there() -> None:
    assert [path for path in SLOWEST if not (ROOT / path).is_file()] == []


def test_all_tests_run_when_a_process_ends_that_has_done_many_files(tmp_path: Path) -> None:
    for number in range(FILES):
        text = PASSES * 2 if number != FILES - 2 else PASSES + ENDS_ONCE
        (tmp_path / f"test_{number:02}.py").write_text(text.replace("passes", "first", 1))
    ran = run_split(tmp_path, "--numprocesses=3", "--no-loadscope-reorder", "--max-worker-restart=1")
    assert ran.returncode == 1
    assert "crashed while running" in ran.stdout
    assert ran.stdout.count("test_ends_its_process_once (???)") == 1, "its name is printed at once"
    assert f"1 failed, {2 * FILES} passed" in ran.stdout


def test_all_tests_run_when_two_processes_end_at_the_same_time(tmp_path: Path) -> None:
    for number in range(FILES):
        text = PASSES * 2 if number > 1 else PASSES + END_TOGETHER
        (tmp_path / f"test_{number:02}.py").write_text(text.replace("passes", "first", 1))
    (tmp_path / "conftest.py").write_text(ONE_COLLECTS_LATE)
    ran = run_split(tmp_path, "--numprocesses=3", "--no-loadscope-reorder", "--max-worker-restart=2")
    assert "INTERNALERROR" not in ran.stdout
    assert f"2 failed, {2 * FILES} passed" in ran.stdout


def test_all_tests_run_when_the_only_process_ends_in_the_last_test_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "test_0.py").write_text(PASSES + ENDS_ONCE)
    (tmp_path / "test_1.py").write_text(PASSES)
    ran = run_split(tmp_path, "--numprocesses=1", "--max-worker-restart=1")
    assert ran.returncode == 1
    assert "1 failed, 3 passed" in ran.stdout
