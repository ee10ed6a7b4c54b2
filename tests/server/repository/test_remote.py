"""The copy of a remote repository: what is fetched, what is kept, and that a model is never seen by halves."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from server.repository.model_repository import Repository
from server.repository.remote import COPIES, LIMIT, STATE, Outcome, copy
from tests.fakes import PATIENCE

URL = "memory://bucket/models"


class Bucket:
    """A remote repository, and the directory of its copy."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files = MemoryFileSystem()

    def put(self, path: str, content: str) -> None:
        self._files.pipe_file(f"/bucket/models/{path}", content.encode())

    def remove(self, path: str) -> None:
        self._files.rm(f"/bucket/models/{path}", recursive=True)

    def copy(self, *left_alone: str, limit: float = LIMIT) -> Outcome:
        return copy(URL, self.root, left_alone, limit)

    def read(self) -> dict[str, str]:
        """The files of all models."""
        models = [self.root / name for name in Repository(self.root, {}).names()]
        found = [path for model in models for path in model.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.root)): path.read_text() for path in found}


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    bucket = Bucket(tmp_path / "copy")
    bucket.put("a/1/model.onnx", "a1")
    bucket.put("a/config.pbtxt", "max_batch_size: 4")
    bucket.put("b/1/model.onnx", "b1")
    bucket.put("whole/1/.keep", "")
    bucket.put("README.md", "no model")
    yield bucket
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_only_what_has_changed_is_fetched_and_what_went_away_goes(bucket: Bucket) -> None:
    assert bucket.copy() == Outcome(changed=["a", "b", "whole"], files=3, nbytes=2 + 17 + 2)
    assert bucket.read() == {"a/1/model.onnx": "a1", "a/config.pbtxt": "max_batch_size: 4", "b/1/model.onnx": "b1"}
    assert (bucket.root / "whole" / "1").is_dir(), "an ensemble's version, which is empty"
    assert bucket.copy() == Outcome(), "also after a restart: nothing is kept in memory"
    before = os.stat(bucket.root / "a" / "1" / "model.onnx").st_ino
    bucket.put("a/2/model.onnx", "a2")
    bucket.remove("b")
    assert bucket.copy() == Outcome(changed=["a"], removed=["b"], files=1, nbytes=2)
    assert bucket.read() == {"a/1/model.onnx": "a1", "a/2/model.onnx": "a2", "a/config.pbtxt": "max_batch_size: 4"}
    assert os.stat(bucket.root / "a" / "1" / "model.onnx").st_ino == before, "the same file, so the same engine"
    bucket.put("a/1/model.onnx", "A1")
    assert bucket.copy().files == 1, "of the same size, and another one all the same"
    assert bucket.read()["a/1/model.onnx"] == "A1"
    assert len(os.listdir(bucket.root / COPIES)) == 2, "old copies are removed"


def test_what_is_missing_or_cut_off_in_the_copy_is_fetched_again(bucket: Bucket) -> None:
    bucket.copy()
    (bucket.root / "a" / "1" / "model.onnx").write_text("a")
    (bucket.root / "b").unlink()
    assert bucket.copy() == Outcome(changed=["a", "b"], files=2, nbytes=4)
    (bucket.root / ".state.json").write_text("{")
    assert bucket.copy().files == 3
    assert bucket.read()["a/1/model.onnx"] == "a1"


