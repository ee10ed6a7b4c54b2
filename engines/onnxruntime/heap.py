"""How much memory this process has allocated. ONNX Runtime does not say what a session takes."""

import ctypes
from collections.abc import Callable


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc; see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def _open() -> Callable[[], _MallInfo] | None:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _MallInfo
    return found


_mallinfo2 = _open()
"""None where the C library has no such function, as before glibc 2.33."""


def heap_bytes() -> int:
    """Bytes that the process's allocator has given out and not got back; 0 where it does not say. Takes some microseconds."""
    if _mallinfo2 is None:
        return 0
    found = _mallinfo2()
    return int(found.uordblks) + int(found.hblkhd)
