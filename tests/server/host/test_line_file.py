"""Lines of a file: whole ones, whatever the disk, other processes and the umask do."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.host.log_writer import LineFile, append
from server.host.logs import JsonFormatter


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_new_file_is_not_for_every_user_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    append(tmp_path / "a", b"one\n")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640 & ~umask


def test_a_line_after_half_a_line_begins_a_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"whole\nhal")
    append(tmp_path / "a", b"next\n")
    append(tmp_path / "a", b"last\n")
    assert (tmp_path / "a").read_bytes() == b"whole\nhal\nnext\nlast\n"


def test_a_file_that_was_moved_away_is_made_again(tmp_path: Path) -> None:
    append(tmp_path / "a", b"one\n")
    (tmp_path / "a").rename(tmp_path / "b")
    append(tmp_path / "a", b"two\n")
    assert ((tmp_path / "b").read_text(), (tmp_path / "a").read_text()) == ("one\n", "two\n")


FULL = """
import logging, pathlib, resource, signal, sys
from server.host import logs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logs.configure("json", "info", pathlib.Path(sys.argv[1]))
audit = logging.getLogger("greenlane.audit")
say = lambda text: audit.info(text, extra={"audit": {}, "caller": "administrator"})
say("before")
size = pathlib.Path(sys.argv[1]).stat().st_size
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
for _ in range(300):
    say("lost")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
say("after")
"""


def test_lines_that_a_full_disk_loses_are_counted_within_the_logs_limits(tmp_path: Path) -> None:
    """A limit of the file's size stands for the end of the disk."""
    found = subprocess.run([sys.executable, "-c", FULL, str(tmp_path / "audit")], capture_output=True, text=True, check=True)
    whole, half, after = (tmp_path / "audit").read_text().splitlines()
    assert [json.loads(each)["message"] for each in (whole, after)] == ["before", "after"]
    assert len(half) == 10
    lines = [json.loads(line) for line in found.stderr.splitlines()]
    assert 0 < len(lines) < 250
    assert lines[0]["message"].startswith(f"{tmp_path / 'audit'}: a line could not be written, and is lost: ")
    assert lines[-1]["message"] == f"{tmp_path / 'audit'}: written again; lines lost before: 300"


def test_what_cannot_be_formatted_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler = LineFile(tmp_path / "a")
    handler.setFormatter(JsonFormatter())
    handler.handle(logging.LogRecord("a", logging.INFO, "", 0, "%d", ("x",), None))
    assert not (tmp_path / "a").exists()
