"""`python mps_keeper.py FOLDER COMMAND...`: runs an MPS daemon, and ends it and its server when its own parent ends.

It knows that by the end of its standard input. It is run as a file, with the standard library alone.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""From <linux/prctl.h>: a signal when the parent ends; become the parent of processes below whose own parent ends."""


def main(folder: str, *command: str) -> int:
    """Return the daemon's exit status, or 128 and its signal, once all has ended and the folder is removed."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        )
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", flush=True)
        return 1
    waiting = select.poll()
    for descriptor in (sys.stdin.fileno(), os.pidfd_open(daemon.pid)):
        waiting.register(descriptor, select.POLLIN)
    waiting.poll()
    daemon.kill()
    status = daemon.wait()
    end_children()
    shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


def end_children() -> None:
    """Kill this process's children, which are what the daemon has left, and wait for their end."""
    with suppress(ChildProcessError):
        while True:
            for child in children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)


def children() -> list[int]:
    """The process ids of this process's children."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # It has ended.
            if int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
