"""What partitions share, as kinds of work that strain it: memory, the caches in front of it, and PCIe. Pure.

No partition fences these, so its neighbours feel what one does there. `Partition.strain` is such work, of a device's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import DoesNotFit, Unsupported

Strain = Literal["memory copy", "memory read", "memory write", "random sectors", "L2", "PCIe out", "PCIe in"]
STRAINS: tuple[Strain, ...] = get_args(Strain)
"""Those that other tenants feel most come first. `L2` is the last cache before memory, `PCIe out` is to the host."""
SECTOR = 32
"""Bytes that `random sectors` reads at a time."""
MOST = 2.0
"""Seconds that one may last: it is not stopped once it has begun."""


Before = Callable[[int], Any]
"""Called before each pass of a strain, with the bytes that it moves, on its thread: it may wait, and returns None, or the
partition of the same device that the pass is to run on, held back; see `Partition.strain`."""


def unheld(_: int) -> None:
    """A `Before` that holds no pass."""


@dataclass(frozen=True, slots=True)
class Strained:
    """How many bytes a partition's work has moved, read and written ones both counting, and in how many seconds."""

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Gigabytes a second."""
        return self.nbytes / self.seconds / 1e9


def check_memory(kind: str, needs: int, left: int) -> None:
    """Raise DoesNotFit if a strain needs more than half of the memory that is left: others may need some meanwhile."""
    if 2 * needs > left:
        mb = f"{needs / 1e6:.0f} MB of memory, and {max(0, left) / 1e6:.0f} MB are free, of which it takes half at most"
        raise DoesNotFit(f"a strain of {kind} needs {mb}; unload models, or try again when there is more")


def check(kind: str, seconds: float, kinds: tuple[str, ...] = STRAINS, where: str = "") -> None:
    """Raise Unsupported unless it is one of these kinds, and ValueError unless it lasts for up to MOST."""
    if kind not in kinds:
        raise Unsupported(f"strain {kind!r}: there is none{where}; there are {', '.join(kinds)}")
    if not 0 < seconds <= MOST:
        raise ValueError(f"a strain of {seconds:g} s: expected more than 0 and at most {MOST:g}")
