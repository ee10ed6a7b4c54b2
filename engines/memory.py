"""Host memory by address, as the seam between HTTP and device names it."""

import ctypes

SMALL = 1 << 18
"""Bytes up to which a copy keeps the interpreter: some 50 us, while to get it back may take a whole switch interval."""


def view(address: int, nbytes: int) -> memoryview:
    """The bytes at an address, writable, without a copy; the caller keeps the memory alive. Empty for zero bytes."""
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def copy(to: int, source: int, nbytes: int) -> None:
    """Copy bytes from one address to another; the two must not overlap.

    Without the interpreter if there are many: an assignment to a memoryview keeps it, for as long as the page faults of fresh
    memory take as well, and every other tenant's worker would wait for it.
    """
    if nbytes > SMALL:
        ctypes.memmove(to, source, nbytes)  # By way of CDLL, which lets go of the interpreter.
    elif nbytes:
        view(to, nbytes)[:] = view(source, nbytes)
