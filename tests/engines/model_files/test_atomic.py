import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.model_files.cache_folder import replace_file

CUT_SHORT = """
import resource, signal, sys
from pathlib import Path
from engines.model_files.cache_folder import replace_file

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # A write beyond the limit is EFBIG then, after some of it.
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    replace_file(Path(sys.argv[1]), b"new" * 10_000)
except OSError as error:
    print(error.strerror)
"""


def test_replace_file_creates_directories_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_replace_file_removes_its_temporary_file_when_the_rename_fails(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(OSError, match="taken"):
        replace_file(tmp_path / "taken", b"")
    assert list(tmp_path.iterdir()) == [tmp_path / "taken"]


def test_replace_file_keeps_the_old_file_when_a_write_fails(tmp_path: Path) -> None:
    """F50: in a process that may write no file of more than 5,000 bytes."""
    path = tmp_path / "kernels"
    replace_file(path, b"old" * 1000)
    ended = subprocess.run([sys.executable, "-c", CUT_SHORT, str(path)], capture_output=True, text=True, check=True)
    assert ended.stdout == "File too large\n"
    assert path.read_bytes() == b"old" * 1000
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_that_began_before_reads_the_old_file_to_its_end(tmp_path: Path) -> None:
    """F50."""
    path = tmp_path / "kernels"
    replace_file(path, b"old" * 1000)
    with path.open("rb", buffering=0) as file:
        beginning = file.read(1500)
        replace_file(path, b"new")
        assert beginning + file.readall() == b"old" * 1000
    assert path.read_bytes() == b"new"


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F50. The whole file is passed to fsync and then renamed. What the disk makes of that cannot be tested."""
    path, synced, fsync = tmp_path / "kernels", [], os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", watched)
    replace_file(path, b"new" * 1000)
    assert synced == [(path.stat().st_ino, 3000, False)]