def test_a_download_that_breaks_off_leaves_the_model_as_it_was(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.copy()
    bucket.put("a/1/model.onnx", "another")
    bucket.put("a/config.pbtxt", "max_batch_size: 8")
    bucket.put("b/1/model.onnx", "b2")
    whole = MemoryFileSystem.get_file

    def cut(self: Any, path: str, target: str, **options: Any) -> None:
        whole(self, path, target, **options)
        if path.endswith("a/1/model.onnx"):
            Path(target).write_text("half")

    monkeypatch.setattr(MemoryFileSystem, "get_file", cut)
    outcome = bucket.copy()
    why = "/bucket/models/a/1/model.onnx: 4 bytes came; expected 7; check its files"
    assert outcome.failed == {"a": ("OSError", f"a of {URL} stays as it was: {why}")}
    assert outcome.changed == ["b"], "others are copied all the same"
    assert bucket.read() == {"a/1/model.onnx": "a1", "a/config.pbtxt": "max_batch_size: 4", "b/1/model.onnx": "b2"}
    monkeypatch.undo()
    assert bucket.copy().changed == ["a"]
    assert bucket.read()["a/1/model.onnx"] == "another"


def test_models_that_are_left_alone_stay_as_they_are(bucket: Bucket) -> None:
    bucket.copy()
    bucket.put("a/1/model.onnx", "another")
    bucket.put("b/1/model.onnx", "b2")
    assert bucket.copy("a").changed == ["b"]
    assert bucket.read()["a/1/model.onnx"] == "a1"
    assert bucket.copy().changed == ["a"]


def test_a_listing_without_an_answer_is_broken_off_and_the_error_names_the_url_and_the_limit(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "find", lambda *_, **__: gate.wait(PATIENCE))
        outcome = bucket.copy(limit=0.01)
    gate.set()
    assert outcome.error == (
        f"{URL} cannot be read: listing it was broken off after 0.01 s without an answer; check the address"
    )
    assert (outcome.kind, outcome.hangs) == ("Hangs", True)
    assert bucket.copy().changed == ["a", "b", "whole"]


def test_a_download_of_which_nothing_comes_is_broken_off_and_the_rest_is_for_another_process(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", lambda *_, **__: gate.wait(PATIENCE))
        outcome = bucket.copy(limit=0.01)
        assert bucket.copy("a", limit=0.01).failed.keys() == {"b"}, "the others have their turn while it is left alone"
    gate.set()
    why = "downloading /bucket/models/a/1/model.onnx was broken off after 0.01 s without an answer; check its files"
    assert outcome == Outcome(failed={"a": ("Hangs", f"a of {URL} stays as it was: {why}")}, hangs=True)
    assert bucket.copy().changed == ["a", "b", "whole"]


class Looked(type(Path())):  # type: ignore[misc]
    """A path that says how often its file is looked at, as those below it do."""

    looks = threading.Semaphore(0)

    def stat(self, **options: Any) -> os.stat_result:
        try:
            return super().stat(**options)
        finally:
            self.looks.release()


def test_a_download_that_takes_long_is_not_broken_off_while_more_of_it_comes(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, bucket.root = MemoryFileSystem.get_file, Looked(bucket.root)

    def grow(files: MemoryFileSystem, path: str, target: str, **options: Any) -> None:
        while Looked.looks.acquire(blocking=False):
            pass
        with open(target, "wb", buffering=0) as file:
            for _ in range(6):  # Two of each look: so it has been compared, and has grown since the one before.
                assert Looked.looks.acquire(timeout=PATIENCE)
                file.write(b"x")
        whole(files, path, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", grow)
    assert bucket.copy(limit=0.2) == Outcome(changed=["a", "b", "whole"], files=3, nbytes=2 + 17 + 2)


def test_a_process_that_ends_in_the_middle_leaves_the_old_model_and_the_next_one_goes_on(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.copy()
    bucket.put("a/1/model.onnx", "another")

    def end(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryFileSystem, "get_file", end)
    with pytest.raises(KeyboardInterrupt):
        bucket.copy()
    assert bucket.read()["a/1/model.onnx"] == "a1"
    monkeypatch.undo()
    assert bucket.copy() == Outcome(changed=["a"], files=1, nbytes=7)
    assert len(os.listdir(bucket.root / COPIES)) == 3


def test_a_listing_without_models_takes_nothing_away(bucket: Bucket) -> None:
    bucket.copy()
    bucket.remove("")
    assert bucket.copy().error == (
        f"{URL} cannot be read: there is no model; expected MODEL/1/model.onnx and so on below it; check the address"
    )
    assert len(bucket.read()) == 3


def test_no_path_leads_out_of_the_copy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "/bucket/models/../../outside": {"type": "file", "size": 1},
        "/bucket/models/a/../../outside": {"type": "file", "size": 1},
        "/bucket/models//b": {"type": "file", "size": 1},
    }
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: found)
    outcome = bucket.copy()
    assert len(outcome.problems) == 3
    assert not (bucket.root.parent / "outside").exists()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (
            "nothing://bucket",
            "nothing://bucket cannot be read: Protocol not known: nothing; for s3://, gs:// "
            "and hf:// install greenlane[remote] (in a checkout: scripts/install remote)",
        ),
        ("file:///nowhere/models", "file:///nowhere/models cannot be read: there is no model; expected MODEL/1/model.onnx"),
    ],
)
def test_errors_name_the_url_and_what_to_do(tmp_path: Path, url: str, text: str) -> None:
    assert copy(url, tmp_path).error.startswith(text)


def test_a_directory_of_this_machine_can_be_copied(tmp_path: Path) -> None:
    (tmp_path / "there" / "a" / "1").mkdir(parents=True)
    (tmp_path / "there" / "a" / "1" / "model.onnx").write_text("a1")
    (tmp_path / "there" / "whole" / "1").mkdir(parents=True)
    url, root = f"file://{tmp_path}/there", tmp_path / "copy"
    assert copy(url, root) == Outcome(changed=["a", "whole"], files=1, nbytes=2)
    assert (root / "whole" / "1").is_dir()
    assert copy(url, root) == Outcome()
    shutil.rmtree(tmp_path / "there" / "whole")
    assert copy(url, root) == Outcome(removed=["whole"])


def test_what_went_away_goes_also_if_it_is_not_known_what_was_copied(bucket: Bucket) -> None:
    bucket.copy()
    (bucket.root / ".state.json").unlink()
    bucket.remove("b")
    assert bucket.copy().removed == ["b"]
    assert set(bucket.read()) == {"a/1/model.onnx", "a/config.pbtxt"}


def test_a_model_that_changed_back_after_an_interrupted_copy_is_the_old_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "there" / "a" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)

    def put(content: str, changed: int) -> Outcome:
        file.write_text(content)
        os.utime(file, (changed, changed))
        return copy(f"file://{tmp_path}/there", tmp_path / "copy")

    def end(path: Path, text: str) -> int:
        if path.name.startswith(STATE):
            raise KeyboardInterrupt
        return write(path, text)

    put("a1", 1)
    write = Path.write_text
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", end)  # The process is killed when the new model is there, and not written down.
        with pytest.raises(KeyboardInterrupt):
            put("a2", 2)
    assert put("a1", 1).changed == ["a"]
    assert (tmp_path / "copy" / "a" / "1" / "model.onnx").read_text() == "a1"


def test_a_full_disk_is_named_and_not_the_address_and_there_is_no_model_by_halves(bucket: Bucket) -> None:
    bucket.copy()
    before = bucket.read()
    bucket.put("a/1/model.onnx", "another")
    (bucket.root / ".state.json.new").symlink_to("/dev/full")
    outcome = bucket.copy()
    assert outcome.error == f"{URL} cannot be copied to {bucket.root}: No space left on device"
    assert bucket.read() in (before, before | {"a/1/model.onnx": "another"})
    (bucket.root / ".state.json.new").unlink()
    assert bucket.copy().error == ""
    assert bucket.read() == before | {"a/1/model.onnx": "another"}


def test_a_directory_that_cannot_be_made_is_named(bucket: Bucket) -> None:
    bucket.root.write_text("a file")
    assert bucket.copy().error == f"{URL} cannot be copied to {bucket.root}: File exists"
