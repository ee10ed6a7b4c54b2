"""Makes glibc keep the memory of large bodies for the next ones, and returns it to the system when none come for a while.

By default glibc takes every block of 128 KiB or more from the system and returns it when it is freed. A body of 600 KB passes
through several such blocks, and the page faults for them, one for each 4 KiB, took most of the time of such a request.
"""

import ctypes
import os
from collections.abc import Callable, Hashable
from pathlib import Path

# The numbers of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
LARGEST = 32 << 20
"""Bytes of the largest block that is kept: the most that glibc's malloc.c allows (4 MiB * sizeof(long))."""
KEPT = 128 << 20
"""Bytes at the end of the heap that may stay unused."""


def keep_large_blocks(tune: Callable[[int, int], int] | None = None) -> bool:
    """Keep freed blocks for reuse, in the whole process and from now on. False if the C library has no such setting.

    `tune` is mallopt(3), by default that of the C library; musl has none.
    """
    tune = tune or getattr(ctypes.CDLL(None), "mallopt", None)
    return tune is not None and bool(tune(_MMAP_THRESHOLD, LARGEST)) and bool(tune(_TRIM_THRESHOLD, KEPT))


def share_one_heap(tune: Callable[[int, int], int] | None = None) -> bool:
    """Have all threads that start from now on take memory from one heap. False if the C library has no such setting.

    By default glibc gives threads up to eight heaps for each core. Models are loaded and moved on threads that end then, and
    each such change takes memory from another heap, where little of it fits what the next one needs. `tune` as above.
    """
    tune = tune or getattr(ctypes.CDLL(None), "mallopt", None)
    return tune is not None and bool(tune(_ARENA_MAX, 1))


QUIET = 5.0
"""Seconds without work after which unused memory is returned, which takes milliseconds for each 100 MiB."""
SPARE = 64 << 20
"""Bytes that are kept even then."""


class Tidy:
    """Returns unused memory to the system when the process has been idle since the last look.

    `work()` changes whenever work was done. `resident()` is the number of private bytes of the process, and `trim()` returns
    the free ones to the system; by default they are /proc/self/statm and malloc_trim(3).
    """

    def __init__(
        self, work: Callable[[], Hashable], resident: Callable[[], int] | None = None, trim: Callable[[], object] | None = None
    ) -> None:
        self._work = work
        self._resident = resident or own_bytes
        self._trim = trim or give_back
        self._done: Hashable = None
        self._lean = self._resident()

    def look(self) -> None:
        """Call it every `QUIET` seconds. Blocks for some milliseconds if there is much to return."""
        done, before, now = self._work(), self._done, self._resident()
        self._done, self._lean = done, min(self._lean, now)
        if done == before and now > self._lean + SPARE:
            self._trim()
            self._lean = self._resident()  # What is left is in use, so only growth beyond it is worth another trim.


def own_bytes() -> int:
    """The bytes of resident memory that this process shares with no other process and no file."""
    _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def give_back() -> bool:
    """Return free memory to the system. False if there was none, or the C library cannot (musl)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
