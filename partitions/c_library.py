"""Finds the libraries that this project compiles from C, and compiles them for a checkout.

A compiled wheel has them (setup.py); one without machine code has not. In a checkout `scripts/install` compiles them if there
is a C compiler, into build/c; a file's name holds the hash of its sources, so an old one is never loaded. They do not use
Python's C API, so they need neither Python's headers nor the version that they were compiled for.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

OUTPUT = Path(__file__).parents[1] / "build" / "c"
FLAGS = ("-O2", "-g", "-shared", "-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


def find_library(sources: Sequence[Path], flags: Sequence[str] = ()) -> Path | None:
    """The library of these sources, of which the first includes the others: a wheel's, or what was compiled in a checkout."""
    source = sources[0]
    installed = source.with_name(f"{source.stem}_c{sysconfig.get_config_var('EXT_SUFFIX')}")
    return next((path for path in (installed, compiled(sources, flags)) if path and path.exists()), None)


def compiled(sources: Sequence[Path], flags: Sequence[str] = ()) -> Path | None:
    """Where the library of these sources is in a checkout once it is compiled; None without the sources."""
    digest = hashlib.sha256(repr((FLAGS, tuple(flags))).encode())
    try:
        for source in sources:
            digest.update(source.read_bytes())
    except FileNotFoundError:
        return None
    return OUTPUT / f"{sources[0].stem}-{digest.hexdigest()[:16]}.so"


def compile_library(sources: Sequence[Path], flags: Sequence[str] = ()) -> Path:
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


def compile_here(sources: Sequence[Path]) -> None:
    """As a command: compile them and print where the library is; ends with a sentence and status 1 where that fails."""
    try:
        print(compile_library(sources))
    except RuntimeError as error:
        sys.exit(f"{sources[0].name} was not compiled: {error}")
