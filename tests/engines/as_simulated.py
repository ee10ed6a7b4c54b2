"""A child for `building.builds` that compiles kernels on a simulated GPU: `python -m tests.engines.as_simulated`.

What follows on the command line is the child's own.
"""

import sys

from engines.tensorrt import build_child
from tests.simulation import Gpu, installed
from tests.simulation.tensorrt import library

COMMAND = (sys.executable, "-m", "tests.engines.as_simulated")
"""The command that starts this child, for `engines.Builds`."""


def main() -> int:
    """Compile as `engines.tensorrt.build_child` does."""
    gpu = Gpu()
    with installed(gpu, library(gpu)):
        return build_child.main()


if __name__ == "__main__":
    sys.exit(main())
