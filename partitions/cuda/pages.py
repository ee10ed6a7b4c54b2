"""Memory in pieces: their addresses, and pages that are populated before they are needed, without the GIL."""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator

PIECE = 1 << 20
"""Bytes to populate at a time: meanwhile the kernel may block other threads of the process that map memory."""
PIN_PIECE = 4 << 20
"""Bytes of host memory that are page-locked in one call. The driver holds a lock meanwhile that every launch takes: for 0.4 ms
at most (64 MiB in such pieces), and a neighbour's slowest copy took 0.5. By 512 MiB in one call it was held up for 17 ms
(H100, 2026-11-26, tests/gpu/test_pinning.py). A copy engine takes no copy across two pieces: see `engines.cuda.copies`."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14 and later (include/uapi/asm-generic/mman-common.h)
_libc = ctypes.CDLL(None, use_errno=True)  # Its functions are called without the GIL.


def pieces(address: int, nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    """The address and size of each piece of this memory, cut where an address is a multiple of `most` bytes."""
    at, end = address, address + nbytes
    while at < end:
        size = min(end, (at // most + 1) * most) - at
        yield at, size
        at += size


def populate(address: int, nbytes: int) -> None:
    """Have the kernel provide every page of this memory of the process; its contents stay. Blocks.

    Nothing may write to the memory meanwhile. Raises OSError: ENOMEM if no memory is left or the memory is not mapped.
    """
    end = address + nbytes
    at = address // mmap.PAGESIZE * mmap.PAGESIZE
    while at < end:
        size = min(PIECE, end - at)
        if not _populate(at, size):
            pages = memoryview((ctypes.c_char * size).from_address(at)).cast("B")[:: mmap.PAGESIZE]
            pages[:] = pages.tobytes()
        at += size


def _populate(address: int, nbytes: int) -> bool:
    """False where the kernel is too old for the call."""
    while _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_WRITE):
        found = ctypes.get_errno()
        if found == errno.EINVAL:
            return False
        if found not in (errno.EINTR, errno.EAGAIN):
            raise OSError(found, os.strerror(found))
    return True
