"""What a server keeps in the folder for temporary files: nothing that is left there, and nothing that needs a short name."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.watched_server import alive

from .processes import Running, configure, running, running_folder, tenant
from .wire import answered, client, until

TENANTS = tenant("acme", "identity")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of the processes that are started, with a name that is too long for a socket's."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_server_has_no_temporary_files_and_starts_whatever_the_length_of_their_folders_name(
    temporary: Path, tmp_path: Path, standard: Path
) -> None:
    with running(configure(tmp_path / "greenlane.toml", standard, TENANTS)) as server, client(server, "acme") as http:
        assert answered(http) == 200
        assert left(temporary) == []
        descriptors = len(os.listdir(f"/proc/{server.popen.pid}/fd"))
        for _ in range(2):
            _kill_forkserver(server)
            with client(server, "acme") as again:
                until(lambda: answered(again) == 200)
            assert left(temporary) == []
        temporary.rmdir()
        _kill_forkserver(server)
        with client(server, "acme") as again:
            until(lambda: answered(again) == 200)
        assert len(os.listdir(f"/proc/{server.popen.pid}/fd")) <= descriptors, "one for each forkserver is left open"


def _kill_forkserver(server: Running) -> None:
    """And those processes without which no request is answered, so that others are forked from another one."""
    parent = {one.parent for one in server.family() if one.name == "greenlane acme"}.pop()
    children = [one for one in server.family() if one.name in ("greenlane acme", "greenlane (disp")]
    for pid in (parent, *(child.pid for child in children)):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(children))


def test_the_demos_models_are_removed_after_a_second_signal_too(temporary: Path) -> None:
    with running_folder(temporary, ["listening on"]) as server:
        assert [name.partition("-demo-")[0] for name in left(temporary)] == ["greenlane"]
        server.signal()
        server.wait_for_log("draining: ")
        server.signal()
        server.wait()
    assert left(temporary) == []


def test_without_a_folder_for_temporary_files_the_start_ends_with_one_line(tmp_path: Path, standard: Path) -> None:
    """As where all file systems are read-only: no file may have a byte."""
    config = configure(tmp_path / "greenlane.toml", standard, TENANTS)
    words = ["prlimit", "--fsize=0", sys.executable, "-B", "-m", "server", "--config", str(config)]
    given = {name: value for name, value in os.environ.items() if not name.startswith("COV")}  # Which could not be written.
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=given)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("greenlane: no process can be started: [Errno 2] No usable temporary directory found in ['")
    assert line.endswith("; a socket is made at the start in the folder for temporary files, which TMPDIR names")
