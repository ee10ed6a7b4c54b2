"""Allocates a tenant's tensor memory: one block for each request, of the size that its tensors need. Pure: no I/O.

Blocks of up to 1 MiB are allocated from the start of the memory, larger ones from its end, and large blocks never use the first
eighth. So large requests cannot keep small ones out, and small ones do not fragment the space of large ones. A freed block is
kept for the next request of its size, which then gets recently used memory; it is merged with its free neighbours when another
size is needed.
"""

from collections.abc import Callable

from ..errors import MemoryFull, TooLarge

UNIT = 64 * 1024
"""The size of every block is a multiple of this, in bytes."""
LARGE = 1 << 20
"""Blocks of more bytes than this are large."""
_SHARE = 8
"""One part in this many is reserved for blocks that are not large."""
_STEPS = 16
"""Block sizes up to each power of two: few, so that freed blocks are used again; at most an eighth is wasted."""


class BlockAllocator:
    """Allocates blocks of a memory of `nbytes` bytes; `setting` is its configuration key. Not thread-safe.

    `evict` is called when there is no room: it may free a block that can be done without, and returns whether it did.
    """

    def __init__(self, nbytes: int, setting: str = "memory") -> None:
        self.nbytes = nbytes
        self.used = 0
        self.evict: Callable[[], bool] = _nothing_to_evict
        self._setting = setting
        self._common = nbytes // _SHARE // UNIT * UNIT
        self._most = largest_block(nbytes)
        self._kept: dict[int, list[int]] = {}
        self._holes: list[tuple[int, int]] = [(0, nbytes // UNIT * UNIT)]  # Start and size of each, ascending.

    def __repr__(self) -> str:
        return f"<BlockAllocator, {self.used} of {self.nbytes} bytes in use>"

    def check(self, nbytes: int) -> None:
        """Raise TooLarge if so many bytes can never be allocated at once."""
        if nbytes > self._most:
            needed = f"the request and its answer need {nbytes} bytes of memory"
            raise TooLarge(f"{needed}; the most for one is {self._most} ({self._explain()})")

    def allocate(self, nbytes: int, spare: int = 0, evict: bool = True) -> tuple[int, int]:
        """Allocate a block of at least so many bytes, plus `spare` if that fits; its start and size.

        `evict` is whether to evict others for it. Raises TooLarge if it would not fit into empty memory, MemoryFull if it does
        not fit now.
        """
        size = block_size(nbytes + spare)
        if size > self._most:
            self.check(nbytes)
            size = self._most
        start = self._find(size)
        if start < 0 and spare:
            size = min(block_size(nbytes), self._most)
            start = self._find(size)
        while start < 0 and evict and self.evict():
            start = self._find(size)
        if start < 0:
            raise MemoryFull(
                f"the request and its answer need {nbytes} bytes of memory in one piece, "
                f"but requests hold {self.used} and the largest piece left for one is {self._largest()} ({self._explain()})"
            )
        self.used += size
        return start, size

    def free(self, start: int, size: int) -> None:
        """Free a block that nothing uses any more."""
        self.used -= size
        kept = self._kept.get(size)
        if kept is None:
            kept = self._kept[size] = []
        kept.append(start)

    def _find(self, size: int) -> int:
        """The start of a free block of this size; -1 if there is none."""
        kept = self._kept.get(size)
        if kept:
            return kept.pop()
        start = self._cut(size)
        if start < 0 and self._kept:
            self._merge()
            start = self._cut(size)
        return start

    def _cut(self, size: int) -> int:
        """Cut a block off a hole: a large one off the end of the last hole with room, others off the start of the first."""
        if size > LARGE:
            for index in range(len(self._holes) - 1, -1, -1):
                start, room = self._holes[index]
                begin = start + room - size
                if begin >= max(start, self._common):
                    self._put(index, start, room - size)
                    return begin
            return -1
        for index, (start, room) in enumerate(self._holes):
            if room >= size:
                self._put(index, start + size, room - size)
                return start
        return -1

    def _put(self, index: int, start: int, room: int) -> None:
        if room:
            self._holes[index] = (start, room)
        else:
            del self._holes[index]

    def _merge(self) -> None:
        """Merge adjacent free blocks and holes."""
        parts = self._holes + [(start, size) for size, kept in self._kept.items() for start in kept]
        self._kept = {}
        self._holes = []
        for start, size in sorted(parts):
            if self._holes and sum(self._holes[-1]) == start:
                before, room = self._holes[-1]
                self._holes[-1] = before, room + size
            else:
                self._holes.append((start, size))

    def _largest(self) -> int:
        """The largest block that could be allocated now; call it after `_merge`."""
        small = max([min(room, LARGE) for _, room in self._holes], default=0)
        large = max([start + room - max(start, self._common) for start, room in self._holes], default=0)
        return large if large > LARGE else small

    def _explain(self) -> str:
        return f"{self._setting}: {self.nbytes}, of which {self._common} are kept for requests of up to {LARGE}"


def _nothing_to_evict() -> bool:
    return False


def block_size(nbytes: int) -> int:
    """The size of the block for so many bytes, if there is that much memory."""
    step = max(UNIT, (1 << (nbytes - 1).bit_length()) // _STEPS) if nbytes else UNIT
    return max(step, -(-nbytes // step) * step)


def largest_block(nbytes: int) -> int:
    """The largest block of a memory of so many bytes."""
    whole = nbytes // UNIT * UNIT
    return max(min(whole, LARGE), whole - nbytes // _SHARE // UNIT * UNIT)
