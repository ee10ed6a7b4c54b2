"""Threads that compile and load give way to threads that serve."""

import os
from contextlib import suppress

NICE = 10
"""The niceness of a thread that compiles: what serves gets nine times its share of a core that both want (sched(7))."""


def give_way() -> None:
    """Lower the priority of the calling thread, and of those it starts from now on, as a library's own compiling threads.

    On Linux a niceness is a thread's own. It cannot be raised again without a privilege, so this is for threads of their own.
    """
    with suppress(OSError):  # Where the system forbids it, they compete.
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
