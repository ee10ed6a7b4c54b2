"""Simulated memory: new and freed memory is filled with poison, and an access that the device cannot make loses the device."""

import ctypes
from dataclasses import dataclass

NEW, FREED = 0xDB, 0xDD
PAGE = 256


@dataclass
class Region:
    """Allocated memory. Its address is not used again after it is freed."""

    address: int
    nbytes: int
    owner: object
    device: int = -1
    """Whose memory it is; -1 for the host's."""
    context: int = 0
    """The context that it was allocated in; none if it is from a pool."""

    def poison(self, byte: int) -> None:
        ctypes.memset(self.address, byte, self.nbytes)

    def holds(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes


def new_region(nbytes: int) -> Region:
    """Memory at a multiple of PAGE, as the driver gives it."""
    owner = ctypes.create_string_buffer(nbytes + PAGE)
    region = Region(-(-ctypes.addressof(owner) // PAGE) * PAGE, nbytes, owner)
    region.poison(NEW)
    return region
