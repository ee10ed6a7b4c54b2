"""Memory of a simulated GPU that processes share, by the driver's virtual memory management: memory files of the kernel's."""

import ctypes
import mmap
import os
from typing import Any

from .errors import CUDAError, Misuse
from .memory import Region

PAGE = 2 << 20
NAME = "simulated device memory"
"""As it is among the mappings of a process."""
_NOTHING, _MAP_FIXED = 0, 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Handle:
    """An allocation, until it is released."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def release(self) -> None:
        if self.descriptor < 0:
            raise Misuse("a handle of memory was released twice")
        os.close(self.descriptor)
        self.descriptor = -1


class Pages:
    """What a process has reserved of addresses, and mapped there."""

    def __init__(self, allocated: dict[int, Region]) -> None:
        self._allocated = allocated
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, Region] = {}

    @property
    def count(self) -> int:
        """How many pieces of addresses are reserved."""
        return len(self._reserved)

    def create(self, nbytes: int) -> Handle:
        if nbytes % PAGE:
            raise CUDAError("CUDA_ERROR_INVALID_VALUE: no whole pages")
        descriptor = os.memfd_create(NAME)
        os.truncate(descriptor, nbytes)
        return Handle(descriptor)

    def export(self, handle: Handle) -> int:
        return os.dup(handle.descriptor)

    def take(self, descriptor: int) -> Handle:
        return Handle(os.dup(descriptor))

    def reserve(self, nbytes: int) -> int:
        address = self._map(None, nbytes, _NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        if self._reserved.pop(address) != nbytes or address in self._mapped:
            raise Misuse("addresses were given back that something is mapped at, or not as they were reserved")
        _libc.munmap(address, nbytes)

    def map(self, address: int, nbytes: int, handle: Handle) -> None:
        if self._reserved[address] != nbytes:
            raise CUDAError("CUDA_ERROR_INVALID_VALUE: not as it was reserved")
        self._map(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, handle.descriptor)
        self._mapped[address] = Region(address, nbytes, None)

    def allow(self, address: int, nbytes: int, desc: list[Any], device: int, context: int) -> None:
        """From now on the device may use it."""
        (access,) = desc
        if access.location.id != device:
            raise Misuse("access for another device")
        region = self._mapped[address]
        region.device, region.context = device, context
        self._allocated[address] = region

    def unmap(self, address: int, nbytes: int) -> None:
        del self._mapped[address]
        self._allocated.pop(address, None)
        self._map(address, nbytes, _NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)

    def _map(self, address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
        found = _libc.mmap(address, nbytes, protection, flags, descriptor, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            raise CUDAError("CUDA_ERROR_OUT_OF_MEMORY: the host's")
        return int(found)
