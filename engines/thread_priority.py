"""Lowers the priority of threads that compile, load and copy, below that of threads that serve.

Problem: these keep a core busy for seconds, and the threads of an inference share the same cores.
Solution: a niceness, and a longer slice. On Linux both belong to a thread and new threads inherit them, so a library's own
threads have them too. The niceness says who gets how much of a core that both want, but not who runs first: a thread that wakes
waits for the end of the other one's slice, and as long as 4 ms where that is noticed at the next tick. One whose own slice is
shorter does not wait (EEVDF, since Linux 6.12; kernel/sched/fair.c, PREEMPT_SHORT).
Hazard: a thread cannot raise its priority again without CAP_SYS_NICE, so only call this on threads made for the purpose.
"""

import ctypes
import os
import platform
import struct
from contextlib import suppress

NICE = 10
"""The niceness of a compiling thread: a serving thread gets nine times its share of a core that both want (sched(7))."""
SLICE = 5_000_000
"""Nanoseconds: longer than the kernel's own, which is at most 2.8 ms; as short as can be, as locks may be held meanwhile."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
"""The number of the system call, for which the C library has had no function before glibc 2.41."""


def lower_priority(nice: int = NICE) -> None:
    """Lower the priority of the calling thread, and of those it starts, to this niceness at least.

    Does nothing where the system forbids it; Linux before 6.12 ignores the slice.
    """
    with suppress(OSError):
        nice = max(nice, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        if _SCHED_SETATTR and os.sched_getscheduler(0) == os.SCHED_OTHER:
            # struct sched_attr (sched_setattr(2)): size, policy, flags, nice, priority, runtime, deadline, period.
            wanted = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, SLICE, 0, 0)
            ctypes.CDLL(None).syscall(_SCHED_SETATTR, 0, wanted, 0)
