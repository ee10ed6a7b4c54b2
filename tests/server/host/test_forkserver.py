"""The start of the forkserver in an interpreter of its own: what it leaves in the folder for temporary files, and failures."""

import os
import subprocess
import sys
from pathlib import Path

BEGIN = """
import multiprocessing.forkserver, os, resource, signal, socket
from server.host import forkserver

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

def address():
    return multiprocessing.forkserver._forkserver._forkserver_address

def is_reached():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address())
    return True

def end():
    forkserver.kill()
    os.waitid(os.P_PID, forkserver.pid(), os.WEXITED | os.WNOWAIT)
"""


def ran(code: str, folder: Path) -> str:
    """What this code printed, in an interpreter with these temporary files; the forkserver may not import the server."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_one_is_started_after_another_and_no_descriptor_and_no_file_is_left(tmp_path: Path) -> None:
    code = """
for _ in range(100):
    forkserver.start()
    before = forkserver.pid()
    forkserver.start()
    assert forkserver.pid() == before
    assert is_reached()
    end()
print(os.listdir(os.environ["TMPDIR"]))
"""
    assert ran(code, tmp_path) == "[]"


def test_where_no_descriptor_is_left_none_runs_that_cannot_be_reached(tmp_path: Path) -> None:
    code = """
ensure_running, taken = multiprocessing.forkserver.ensure_running, []

def and_take_all():
    ensure_running()
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass

multiprocessing.forkserver.ensure_running = and_take_all
try:
    forkserver.start()
except OSError as error:
    print(os.strerror(error.errno))
for each in taken:
    os.close(each)
multiprocessing.forkserver.ensure_running = ensure_running
first = forkserver.pid()
os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
forkserver.start()
assert forkserver.pid() != first and is_reached()
end()
print(os.listdir(os.environ["TMPDIR"]))
"""
    assert ran(code, tmp_path).splitlines() == ["Too many open files", "[]"]
