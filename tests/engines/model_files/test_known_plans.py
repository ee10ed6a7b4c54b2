"""Records of which plan belongs to which files: what makes them void, and when none is made."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.model_files import known_plans
from engines.model_files.known_plans import known_plan, record, states_of


class Files:
    """A model with weights in a file of their own, one more that it names and that is missing, its plan, and the record."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.cache.mkdir()
        self.where, self.plan = self.cache / "model.source", self.cache / "model.plan"
        self.model, self.weights, self.missing = (folder / name for name in ("model.onnx", "weights", "missing"))
        for path in (self.model, self.weights, self.plan):
            path.write_bytes(path.name.encode())

    def record(self) -> None:
        record(self.where, self.plan, states_of([self.model, self.weights, self.missing]))

    def change(self, name: str, change: str) -> None:
        """Change one of them, once the file system's clock has moved on."""
        path: Path = getattr(self, name)
        clock = path.with_name("clock")
        clock.touch()
        while clock.stat().st_ctime_ns <= path.stat().st_ctime_ns:
            clock.touch()
        CHANGES[change](path)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(known_plans, "SETTLED", 0.0)
    return Files(tmp_path)


def same_size_and_times(path: Path) -> None:
    """Other bytes, with the size and the times of the file before."""
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def swapped(path: Path) -> None:
    """Another file of the same name, copied with its times."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"!"),
    "rewritten": lambda path: path.write_bytes(path.read_bytes()),
    "same size and times": same_size_and_times,
    "swapped": swapped,
    "deleted": lambda path: path.unlink(),
}


def test_a_plan_is_known_by_the_files_that_it_was_made_from(files: Files) -> None:
    assert known_plan(files.where) is None
    files.record()
    assert known_plan(files.where) == files.plan


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["model", "weights", "plan"])
def test_a_change_of_any_of_them_makes_the_record_void(files: Files, name: str, change: str) -> None:
    files.record()
    files.change(name, change)
    assert known_plan(files.where) is None


def test_a_file_that_was_missing_makes_it_void_once_it_is_there(files: Files) -> None:
    files.record()
    files.missing.write_bytes(b"")
    assert known_plan(files.where) is None


def test_a_file_that_changed_while_it_was_read_is_not_taken_for_what_was_read(files: Files) -> None:
    states = states_of([files.model])
    files.change("model", "rewritten")
    record(files.where, files.plan, states)
    assert known_plan(files.where) is None


def test_nothing_is_recorded_of_a_file_that_has_only_just_changed(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """The change after it could leave the same times. The plan may be new: it is not read again."""
    monkeypatch.setattr(known_plans, "SETTLED", 3600.0)
    files.record()
    assert not files.where.exists()
    monkeypatch.setattr(known_plans, "SETTLED", 0.0)
    files.record()
    assert files.where.exists()


def test_a_record_stays_valid_where_the_cache_is_moved(files: Files, tmp_path: Path) -> None:
    """As a volume that is mounted at another place: the plan's inode is the same."""
    files.record()
    files.cache.rename(tmp_path / "elsewhere")
    assert known_plan(tmp_path / "elsewhere" / "model.source") == tmp_path / "elsewhere" / "model.plan"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"plan": 1}', '{"plan": "model.plan", "state": 3, "files": []}', "\xff", '"x"', "null"]
)
def test_a_record_that_cannot_be_read_counts_as_none(files: Files, text: str) -> None:
    files.where.write_bytes(text.encode("latin-1"))
    assert known_plan(files.where) is None


def test_where_nothing_can_be_written_nothing_is_recorded(files: Files) -> None:
    files.where.mkdir()
    files.record()
    assert known_plan(files.where) is None
    assert [path for path in files.cache.iterdir() if path.suffix == ".tmp"] == []


def test_without_a_plan_nothing_is_recorded(files: Files) -> None:
    files.plan.unlink()
    files.record()
    assert not files.where.exists()
