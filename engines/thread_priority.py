"""Lowers the priority of threads that compile and load, below that of threads that serve.

Problem: compiling keeps a core busy for seconds, and the threads of an inference share the same cores.
Solution: a niceness of 10 for the compiling threads. On Linux a niceness belongs to a thread and new threads inherit it, so
the library's own compiling threads have it too.
Hazard: a thread cannot raise its priority again without CAP_SYS_NICE, so only call this on threads made for the purpose.
"""

import os
from contextlib import suppress

NICE = 10
"""The niceness of a compiling thread: a serving thread gets nine times its share of a core that both want (sched(7))."""


def lower_priority() -> None:
    """Lower the priority of the calling thread and of those it starts. Does nothing where the system forbids it."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
