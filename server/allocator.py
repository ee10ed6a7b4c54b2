"""What the C library does with the memory of large bodies: it keeps it for the next ones.

By default glibc takes every block of 128 KiB or more from the system and gives it back when it is freed. A body of 600 KB
passes through several such blocks, and the system's work for their pages, one fault for each 4 KiB, was most of such a request.
"""

import ctypes
from collections.abc import Callable

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
