"""A request body whose binary tensors are received straight into a slot, with no copy in between."""

from ..link.slots import Slot
from .request import Placement, check_arrived


class ArrivingBody:
    """The body of one request, from when its JSON, `head`, has arrived; the rest of its `length` bytes are tensors.

    `buffer` is where the next bytes belong; call `advance` once some have come. `received` counts all bytes, the JSON included.
    The slot belongs to the request; it may be released at any time, and this object is of no use after that.
    """

    def __init__(self, head: bytes, length: int, placement: Placement, slot: Slot) -> None:
        self.request = placement.request
        self.received = len(head)
        self._head = head
        self._length = length
        self._placement = placement
        self._slot = slot
        self._next = 0
        self._part = memoryview(b"")
        self._filled = 0
        self._open_next()

    @property
    def complete(self) -> bool:
        """Whether the last byte has arrived."""
        return self.received == self._length

    def buffer(self) -> memoryview:
        """Where the next bytes are to be received: the rest of one tensor. Empty once the body is complete."""
        return self._part[self._filled :] if self._filled else self._part

    def advance(self, nbytes: int) -> None:
        """So many bytes were received into `buffer`."""
        self.received += nbytes
        self._filled += nbytes
        if self._filled == len(self._part):
            self._open_next()

    def write(self, data: bytes | memoryview) -> int:
        """Copy bytes that were received elsewhere; how many of them belong to this body."""
        source, copied = memoryview(data), 0
        while copied < len(source) and not self.complete:
            room = self.buffer()
            size = min(len(room), len(source) - copied)
            room[:size] = source[copied : copied + size]
            self.advance(size)
            copied += size
        return copied

    def check(self) -> None:
        """Check the contents of the complete body. Raises BadRequest."""
        check_arrived(self._placement, self._slot)

    def copy(self) -> bytearray:
        """What has arrived so far, as it was sent."""
        copied = bytearray(self._head)
        for offset, start, size in self._placement.places:
            copied += self._slot.view[offset : offset + max(0, min(size, self.received - start))]
        return copied

    def _open_next(self) -> None:
        """Go on to the next tensor that has any bytes."""
        places, self._filled, self._part = self._placement.places, 0, memoryview(b"")
        while self._next < len(places) and not len(self._part):
            offset, _, size = places[self._next]
            self._part = self._slot.view[offset : offset + size]
            self._next += 1
