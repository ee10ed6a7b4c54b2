"""`python -m benchmarks.virtualcores`: `python -m server` on a CPU of GRANULES granules, whichever cores there are.

So that a repartition has something to move on a machine of two cores. It isolates nothing: granules share cores, by turns, or
with `--in-order` the first of them the first core, and so on.
"""

import sys
from collections.abc import Sequence
from unittest.mock import patch

from server import __main__ as program
from tests.end_to_end.harness import cores
from tests.end_to_end.virtual import VirtualDevice, VirtualPartition

GRANULES = 16
"""As many as an H100 has."""


class InOrder(VirtualDevice):
    """Neighbouring granules share a core, so that two tenants that have half of them each share none."""

    def _make(self, granules: Sequence[int]) -> VirtualPartition:
        there, count = cores(), len(self.granules)
        return VirtualPartition(sorted(granules), sorted({there[g * len(there) // count] for g in granules}), self._attached)


def main() -> int:
    """Serve as the command line says."""
    kind = VirtualDevice
    if "--in-order" in sys.argv:
        sys.argv.remove("--in-order")
        kind = InOrder
    with patch.object(program, "open_configured", lambda _: kind(GRANULES)):
        return program.main()


if __name__ == "__main__":
    sys.exit(main())
