"""What the C library does with the memory of large bodies: it keeps it for the next ones, until none come for a while.

By default glibc takes every block of 128 KiB or more from the system and gives it back when it is freed. A body of 600 KB
passes through several such blocks, and the system's work for their pages, one fault for each 4 KiB, was most of such a request.
"""

import ctypes
import os
from collections.abc import Callable, Hashable
from pathlib import Path

# The parameters' numbers are of glibc's malloc.h, the largest value of the first of its malloc.c (4 MiB * sizeof(long)).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
LARGEST = 32 << 20
"""Bytes of the largest block that is kept."""
KEPT = 128 << 20
"""Bytes at the end of the heap that may stay unused."""


def keep_large_blocks(tune: Callable[[int, int], int] | None = None) -> bool:
    """Have freed blocks kept for the next, in the whole process and from now on; False where the C library has no such setting.

    `tune` is mallopt(3), that of the process by default; musl has none.
    """
    tune = tune or getattr(ctypes.CDLL(None), "mallopt", None)
    return tune is not None and bool(tune(_MMAP_THRESHOLD, LARGEST)) and bool(tune(_TRIM_THRESHOLD, KEPT))


QUIET = 5.0
"""Seconds without work after which memory that is kept for nothing is given back: that takes milliseconds for each 100 MiB."""
SPARE = 64 << 20
"""Bytes that may be kept nevertheless."""


class Tidy:
    """Gives back the memory that a process keeps for nothing, when it has had nothing to do since the last look.

    `work` is different whenever something was done. `resident` says how many bytes the process has of its own, and `trim`
    gives back what is free of them; both are the system's by default.
    """

    def __init__(
        self,
        work: Callable[[], Hashable],
        resident: Callable[[], int] | None = None,
        trim: Callable[[], object] | None = None,
    ) -> None:
        self._work = work
        self._resident = resident or own_bytes
        self._trim = trim or give_back
        self._done: Hashable = None
        self._lean = self._resident()

    def __repr__(self) -> str:
        return f"<Tidy above {self._lean + SPARE} bytes>"

    def look(self) -> None:
        """To be called every `QUIET` seconds. Blocks for some milliseconds if there is much to give back."""
        done, before, now = self._work(), self._done, self._resident()
        self._done, self._lean = done, min(self._lean, now)
        if done == before and now > self._lean + SPARE:
            self._trim()
            self._lean = self._resident()  # What is left is in use; only what comes on top is worth another try.


def own_bytes() -> int:
    """The bytes of memory that this process shares with no other, nor with a file."""
    _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def give_back() -> bool:
    """Give free memory back to the system; False where there is none, or the C library cannot (musl)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
