"""Populates pages of memory before they are needed, without the GIL."""

import ctypes
import errno
import mmap
import os

PIECE = 1 << 20
"""Bytes to populate at a time: meanwhile the kernel may block other threads of the process that map memory."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14 and later (include/uapi/asm-generic/mman-common.h)
_libc = ctypes.CDLL(None, use_errno=True)  # Its functions are called without the GIL.


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
