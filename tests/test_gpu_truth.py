"""What tests.gpu.truth reads from the logs of GPU runs, and that the page of them is up to date."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.gpu import truth

HEAD = (
    "command:  python3 -m pytest -q tests/gpu{options}\ndate:     {date} 05:11 UTC\nrevision: {revision}\nGPU:      {gpu}\n\n"
)
H100 = "NVIDIA H100 80GB HBM3, 580.159.04"


def log(
    folder: Path,
    part: str,
    says: str,
    ended: int = 0,
    date: str = "2026-11-26",
    revision: str = "3bb871e",
    gpu: str = H100,
    options: str = "",
) -> None:
    text = HEAD.format(date=date, revision=revision, gpu=gpu, options=options) + f"{says}\n\nended with {ended}\n"
    (folder / f"{date}-h100-3bb871e-{part}.log").write_text(text, encoding="utf-8")


def test_the_page_has_the_table_of_the_logs_that_there_are() -> None:
    page = truth.PAGE.read_text(encoding="utf-8")
    assert truth.written(page, truth.runs()) == page, "run python -m tests.gpu.truth --write"


def test_every_part_of_all_sh_is_known_and_covers_folders_that_exist() -> None:
    script = (truth.ROOT / "tests/gpu/all.sh").read_text(encoding="utf-8")
    (known,) = [line for line in script.splitlines() if "there is no part" in line]
    listed = known.partition("there are ")[2].partition('"')[0]
    assert [*listed.split(", "), *(f"{part}-mps" for part in truth.UNDER_MPS)] == list(truth.PARTS)
    assert sorted(re.findall(r'run "?(\S+)\$mps"', script)) == sorted(truth.UNDER_MPS)
    folders = {folder for part in truth.PARTS.values() for folder in part.covers}
    assert {
        folder for folder in folders if not (truth.ROOT / folder).is_dir() and not list(truth.ROOT.glob(f"{folder}.py"))
    } == set()


@pytest.mark.parametrize(
    ("part", "says", "ended", "options", "result", "passed"),
    [
        ("tests", "150 passed, 10 skipped in 148.72s (0:02:28)", 0, "", "150 passed, 10 skipped", True),
        ("alone", "== 2 failed, 65 passed, 160 deselected in 283.40s ==", 1, "", "65 passed, 2 failed", False),
        ("two", "8 skipped in 1.34s", 0, "", "8 skipped", False),
        ("felt", "...", 124, "", "cut by its limit", False),
        ("felt", "3 passed, 1 error in 2.00s", 1, "", "3 passed, 1 error", False),
        ("tests", "2 passed, 72 deselected in 9.85s", 0, " -k trained", "2 passed; in part", False),
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 0, "", "no finding", True),
        ("memcheck", "========= ERROR SUMMARY: 3 errors", 9, "", "3 errors", False),
        ("memcheck", "there is no compute-sanitizer here", 3, "", "ended with 3", False),
        ("change", "met  quiet tiny\nmissed  build mob\nmet  rows", 1, "", "2 met, 1 missed", False),
        ("change", "met  quiet tiny\nnot exercised cold", 0, "", "1 met, 1 not exercised; in part", False),
        ("starting", "a table", 0, "", "ended with 0", True),
        ("fence", "a table", 0, " --memory --only l2-40,pcie-stream --rounds 2", "ended with 0", True),
        ("fence", "a table", 0, " --memory --only l2-40,pcie-stream --rounds 2 --only l2-40", "ended with 0; in part", False),
        ("prove-mps", "a table", 0, " --tenants 15 --only t00", "ended with 0; in part", False),
        ("felt-mps", "7 passed in 101.00s", 0, "", "7 passed", True),
        ("mps", "19 passed in 101.00s", 0, "", "19 passed", True),
    ],
)
def test_a_log_says_what_a_part_gave(
    tmp_path: Path, part: str, says: str, ended: int, options: str, result: str, passed: bool
) -> None:
    log(tmp_path, part, says, ended, options=options)
    (run,) = truth.runs(tmp_path)
    assert (run.part, run.result, run.passed) == (part, result, passed)
    assert (run.date, run.revision, run.gpu) == ("2026-11-26 05:11 UTC", "3bb871e", "H100 80GB HBM3, driver 580.159.04")


def test_with_mps_on_every_test_runs_whose_server_takes_it_from_the_environment() -> None:
    """As their configurations are made by `process.gpu_section`, which has it, or by `benchmarks.bench` with `mps()`."""
    tests = {path.name: path.read_text(encoding="utf-8") for path in (truth.ROOT / "tests/gpu").glob("test_*.py")}
    taking = {name for name, text in tests.items() if "gpu_section(" in text or "mps()" in text or " running(folder" in text}
    script = (truth.ROOT / "tests/gpu/all.sh").read_text(encoding="utf-8")
    (listed,) = [line for line in script.splitlines() if line.startswith("servers=")]
    assert {name.removeprefix("tests/gpu/") for name in listed.partition("=")[2].strip('"').split()} | {
        "test_change.py",  # The part `felt`.
        "test_two_devices.py",
    } == taking


def test_logs_of_something_else_or_without_head_or_end_count_for_nothing(tmp_path: Path) -> None:
    log(tmp_path, "tests", "150 passed in 1.00s")
    whole = next(tmp_path.iterdir())
    text = whole.read_text(encoding="utf-8")
    whole.rename(tmp_path / "2026-11-26-h100-3bb871e-loads.log")
    (tmp_path / "2026-11-26-h100-3bb871e-alone.log").write_text(text.partition("ended with")[0], encoding="utf-8")
    (tmp_path / "2026-11-26-h100-3bb871e-felt.log").write_text("15 passed in 1.00s\n\nended with 0\n", encoding="utf-8")
    assert truth.runs(tmp_path) == []


def test_the_last_run_is_shown_with_the_last_that_passed(tmp_path: Path) -> None:
    log(tmp_path, "two", "8 passed in 90.00s", date="2026-11-24", gpu=f"2 x {H100}")
    log(tmp_path, "two", "1 failed, 7 passed in 90.00s", 1, date="2026-11-25", gpu=f"2 x {H100}")
    rows = [line for line in truth.table(truth.runs(tmp_path)).splitlines() if line.startswith("| `two`")]
    (row,) = rows
    assert "2026-11-25 05:11 UTC at [3bb871e](results/2026-11-25-h100-3bb871e-two.log), 2 x H100 80GB HBM3, " in row
    assert row.index("7 passed, 1 failed") < row.index("2026-11-24") < row.index("8 passed")
    assert "| in no log |  | in no log |" in truth.table(truth.runs(tmp_path))


def test_a_revision_that_is_none_is_taken_from_the_name(tmp_path: Path) -> None:
    log(tmp_path, "tests", "1 passed in 1.00s", revision="paced-1")
    assert [run.revision for run in truth.runs(tmp_path)] == ["3bb871e"]


def test_what_has_changed_since_a_run_is_said_by_folder(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        given = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(given, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")

    git("init", "-q")
    for path in ("engines/tensorrt/load.py", "server/device/moves.py", "docs/a.md"):
        write(path, "1")
    git("add", ".")
    git("commit", "-qm", "one")
    revision = git("rev-parse", "--short", "HEAD")
    write("docs/a.md", "2")
    assert truth.changed(revision, ["engines", "server"], tmp_path) == "nothing"
    write("engines/tensorrt/load.py", "2")
    write("engines/tensorrt/new.py", "2")
    write("server/device/moves.py", "2")
    git("add", ".")
    assert truth.changed(f"{revision}-dirty", ["engines", "server"], tmp_path) == "engines/tensorrt (2), server/device (1)"
    assert truth.changed("0123456789", ["engines"], tmp_path) is None
    log(tmp_path, "tests", "1 passed in 1.00s", revision=revision)
    said = truth.report(truth.runs(tmp_path), tmp_path)
    assert "since then changed: engines/tensorrt (2), server/device (1)" in said


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="has no lines"):
        truth.written("# On a GPU\n", [])
