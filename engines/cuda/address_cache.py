"""Caches how an inference reads its inputs and writes its outputs, by their addresses.

A server has few slots, and their memory is pinned once. So nearly every inference uses addresses that were seen before, and
neither has to ask the driver whether the GPU reaches them nor to build a table for the copies.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from partitions.cuda.device import CudaDevice

from ..base import Room, Tensor
from ..memo import Memo
from .copies import Table

MAX_ENTRIES = 1024
"""Entries that an executor keeps."""

_Key = tuple[object, ...]


class Captured(Protocol):
    """What is run for a set of shapes: it has a graph, until that is destroyed."""

    @property
    def graph(self) -> object:
        """None without one."""


P = TypeVar("P", bound=Captured)


class ResolvedAddresses(NamedTuple, Generic[P]):
    """The shapes to run for some inputs and a room, and the addresses that everything is copied from and to."""

    prepared: P
    table: Table
    outputs: tuple[Tensor, ...]
    staged: bool
    """The outputs are written to staging memory, and `Work.wait` copies them."""
    padded: bool
    """Other rows are run than the caller asked for."""
    more: tuple[Table, ...] = ()
    """Further runs of the same shapes, where the rows are divided: their addresses."""


class AddressCache(Generic[P]):
    """The cache of one executor. One thread at a time uses it; any thread may unpin memory meanwhile."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._unpin_count = device.unpin_count
        self._entries: Memo[_Key, ResolvedAddresses[P]] = Memo(MAX_ENTRIES)

    def get(self, inputs: Sequence[Tensor], room: Room) -> ResolvedAddresses[P] | None:
        """The entry for these addresses, if it is still valid: no memory was unpinned since, and its graph exists."""
        if self._unpin_count != self._device.unpin_count:
            self._unpin_count = self._device.unpin_count
            self._entries.clear()
        try:
            found = self._entries.get(_key(inputs, room))
        except (AttributeError, TypeError):
            return None  # Not tensors; the caller finds that out when it resolves them.
        return found if found and found.prepared.graph else None

    def put(self, inputs: Sequence[Tensor], room: Room, resolved: ResolvedAddresses[P]) -> None:
        """Keep an entry, unless some of its memory was not pinned by `CudaDevice.pin`."""
        tensors = (*inputs, *resolved.outputs)
        if all(not each.nbytes or self._device.is_pinned(each.address, each.nbytes) for each in tensors):
            self._entries.remember(_key(inputs, room), resolved)


def _key(inputs: Sequence[Tensor], room: Room) -> _Key:
    """All that an entry depends on, which is not the object that owns the memory."""
    return (room, *[(tensor.shape, tensor.address, tensor.nbytes) for tensor in inputs])
