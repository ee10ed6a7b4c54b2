"""Finds the compiled launch loop; `python -m server.launch_loop.library` compiles it for a checkout (`partitions.c_library`).

Without it workers launch everything themselves, as on processors other than x86-64, whose order of memory accesses loop.c
relies on.
"""

import ctypes
import functools
import logging
import os
import platform
from ctypes import c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from partitions.c_library import compile_here, find_library

from .structures import Entry, Fence, Loop, Pace, Wide

log = logging.getLogger("greenlane.worker")

HERE = Path(__file__).parent
SOURCES = tuple(HERE / name for name in ("loop.c", "link.h", "stretching.h", "neighbours.h", "fence.h", "pacing.h"))
SWITCH = "GREENLANE_LAUNCH_LOOP"
"""Set to 0, workers launch everything themselves: to compare, and to rule the loop out when looking for a fault."""


@functools.cache
def open_library() -> Any:
    """The library, or None if there is none here. Raises RuntimeError if it is not the one of these sources."""
    if os.environ.get(SWITCH) == "0" or platform.machine() != "x86_64":
        return None
    if path := find_library(SOURCES):
        log.info("launch loop: %s", path.name)
        return load(path)
    log.info("launch loop: none, so that inferences wait for the interpreter; `scripts/install` compiles it where cc is found")
    return None


_SIZES = (
    ("launch_loop_size", Loop),
    ("launch_loop_entry_size", Entry),
    ("launch_loop_wide_size", Wide),
    ("launch_loop_fence_size", Fence),
    ("launch_loop_pace_size", Pace),
)


def load(path: Path) -> Any:
    """The library in this file. Its functions are called without the GIL. Raises RuntimeError, OSError."""
    found = ctypes.CDLL(str(path))
    for name, structure in _SIZES:
        size = getattr(found, name)
        size.restype = c_uint64
        if size() != ctypes.sizeof(structure):
            raise RuntimeError(f"{path}: {structure.__name__} has {size()} bytes there and {ctypes.sizeof(structure)} here")
    found.launch_loop_run.argtypes = (c_void_p,)
    found.launch_loop_hash.restype = c_uint64
    found.launch_loop_hash.argtypes = (c_char_p, c_uint32)
    found.launch_loop_rested_since.restype = c_int64
    found.launch_loop_decide.argtypes = (c_void_p, *[c_int64] * 4, c_int, c_int64)
    found.launch_loop_goes_narrow.argtypes = (c_void_p, c_void_p, c_int64)
    found.launch_loop_stays_home.argtypes = (c_void_p, c_void_p, *[c_int64] * 3)
    found.launch_loop_learn_time.argtypes = (c_void_p, c_int64)
    found.launch_loop_learn_home.argtypes = (c_void_p, c_int64)
    found.launch_loop_learn_wide.argtypes = (c_void_p, *[c_int64] * 3)
    found.launch_loop_rested_since.argtypes = (c_void_p,)
    found.launch_loop_pace_wait.restype = c_int64
    found.launch_loop_pace_wait.argtypes = (c_void_p, c_int64)
    found.launch_loop_pace_charge.argtypes = (c_void_p, c_int64, c_uint64, c_uint64, c_uint64)
    return found


if __name__ == "__main__":
    compile_here(SOURCES)
