import os
from pathlib import Path

import pytest

from engines.onnxruntime.model_copy import copy_model


def test_a_copy_keeps_its_bytes_when_the_file_is_changed_or_deleted(tmp_path: Path) -> None:
    path, content = tmp_path / "model", os.urandom(100_000)
    path.write_bytes(content)
    copy = copy_model(path)
    path.write_bytes(b"another")
    assert bytes(copy.view()) == Path(copy.path).read_bytes() == content
    assert copy.nbytes == len(content)
    copy.close()


def test_a_model_copy_cannot_be_changed_through_its_path(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"model")
    copy = copy_model(tmp_path / "model")
    with pytest.raises(PermissionError), open(copy.path, "r+b", buffering=0) as file:
        file.write(b"other")
    with pytest.raises(PermissionError):
        os.truncate(copy.path, 1)
    assert bytes(copy.view()) == b"model"
    copy.close()


def test_a_model_copy_is_freed_when_closed_or_collected(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"model")
    copy = copy_model(tmp_path / "model")
    path = copy.path
    assert os.path.exists(path)
    copy.close()
    copy.close()
    assert not os.path.exists(path)
    another = copy_model(tmp_path / "model")
    path = another.path
    del another
    assert not os.path.exists(path)


def test_a_file_that_is_too_large_for_a_model_is_not_copied(tmp_path: Path) -> None:
    with open(tmp_path / "model", "wb") as file:
        file.truncate(1 << 31)
    with pytest.raises(OSError, match="has 2147483648 bytes; at most 2147483647 are read"):
        copy_model(tmp_path / "model")


def test_a_model_that_cannot_be_read_raises_os_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        copy_model(tmp_path)
    with pytest.raises(FileNotFoundError):
        copy_model(tmp_path / "missing")
