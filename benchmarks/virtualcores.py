"""`python -m benchmarks.virtualcores`: `python -m server` on a CPU of GRANULES granules, whichever cores there are.

So that a repartition has something to move on a machine of two cores. It isolates nothing: granules share cores, by turns, or
with `--in-order` the first of them the first core, and so on. With `--bandwidth` it says what it moves, as a GPU does, so that
tenants are fenced.
"""

import sys
from collections.abc import Sequence
from unittest.mock import patch

from partitions import Device
from partitions.base import Bandwidth
from server import __main__ as program
from server.config.schema import DeviceConfig
from server.host.leaving import leave
from tests.end_to_end.harness import cores
from tests.end_to_end.virtual import VirtualDevice, VirtualPartition

GRANULES = 16
"""As many as an H100 has."""


class InOrder(VirtualDevice):
    """Neighbouring granules share a core, so that two tenants that have half of them each share none."""

    def _make(self, granules: Sequence[int]) -> VirtualPartition:
        there, count = cores(), len(self.granules)
        return VirtualPartition(sorted(granules), sorted({there[g * len(there) // count] for g in granules}), self._attached)


class Moving(VirtualDevice):
    """Moves so little that small models draw too much."""

    def bandwidth(self) -> Bandwidth:
        return Bandwidth(memory=20 * 10**9, unit=2 * 10**9, pcie=2 * 10**9)


def by_turns(_: DeviceConfig) -> Device:
    """Open the device in a process of the server, which imports this by its name."""
    return VirtualDevice(GRANULES)


def in_order(_: DeviceConfig) -> Device:
    """The same with `--in-order`."""
    return InOrder(GRANULES)


def moving(_: DeviceConfig) -> Device:
    """The same with `--bandwidth`."""
    return Moving(GRANULES)


def main() -> int:
    """Serve as the command line says."""
    from benchmarks import virtualcores

    opener = virtualcores.by_turns
    for word, another in (("--in-order", virtualcores.in_order), ("--bandwidth", virtualcores.moving)):
        if word in sys.argv:
            sys.argv.remove(word)
            opener = another
    with patch.object(program, "open_configured", opener):
        return program.main()


if __name__ == "__main__":
    leave(main())
