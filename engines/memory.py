"""Host memory by address, as the seam between HTTP and device names it."""

import ctypes


def view(address: int, nbytes: int) -> memoryview:
    """The bytes at an address, writable, without a copy; the caller keeps the memory alive. Empty for zero bytes."""
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
