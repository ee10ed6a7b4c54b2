"""Cores that never sleep while something is measured, because on a virtual machine to wake one can take milliseconds.

A tenant that asks now and then, alone, lets its cores sleep; beside a neighbour they are awake. So a machine that wakes
them late makes the tail alone the longer one, and what the neighbour really does is not seen.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print("awake", flush=True)
while os.getppid() == int(sys.argv[2]):
    pass
"""
"""In the class of the least priority (sched(7)): any other thread gets the core at once. Ends with its parent."""


@contextmanager
def awake(cores: Iterable[int]) -> Iterator[None]:
    """Keep these cores busy with nothing from the beginning of the block to its end. Blocks until they are."""
    with ExitStack() as stack:
        spinners = [stack.enter_context(_spinner(core)) for core in cores]
        for spinner in spinners:
            assert spinner.stdout
            if spinner.stdout.readline() != b"awake\n":
                raise OSError("a core cannot be kept awake: its own words are above")
        yield


@contextmanager
def _spinner(core: int) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-I", "-S", "-c", _SPIN, str(core), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()
