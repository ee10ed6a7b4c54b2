from pathlib import Path

import pytest

from engines.files import replace_file


def test_a_file_is_put_in_place_with_its_directories_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(OSError, match="taken"):
        replace_file(tmp_path / "taken", b"")
    assert list(tmp_path.iterdir()) == [tmp_path / "taken"]
