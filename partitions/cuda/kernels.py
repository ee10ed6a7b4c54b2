"""CUDA kernels of our own, compiled from source when they are first needed and kept as long as their device."""

import hashlib
import logging
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock, get_ident

from cuda.bindings import driver
from cuda.core import Buffer, Device, Kernel, ObjectCode, Program, ProgramOptions
from cuda.core.utils import ProgramCacheResource

from ..deposit import Deposit
from ..errors import DeviceLost, PartitionError
from ..regular_file import open_regular
from .driver import handle_return, translated
from .shared_memory import SharedMemory, open_shared

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
