"""Pinned memory for inputs and outputs that lie where the GPU cannot reach, a piece for each place in an executor's ring.

Whether it can is looked up for the address when it is used.
"""

from collections.abc import Sequence
from ctypes import memmove
from weakref import ref

from cuda.core import Buffer, LegacyPinnedMemoryResource

from ..base import Room, Tensor
from ..signature import align
from .notice import StagingNotice
from .pointers import is_reachable
from .work import Mark, StagedWork


class Staging:
    """`device` is the GPU's ordinal, `sizes` the bytes of each input, then of each output. One thread at a time."""

    def __init__(self, notice: StagingNotice, device: int, sizes: Sequence[int], inputs: int) -> None:
        self.silent = False
        """Whether to keep quiet about it, as while zeros are run to warm up."""
        self._notice = notice
        self._device = device
        self._inputs = inputs
        self._offsets, self._size = _offsets(sizes)
        self._buffers: dict[int, Buffer] = {}
        self._lent: dict[int, ref[StagedWork]] = {}

    def __repr__(self) -> str:
        return f"<Staging of {self._size} bytes in {len(self._buffers)} places>"

    def source(self, place: int, index: int, tensor: Tensor) -> int:
        """An address from which the GPU can read this input: its own, or its copy in pinned memory. Raises CUDAError."""
        if not tensor.nbytes or self.reaches(tensor.address):
            return tensor.address
        at = self._address(place) + self._offsets[index]
        memmove(at, tensor.address, tensor.nbytes)
        return at

    def reaches(self, address: int) -> bool:
        """Whether the GPU can use this address: pinned host memory, or its own. Raises ExecutionFailed for another GPU's."""
        return is_reachable(address, self._device)

    def room(self, place: int, quiet: bool = False) -> Room:
        """Memory for the outputs side by side; `quiet` where nobody could have given it. Raises CUDAError."""
        first = self._offsets[self._inputs]
        return Room(self._address(place, quiet) + first, self._size - first)

    def lend(self, place: int, mark: Mark, outputs: tuple[Tensor, ...]) -> StagedWork:
        """The work whose outputs lie there until it, or the next `reclaim`, has copied them."""
        work = StagedWork(mark, outputs)
        self._lent[place] = ref(work)
        return work

    def reclaim(self, place: int) -> None:
        """Let a work that has ended take its outputs, as its place is to be used again."""
        if (before := self._lent.pop(place, None)) and (work := before()):
            work.collect()

    def close(self) -> None:
        """Free the memory; nothing may be in flight."""
        while self._buffers:
            self._buffers.popitem()[1].close()

    def _address(self, place: int, quiet: bool = False) -> int:
        if not self.silent and not quiet:
            self._notice.say()
        if place not in self._buffers:
            self._buffers[place] = LegacyPinnedMemoryResource().allocate(self._size)
        return int(self._buffers[place].handle)


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each piece begins, one more for what comes after them, and the bytes of all together."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = align(end + size)
    return [*offsets, end], end
