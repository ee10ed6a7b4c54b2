"""What processes that this one starts have in common: they find the same modules, end with it, and do not hold it up."""

import ctypes
import os
import signal
import sys
from contextlib import suppress

from . import thread_priority

_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>: send a signal when the thread that started this process ends."""
_NICE = 19


def search_path() -> str:
    """A PYTHONPATH with which another interpreter finds the modules that this one does."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def die_with_parent(parent: int) -> None:
    """Have this process killed when the process that started it ends, or now if it already has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def lower_priority(cores: frozenset[int]) -> None:
    """Run on these cores, if any are given, and with the lowest normal priority."""
    thread_priority.lower_priority(_NICE)
    if cores:
        with suppress(OSError):  # The cores may no longer be available to this process.
            os.sched_setaffinity(0, cores)
