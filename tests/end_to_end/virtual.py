"""More granules than this machine has cores, so that repartition has something to move.

Everything but the mapping is real: threads are pinned to cores that exist, several granules to one core, and where a
partition ran is given in granules.
"""

import os
import threading
from collections.abc import Sequence
from time import monotonic_ns, sleep

from partitions import PartitionError
from partitions.base import Bandwidth, Held, UnpacedLoads
from partitions.cpu import CpuPartition
from partitions.deposit import Deposit

from .harness import cores


class VirtualPartition(CpuPartition):
    """Granules that share cores with others; `size` counts granules, threads are as many as distinct cores."""

    @property
    def size(self) -> int:
        return len(self.granules)

    def locate(self) -> frozenset[int]:
        super().locate()
        return frozenset(self.granules)

    def hold(self, seconds: float) -> Held:
        """Nothing is held, but it takes as long."""
        since = monotonic_ns()
        sleep(seconds)
        return Held(self.size, since, monotonic_ns())


class VirtualDevice:
    """`count` granules on this machine's cores; `failures` makes the carves with these numbers fail."""

    kind = "cpu"
    unit = "core"

    def __init__(self, count: int, failures: Sequence[int] = ()) -> None:
        self.granules = (1,) * count
        self.loads = UnpacedLoads()
        self.carved: list[VirtualPartition] = []
        self._failures = set(failures)
        self._calls = 0
        self._attached = threading.local()

    def describe(self) -> str:
        return f"{len(self.granules)} granules on cores {cores()}"

    def carve(self, granules: Sequence[int], lent: Sequence[int] = ()) -> VirtualPartition:
        self._calls += 1
        if self._calls in self._failures:
            raise PartitionError(f"carve number {self._calls} was scripted to fail")
        self.carved.append(partition := self._make(granules))
        if lent:
            partition.lent, partition.lent_cores = tuple(sorted(lent)), self._make(lent).cores
            partition.home_cores = self._make(sorted({*granules} - {*lent})).home_cores
        return partition

    def _make(self, granules: Sequence[int]) -> VirtualPartition:
        there = cores()
        return VirtualPartition(sorted(granules), sorted({there[g % len(there)] for g in granules}), self._attached)

    address = uuid = ""

    @property
    def shared(self) -> bool:
        """As on a GPU: in a client of an MPS daemon."""
        return "CUDA_MPS_PIPE_DIRECTORY" in os.environ

    def share(self, deposit: Deposit) -> None:
        """There are no processes to share with."""

    def memory(self) -> int | None:
        return None

    def bandwidth(self) -> Bandwidth | None:
        """None that is known."""
        return None

    def energy(self) -> int | None:
        return None

    def pin(self, address: int, nbytes: int) -> "VirtualDevice":
        return self

    def close(self) -> None:
        """Nothing to release."""
