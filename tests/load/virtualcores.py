"""`python -m tests.load.virtualcores`: `python -m server` on a CPU of GRANULES granules, whichever cores there are.

So that a repartition has something to move on a machine of two cores. It isolates nothing: granules share cores.
"""

import sys
from unittest.mock import patch

from server import __main__ as program
from tests.end_to_end.virtual import VirtualDevice

GRANULES = 16
"""As many as an H100 has."""


def main() -> int:
    """Serve as the command line says."""
    with patch.object(program, "open_configured", lambda _: VirtualDevice(GRANULES)):
        return program.main()


if __name__ == "__main__":
    sys.exit(main())
