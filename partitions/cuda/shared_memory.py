"""Memory of a GPU that several processes share: the first one that needs it makes it, and leaves it for the others.

By the driver's virtual memory management, as its memory exists as long as any process has it mapped or has a descriptor of it,
also when the process that made it was killed. Descriptors go by a `Deposit`. Under MPS each client has its own addresses, and
may import what another one has exported as processes without MPS may.
"""

import os
from contextlib import ExitStack
from typing import Any

from cuda.bindings import driver

from ..deposit import Deposit
from ..errors import PartitionError
from .driver import handle_return

_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class SharedMemory:
    """Memory at `address` of this process. It belongs to the device's primary context, which has to be current."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    def close(self) -> None:
        """Unmap it; nothing may use it here. Others keep it. Raises CUDAError."""
        handle_return(driver.cuMemUnmap(self.address, self.nbytes))
        handle_return(driver.cuMemAddressFree(self.address, self.nbytes))


def open_shared(device: int, deposit: Deposit, label: str) -> SharedMemory:
    """The page of memory (2 MiB) that all processes with this deposit share, of zeros at first; of the device of this ordinal,
    which is current.

    Blocks for some milliseconds. Raises CUDAError, OSError, and PartitionError if what was left there has another label.
    """
    properties = _properties(device)
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    nbytes = int(handle_return(driver.cuMemGetAllocationGranularity(properties, minimum)))
    with ExitStack() as used:
        if not (found := deposit.look()):
            handle = handle_return(driver.cuMemCreate(nbytes, properties, 0))
            used.callback(_release, handle)
            exported = int(handle_return(driver.cuMemExportToShareableHandle(handle, _DESCRIPTOR, 0)))
            used.callback(os.close, exported)
            memory = _mapped(handle, nbytes, properties)
            others = used.enter_context(ExitStack())
            others.callback(memory.close)
            handle_return(driver.cuMemsetD8(memory.address, 0, nbytes))
            handle_return(driver.cuStreamSynchronize(0))  # It is zero before another process can find it.
            own = f"{label} {os.urandom(8).hex()}"
            found = deposit.leave(own, exported)
            if found.label == own:
                os.close(found.descriptor)
                others.pop_all()
                return memory
        used.callback(os.close, found.descriptor)
        if found.label.split(" ")[0] != label:
            raise PartitionError(f"what processes share is {found.label!r}; expected {label!r}: they are not of one version")
        handle = handle_return(driver.cuMemImportFromShareableHandle(found.descriptor, _DESCRIPTOR))
        used.callback(_release, handle)
        return _mapped(handle, nbytes, properties)


def _properties(device: int) -> Any:
    found = driver.CUmemAllocationProp()
    found.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.requestedHandleTypes = _DESCRIPTOR
    found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = device
    return found


def _mapped(handle: Any, nbytes: int, properties: Any) -> SharedMemory:
    """Map it where the device reads and writes; the mapping keeps it, also once the handle is released. Raises CUDAError."""
    with ExitStack() as failed:
        address = int(handle_return(driver.cuMemAddressReserve(nbytes, 0, 0, 0)))
        failed.callback(lambda: handle_return(driver.cuMemAddressFree(address, nbytes)))
        handle_return(driver.cuMemMap(address, nbytes, 0, handle, 0))
        failed.callback(lambda: handle_return(driver.cuMemUnmap(address, nbytes)))
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        handle_return(driver.cuMemSetAccess(address, nbytes, [access], 1))
        failed.pop_all()
    return SharedMemory(address, nbytes)


def _release(handle: Any) -> None:
    handle_return(driver.cuMemRelease(handle))
