"""Only files are opened, and none of these waits."""

import os
import socket
from pathlib import Path

import pytest

from partitions.regular_file import open_regular, read_regular


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"four")
    (tmp_path / "link").symlink_to(path)
    assert read_regular(path, 4) == read_regular(str(tmp_path / "link"), 5) == b"four"
    with open_regular(path) as file:
        assert file.read() == b"four"
    for opening in (read_regular, open_regular):
        with pytest.raises(OSError, match="has 4 bytes; at most 3 are read"):
            opening(path, 3)


def test_a_file_without_a_size_is_read_no_further_either() -> None:
    with pytest.raises(OSError, match="at most 3 are read"):
        read_regular("/proc/self/status", 3)


def test_a_file_of_the_kernel_that_has_nothing_to_read_is_not_waited_for() -> None:
    with pytest.raises(OSError, match=r"/proc/kmsg|at most 0 are read"):  # Root may read it, and finds something or not.
        read_regular("/proc/kmsg", 0)


@pytest.mark.parametrize("link", [False, True], ids=["itself", "link"])
@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device", "directory"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, kind: str, link: bool) -> None:
    path = tmp_path / "a"
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "a named pipe":
            os.mkfifo(path)
        elif kind == "a socket":
            listener.bind(str(path))
        elif kind == "a device":
            path = Path("/dev/zero")
        else:
            path.mkdir()
        if link:
            (tmp_path / "link").symlink_to(path)
            path = tmp_path / "link"
        expected = "Is a directory" if kind == "directory" else f"is {kind}; expected a file"
        with pytest.raises(OSError, match=expected):
            open_regular(path)


def test_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "a", 1)
