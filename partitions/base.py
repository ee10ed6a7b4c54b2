"""The seam to hardware: a device is N granules, and a partition is some of them set aside.

Nothing above this file asks what kind of device it is. One contract test (tests/contract.py) runs against
every implementation.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Closing(Protocol):
    """Something to be closed, once."""

    def close(self) -> None:
        """Let go of it."""


class Partition(Protocol):
    """Granules set aside for one holder. Any thread may call any method unless it says otherwise."""

    @property
    def granules(self) -> tuple[int, ...]:
        """Indices of the granules in this partition, ascending."""

    @property
    def size(self) -> int:
        """How many of the device's units (cores, SMs) the granules hold together."""

    @property
    def host_cores(self) -> frozenset[int] | None:
        """The host's cores that are the holder's own, by number; None if the device sets none aside."""

    def attach(self) -> None:
        """Make the calling thread one of this partition's, for the rest of its life. Does not block."""

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` on a fresh thread attached to this partition; block until it returns; pass on what it raises."""

    def locate(self) -> frozenset[int]:
        """Run a little work here and return the units on which it ran or was free to run. Blocks."""

    def close(self) -> None:
        """Give the hardware back. No work may be in flight. Calling it again does nothing."""


class Device(Protocol):
    """Hardware that can be fenced into granules."""

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`."""

    @property
    def unit(self) -> str:
        """What a granule is counted in: `core` or `SM`."""

    @property
    def granules(self) -> tuple[int, ...]:
        """The size of each granule in units, by its index."""

    def describe(self) -> str:
        """One line for people: what the device is and how it divides."""

    def carve(self, granules: Sequence[int]) -> Partition:
        """Set the granules with these indices aside, each once. Who holds what is the manager's account.

        Raises PartitionError, and TypeError for what is no list of numbers.
        """

    def pin(self, address: int, nbytes: int) -> Closing:
        """Let work of every partition read and write this host memory in place, until what is returned is closed.

        Blocks, and may keep all other work from the device meanwhile, so it is for the time before anybody is served; so does
        closing it. A device that reaches all host memory does nothing. Raises PartitionError.
        """

    def close(self) -> None:
        """Release the device; every partition must be closed before."""
