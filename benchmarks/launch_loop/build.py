"""`python -m benchmarks.launch_loop.build`: compile the C sources, with `cc`, into build/launch_loop.

A library's name holds the hash of its sources, so an old one is never loaded. The libraries need nothing but libc (2.17, the
fake 2.34), so those that were compiled on one machine run on another that has no compiler.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
OUTPUT = HERE.parents[1] / "build" / "launch_loop"
SOURCES = {
    "loop": ("loop.c", "link.h"),
    "driver": ("driver.c", "link.h"),
    "fake_cuda": ("fake_cuda.c",),
}
"""The libraries, and the files of each; the first is compiled."""
FLAGS = ("-O2", "-g", "-shared", "-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


def library(name: str, flags: tuple[str, ...] = (), folder: Path = OUTPUT) -> Path:
    """The file of this library, which is compiled if it is not there. Raises RuntimeError, with what the compiler wrote."""
    digest = hashlib.sha256(repr((FLAGS, flags)).encode())
    for source in SOURCES[name]:
        digest.update((HERE / source).read_bytes())
    path = folder / f"{name}-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        _compile(HERE / SOURCES[name][0], path, flags)
    return path


def _compile(source: Path, target: Path, flags: tuple[str, ...]) -> None:
    compiler = shutil.which("cc")
    if not compiler:
        raise RuntimeError(
            f"{target} is not there and no compiler either; run python -m benchmarks.launch_loop.build elsewhere"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".part")
    command = [compiler, *FLAGS, *flags, "-o", str(partial), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    partial.replace(target)


if __name__ == "__main__":
    for each in SOURCES:
        print(library(each))
    sys.exit(0)
