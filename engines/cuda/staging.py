"""Pinned memory for inputs and outputs that are not in memory the GPU can reach: one area for each slot of an executor's ring.

The GPU that counts is the partition's, whichever is current; memory of another one is refused, not staged, as a copy would hide
what the caller did not mean. What this process allocated or pinned itself is known to it. Of other memory the driver is asked
each time it is used, since it may have been unpinned.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import memmove
from typing import Any
from weakref import ref

from cuda.bindings import driver
from cuda.core import Buffer, LegacyPinnedMemoryResource

from partitions.cuda.device import CudaDevice
from partitions.cuda.driver import handle_return

from ..base import Room, Tensor
from ..errors import ExecutionFailed
from ..signature import align
from .work import Completion, StagedWork

_ATTRIBUTES = (
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
)
_UNKNOWN_TO_CUDA = 0
_ON_A_DEVICE = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
_SUCCESS = driver.CUresult.CUDA_SUCCESS


class Staging:
    """Used by one thread at a time.

    `sizes` are the bytes of each input, then of each output. `notify` is called whenever an inference is staged because its
    memory is not pinned.
    """

    def __init__(self, notify: Callable[[], None], device: CudaDevice, sizes: Sequence[int], inputs: int) -> None:
        self._notify = notify
        self._device = device
        self._inputs = inputs
        self._own: frozenset[int] = frozenset()
        self._offsets, self._size = _offsets(sizes)
        self._buffers: dict[int, Buffer] = {}
        self._uncollected: dict[int, ref[StagedWork]] = {}

    def source(self, slot: int, index: int, tensor: Tensor) -> int:
        """An address where the GPU can read this input: the tensor's, or that of a copy in pinned memory. Raises CUDAError."""
        if not tensor.nbytes or self.reaches(tensor.address, tensor.nbytes):
            return tensor.address
        at = self._address(slot) + self._offsets[index]
        memmove(at, tensor.address, tensor.nbytes)
        return at

    def reaches(self, address: int, nbytes: int) -> bool:
        """Whether the GPU reaches this memory. Raises as `is_reachable`."""
        return address in self._own or self._device.is_pinned(address, nbytes) or is_reachable(address, self._device.index)

    @contextmanager
    def owning(self, addresses: Sequence[int]) -> Iterator[None]:
        """In the block, inferences use the GPU's memory at these addresses, which this process has allocated there."""
        self._own = frozenset(addresses)
        try:
            yield
        finally:
            self._own = frozenset()

    def room(self, slot: int, quiet: bool = False) -> Room:
        """Memory for the outputs of one inference. `quiet`: do not notify, as the caller could not have provided it.

        Raises CUDAError.
        """
        first = self._offsets[self._inputs]
        return Room(self._address(slot, quiet) + first, self._size - first)

    def staged_work(self, slot: int, completion: Completion, outputs: tuple[Tensor, ...]) -> StagedWork:
        """The work of an inference whose outputs stay in this slot until it, or the next `reclaim`, has copied them."""
        work = StagedWork(completion, outputs)
        self._uncollected[slot] = ref(work)
        return work

    def reclaim(self, slot: int) -> None:
        """Copy the outputs of the inference that used this slot before, which has ended, so that it can be used again."""
        if (before := self._uncollected.pop(slot, None)) and (work := before()):
            work.collect()

    def close(self) -> None:
        """Free the memory; nothing may be in flight."""
        while self._buffers:
            self._buffers.popitem()[1].close()

    def _address(self, slot: int, quiet: bool = False) -> int:
        if not quiet:
            self._notify()
        if slot not in self._buffers:
            self._buffers[slot] = LegacyPinnedMemoryResource().allocate(self._size)
        return int(self._buffers[slot].handle)


def is_reachable(address: int, device: int) -> bool:
    """Whether the GPU with this ordinal, whose primary context is current, can access an address of foreign memory: pinned
    host memory, or its own memory.

    Raises ExecutionFailed for the memory of another GPU, which cannot be staged, and CUDAError.
    """
    # cuPointerGetAttribute would fail for memory that CUDA does not know, and compute-sanitizer reports such failures.
    result, found = driver.cuPointerGetAttributes(len(_ATTRIBUTES), _ATTRIBUTES, address)
    if result != _SUCCESS or found[0] == _UNKNOWN_TO_CUDA:
        return False
    kind, context, pool = found
    if kind == _ON_A_DEVICE and (owner := _owner(context, pool, device)) != device:
        raise ExecutionFailed(
            f"the memory at {address:#x} is device {owner}'s, but the engine is bound to device {device}; copy it there first"
        )
    return True


def _owner(context: Any, pool: Any, device: int) -> int:
    """The ordinal of the device that owns memory of this context, or, as memory from a pool has none, of this pool.

    The attribute DEVICE_ORDINAL is not asked for: it was 0 for memory of a second H100 (driver 580.159), and cuda-bindings 13.2
    and 13.3 answer 0 on any machine (https://github.com/NVIDIA/cuda-python/pull/2752). Memory that is of no device's current
    pool is taken for this `device`'s.
    """
    if not int(context):
        count = int(handle_return(driver.cuDeviceGetCount())) if int(pool) else 0
        owners = (each for each in range(count) if int(handle_return(driver.cuDeviceGetMemPool(each))) == int(pool))
        return next(owners, device)
    if int(context) == int(handle_return(driver.cuCtxGetCurrent())):
        return device
    handle_return(driver.cuCtxPushCurrent(context))
    try:
        return int(handle_return(driver.cuCtxGetDevice()))
    finally:
        driver.cuCtxPopCurrent()


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each tensor, with the end appended, and the total size in bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = align(end + size)
    return [*offsets, end], end
