"""CUDA kernels of our own, compiled from source when they are first needed and kept as long as their device; and memory that
processes share.
"""

import hashlib
import logging
import os
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

from cuda.bindings import driver
from cuda.core import Buffer, Device, Kernel, ObjectCode, Program, ProgramOptions
from cuda.core.utils import ProgramCacheResource

from ..deposit import Deposit
from ..errors import DeviceLost, PartitionError
from ..regular_file import open_regular
from .driver import handle_return, translated

log = logging.getLogger("greenlane.partitions")


class Kernels:
    """The kernels of one device. Any thread may call.

    A kernel runs on every partition of the device: the context is that of the stream it is launched on.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._compiled: dict[str, tuple[Kernel, ...]] = {}
        self._memory: dict[str, Buffer] = {}
        self._shared: SharedMemory | None = None
        self._deposit: Deposit | None = None

    @property
    def in_use(self) -> bool:
        """Whether there is anything to close."""
        return bool(self._compiled or self._memory or self._shared)

    def share(self, deposit: Deposit) -> None:
        """Have all processes with this deposit share one memory, from now on; it is this object's."""
        self._deposit = deposit

    def compiled(
        self, device: Device, source: str, names: tuple[str, ...], what: str, kept: Path | None = None
    ) -> tuple[Kernel, ...]:
        """The kernels of these names in CUDA C++ `source`. `device` must be current in the calling thread.

        The first call with a source compiles it, which blocks for some 0.1 to 0.4 s; others wait for it. With a folder where it
        is `kept`, the next process takes it from there in 10 ms. Raises PartitionError, which says that `what` could not be
        compiled, or that NVRTC is missing.
        """
        with self._lock, translated(f"compiling {what}"):
            if source not in self._compiled:
                try:
                    program = Program(source, "c++", ProgramOptions(arch=f"sm_{device.arch}"))
                    self._compiled[source] = _compiled(program, names, kept)
                except RuntimeError as error:  # libnvrtc was not found
                    raise PartitionError(f"compiling {what} needs NVRTC, pip install nvidia-cuda-nvrtc: {error}") from error
            return self._compiled[source]

    def memory(self, device: Device, source: str, nbytes: int) -> Buffer:
        """Memory of the device, of zeros at first, that all launches of the kernels of `source` share: in this process, and
        with `share` in all of them. There is one such source then.

        `device` must be current. Where the driver does not share memory the process has its own, and the log says so. Raises
        PartitionError, DeviceLost.
        """
        with self._lock, translated("allocating memory that kernels share"):
            if source not in self._memory:
                shared = self._share(device, source) if self._deposit else None
                self._memory[source] = Buffer.from_handle(shared or _allocated(nbytes), nbytes)
            return self._memory[source]

    def _share(self, device: Device, source: str) -> int | None:
        """The address of what all processes share; None where they cannot. Raises DeviceLost."""
        assert self._deposit
        if self._shared:
            raise PartitionError("the processes of a GPU share the memory of one source of kernels only")
        label = sha256(source.encode()).hexdigest()[:16]
        try:
            with translated("mapping it"):
                self._shared = open_shared(device.device_id, self._deposit, label)
        except DeviceLost:
            raise
        except (OSError, PartitionError) as error:
            log.warning("this process does not take turns with the GPU's others: memory for that cannot be shared: %s", error)
            return None
        return self._shared.address

    def close(self) -> None:
        """Unload them, and free their memory; none may be running or be part of a graph. The device must be current.

        Raises CUDAError.
        """
        self._compiled.clear()
        shared, self._shared = self._shared, None
        deposit, self._deposit = self._deposit, None
        if deposit:
            deposit.close()
        while self._memory:
            address = int(self._memory.popitem()[1].handle)
            if shared and shared.address == address:
                shared.close()
            else:
                handle_return(driver.cuMemFree(address))


def _allocated(nbytes: int) -> int:
    """Raises CUDAError."""
    address = int(handle_return(driver.cuMemAlloc(nbytes)))  # Not of a stream, which may end before the device.
    handle_return(driver.cuMemsetD8(address, 0, nbytes))
    handle_return(driver.cuStreamSynchronize(0))  # A partition's stream does not wait for this one.
    return address


def _compiled(program: Program, names: tuple[str, ...], kept: Path | None) -> tuple[Kernel, ...]:
    """The kernels of these names, from the folder if they are there. Raises CUDAError, DeviceLost."""
    if kept:
        try:
            with translated(f"taking kernels from {kept}"):
                return tuple(map(program.compile("cubin", cache=KeptPrograms(kept)).get_kernel, names))
        except DeviceLost:
            raise
        except (OSError, PartitionError) as error:
            log.warning("%s: kernels cannot be taken from there or kept there, so this process compiles them: %s", kept, error)
            with suppress(OSError):
                KeptPrograms(kept).clear()  # A damaged file would be taken by every process.
    return tuple(map(program.compile("cubin").get_kernel, names))


class KeptPrograms(ProgramCacheResource):  # type: ignore[misc]  # cuda.core has no types.
    """Compiled programs in a folder, a file for each, which changes atomically. Methods block, and raise OSError.

    The files have the mode of any new file. Those of `cuda.core.utils.FileStreamProgramCache` are for the user alone who wrote
    them, and so is a folder of its own, and a check or a build by another user may be what fills the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, key: bytes | str) -> bytes:
        try:
            with open_regular(self._file(key)) as file:
                return file.read()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: bytes | str, value: bytes | bytearray | memoryview | ObjectCode) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._file(key)
        part = target.with_name(f"{target.name}.{os.getpid()}-{get_ident()}.tmp")
        try:
            with part.open("xb") as file:
                file.write(bytes(value.code) if isinstance(value, ObjectCode) else value)
                file.flush()
                os.fsync(file.fileno())  # Else the rename may reach the disk first, and a crash leaves an empty file.
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def __delitem__(self, key: bytes | str) -> None:
        try:
            self._file(key).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __len__(self) -> int:
        return len(list(self._folder.glob("*.cubin")))

    def clear(self) -> None:
        for file in self._folder.glob("*.cubin"):
            file.unlink(missing_ok=True)

    def _file(self, key: bytes | str) -> Path:
        return self._folder / f"{hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()}.cubin"


_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class SharedMemory:
    """Memory at `address` here that processes share. It belongs to the device's primary context, which has to be current.

    By the driver's virtual memory management, as it exists as long as any process has it mapped or has a descriptor of it,
    also when the process that made it was killed. Descriptors go by a `Deposit`. Under MPS each client has its own addresses,
    and may import what another one has exported as processes without MPS may.
    """

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
