"""`python -m benchmarks.launch_loop.build`: compile all C sources that the comparison needs, with `cc`, into build/c.

The libraries need nothing but libc (2.17, the fake 2.34), so those that were compiled on one machine run on another that has no
compiler.
"""

from partitions.c_library import compile_library
from server.launch_loop.library import SOURCES
from tests.launchable import FAKE_CUDA, FLAGS

from .native import DRIVER


def main() -> None:
    """Print what was compiled. Raises RuntimeError."""
    print(compile_library(SOURCES), compile_library(DRIVER), compile_library(FAKE_CUDA, FLAGS), sep="\n")


if __name__ == "__main__":
    main()
