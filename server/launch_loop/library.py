"""Finds the compiled launch loop, and compiles it for a checkout: `python -m server.launch_loop.library`.

A compiled wheel has it (setup.py). A wheel without machine code has not, and its workers launch everything themselves, as on
processors other than x86-64, whose order of memory accesses loop.c relies on. In a checkout, `scripts/install` compiles it if
there is a C compiler, into build/launch_loop; the file's name holds the hash of its sources, so an old one is never loaded.
The library does not use Python's C API, so it needs neither Python's headers nor the version that it was compiled for.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from .structures import Borrowing, Entry, Loop

log = logging.getLogger("greenlane.worker")

HERE = Path(__file__).parent
OUTPUT = HERE.parents[1] / "build" / "launch_loop"
SOURCES = (HERE / "loop.c", HERE / "link.h", HERE / "stretching.h")
FLAGS = ("-O2", "-g", "-shared", "-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
SWITCH = "GREENLANE_LAUNCH_LOOP"
"""Set to 0, workers launch everything themselves: to compare, and to rule the loop out when looking for a fault."""


@functools.cache
def open_library() -> Any:
    """The library, or None if there is none here. Raises RuntimeError if it is not the one of these sources."""
    if os.environ.get(SWITCH) == "0" or platform.machine() != "x86_64":
        return None
    for path in (HERE / f"loop_c{sysconfig.get_config_var('EXT_SUFFIX')}", compiled()):
        if path and path.exists():
            log.info("launch loop: %s", path.name)
            return load(path)
    log.info("launch loop: none, so that inferences wait for the interpreter; `scripts/install` compiles it where cc is found")
    return None


_SIZES = (("launch_loop_size", Loop), ("launch_loop_entry_size", Entry), ("launch_loop_borrowing_size", Borrowing))


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
    found.launch_loop_learn_home.argtypes = (c_void_p, c_int64)
    found.launch_loop_learn_wide.argtypes = (c_void_p, *[c_int64] * 3)
    found.launch_loop_rested_since.argtypes = (c_void_p,)
    return found


def compiled(sources: Sequence[Path] = SOURCES, flags: Sequence[str] = ()) -> Path | None:
    """Where the library of these sources is in a checkout once it is compiled; None without the sources."""
    digest = hashlib.sha256(repr((FLAGS, tuple(flags))).encode())
    try:
        for source in sources:
            digest.update(source.read_bytes())
    except FileNotFoundError:
        return None
    return OUTPUT / f"{sources[0].stem}-{digest.hexdigest()[:16]}.so"


def compile_library(sources: Sequence[Path] = SOURCES, flags: Sequence[str] = ()) -> Path:
    """Compile the first of these sources, which includes the others, unless that was done.

    Raises RuntimeError, with what the compiler wrote, or if there is no compiler.
    """
    target, compiler = compiled(sources, flags), shutil.which("cc")
    if target is None:
        raise RuntimeError(f"{sources[0]} is not there")
    if target.exists():
        return target
    if compiler is None:
        raise RuntimeError("there is no C compiler (cc)")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, *flags, "-o", str(partial), str(sources[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    partial.replace(target)
    return target


if __name__ == "__main__":
    try:
        print(compile_library())
    except RuntimeError as error:
        sys.exit(f"the launch loop was not compiled: {error}")
