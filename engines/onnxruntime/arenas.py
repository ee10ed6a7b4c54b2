"""Limits what a session may take for the tensors of its runs, where the data decides how large outputs are.

Problem: ONNX Runtime takes the memory of such an output (`Expand`, `Tile`, `Range`) before anybody knows its size, and its
bindings for Python can give a session's own arena no limit. They can register an arena with a limit for the process, and a
session keeps the one that it was made with. Solution: one is registered for each such session while that is made.

It does not say either what a session takes: `heap_bytes` is what the whole process has.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import onnxruntime as ort

from ..signature import Signature

SHRINK = ("memory.enable_memory_arena_shrinkage", "cpu:0")
"""The entry of a run's options that has the session free, at the end of the run, the memory that it does not use."""

_REFUSED = re.compile(r"Available memory of (\d+) is smaller than requested bytes of (\d+)")
_CPU = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
_registering = Lock()  # The registered arena is the process's.


@contextmanager
def limited(options: ort.SessionOptions, nbytes: int) -> Iterator[None]:
    """A session that is made with these options inside the `with` statement has an arena of its own of at most so many bytes.

    Only one thread at a time is inside.
    """
    options.add_session_config_entry("session.use_env_allocators", "1")
    with _registering:
        _register(nbytes)
        try:
            yield
        finally:
            _register(nbytes)  # An empty one: the process would keep the session's, with its memory, beyond the session's end.


def weights_beside(path: Path) -> int:
    """Bytes of a model file and of those in its folder, which may have its weights: the session has copies of them."""
    with os.scandir(path.parent) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file())


def is_unsized(signature: Signature) -> bool:
    """Whether the sizes of some outputs do not follow from the shapes of the inputs."""
    known = {dim for spec in signature.inputs for dim in spec.dims if isinstance(dim, str) and dim}
    return any(isinstance(dim, str) and dim not in known for spec in signature.outputs for dim in spec.dims)


def refused(error: Exception) -> tuple[int, int] | None:
    """What a run asked for last, and what of its arena was left, in bytes; None for any other error."""
    found = _REFUSED.search(str(error))
    return (int(found[2]), int(found[1])) if found else None


def _register(nbytes: int) -> None:
    """Register an arena in place of the one before. Its memory doubles as it grows, the only way that all of it is freed."""
    ort.create_and_register_allocator(_CPU, ort.OrtArenaCfg({"max_mem": nbytes, "arena_extend_strategy": 0}))


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
