"""Pinned memory for inputs and outputs that are not in memory the GPU can reach: one area for each slot of an executor's ring.

Whether the GPU reaches an address is asked of the driver each time it is used, since memory may have been unpinned.
"""

from collections.abc import Callable, Sequence
from ctypes import memmove
from weakref import ref

from cuda.bindings import driver
from cuda.core import Buffer, LegacyPinnedMemoryResource

from ..base import Room, Tensor
from ..errors import ExecutionFailed
from ..signature import align
from .work import Completion, StagedWork

_ATTRIBUTES = (
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
)
_UNKNOWN_TO_CUDA = 0
_ON_A_DEVICE = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
_SUCCESS = driver.CUresult.CUDA_SUCCESS


class Staging:
    """Used by one thread at a time.

    `device` is the GPU's ordinal, `sizes` the bytes of each input, then of each output. `notify` is called whenever an
    inference is staged because its memory is not pinned.
    """

    def __init__(self, notify: Callable[[], None], device: int, sizes: Sequence[int], inputs: int) -> None:
        self._notify = notify
        self._device = device
        self._inputs = inputs
        self._offsets, self._size = _offsets(sizes)
        self._buffers: dict[int, Buffer] = {}
        self._uncollected: dict[int, ref[StagedWork]] = {}

    def __repr__(self) -> str:
        return f"<Staging of {self._size} bytes in {len(self._buffers)} slots>"

    def source(self, slot: int, index: int, tensor: Tensor) -> int:
        """An address where the GPU can read this input: the tensor's, or that of a copy in pinned memory. Raises CUDAError."""
        if not tensor.nbytes or self.reaches(tensor.address):
            return tensor.address
        at = self._address(slot) + self._offsets[index]
        memmove(at, tensor.address, tensor.nbytes)
        return at

    def reaches(self, address: int) -> bool:
        """As `is_reachable`, for this GPU."""
        return is_reachable(address, self._device)

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
    """Whether the GPU with this ordinal can access an address: pinned host memory, or its own memory.

    Raises ExecutionFailed for the memory of another GPU, which cannot be staged.
    """
    # cuPointerGetAttribute would fail for memory that CUDA does not know, and compute-sanitizer reports such failures.
    result, found = driver.cuPointerGetAttributes(len(_ATTRIBUTES), _ATTRIBUTES, address)
    if result != _SUCCESS or found[0] == _UNKNOWN_TO_CUDA:
        return False
    kind, owner = found
    if kind == _ON_A_DEVICE and owner != device:
        raise ExecutionFailed(
            f"the memory at {address:#x} is device {owner}'s, but the engine is bound to device {device}; copy it there first"
        )
    return True


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each tensor, with the end appended, and the total size in bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = align(end + size)
    return [*offsets, end], end
