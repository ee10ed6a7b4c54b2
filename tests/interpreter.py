"""How long the GIL is kept from threads that want it, for example other tenants' workers.

On a busy machine a thread waits for a core as well, and the thread that holds the GIL may lose its core meanwhile. So what
counts of each wait is the time in which the watcher could have run, had it had the interpreter, and in which other threads
of this process computed: the smaller of the two. What sleeps with the interpreter is not seen.

While a watcher lives, threads are asked for the GIL after 0.1 ms, not 5. Without this, a thread that gives it back and
takes it again before the watcher has a core starts the wait anew, and many short calls look like one long one.
"""

import os
import sys
import threading
import time
from types import TracebackType

_TICK = 0.0003
_SWITCH_INTERVAL = 0.0001


class Watcher:
    """A thread that wants the interpreter again and again from `with` on; `longest` is the seconds it had to wait at most."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher")
        self._switch_interval = 0.0

    def __enter__(self) -> "Watcher":
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL)
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_interval)

    def _watch(self) -> None:
        statistics = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        try:
            waited, others, began = _waited(statistics), _others(), time.monotonic_ns()
            self._begun.set()
            while not self._over.is_set():
                time.sleep(_TICK)
                # Reading the file lets go of the interpreter too, so a wait for it there counts as one.
                delay, computed, ended = _waited(statistics), _others(), time.monotonic_ns()
                blocked = ended - began - _TICK * 1e9 - (delay - waited)
                self.longest = max(self.longest, min(blocked, computed - others) / 1e9)
                waited, others, began = delay, computed, ended
        finally:
            os.close(statistics)


def _others() -> int:
    """Nanoseconds for which the other threads of this process have computed."""
    return time.process_time_ns() - time.thread_time_ns()


def _waited(statistics: int) -> int:
    """Nanoseconds for which a thread was ready to run and had no core (https://docs.kernel.org/scheduler/sched-stats.html)."""
    return int(os.pread(statistics, 100, 0).split()[1])
