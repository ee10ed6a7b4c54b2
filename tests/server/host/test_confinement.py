"""A confined process reaches no other one of its user: what it may do no more is done in a child of the test."""

import subprocess
import sys

import pytest

from server.host import confinement

PROBE = """
import os, subprocess, sys
from pathlib import Path
from server.host.confinement import confine

other, confined = int(sys.argv[1]), confine()
def tried(what):
    try:
        what()
    except OSError:
        return "refused"
    return "done"

own = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
print(
    confined,
    "NoNewPrivs:\\t1" in Path("/proc/self/status").read_text(),
    tried(lambda: os.kill(other, 0)),
    tried(lambda: open(f"/proc/{other}/mem", "rb").close()),
    tried(lambda: os.readlink(f"/proc/{other}/fd/0")),
    tried(lambda: os.readlink(f"/proc/{own.pid}/fd/0")),
    tried(own.kill),
    tried(lambda: Path("/proc/self/comm").write_text("confined")),
    Path(f"/proc/{other}/stat").read_text() != "",
)
"""


def test_a_confined_process_reaches_its_own_children_and_no_other_process() -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            command = [sys.executable, "-c", PROBE, str(other.pid)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        finally:
            other.kill()
    confined, *found = done.stdout.split()
    if confined == "False":
        pytest.skip("this kernel has no scopes of Landlock")
    assert found == ["True", "refused", "refused", "refused", "done", "done", "done", "True"]


@pytest.mark.parametrize("version", [-1, 5])
def test_without_landlock_a_process_is_not_confined_and_goes_on(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        """A kernel of another version."""

        def __init__(self) -> None:
            self.calls: list[int] = []

            def syscall(number: int, *_: object) -> int:
                self.calls.append(number)
                return version

            self.syscall = syscall

        def prctl(self, *arguments: int) -> int:
            return 0

    kernel = Libc()
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: kernel)
    assert not confinement.confine()
    assert len(kernel.calls) == 1
