"""What the HTTP processes of one tenant occupy of what they share, in a page of shared memory that each of them maps.

It says which process holds which piece of the tenant's tensor memory, how many bytes of arriving bodies each of them has, and
whether the tenant's queue is full; and it has what is left of the tenant's limits. Only a tenant with several HTTP processes
has one.

A piece is taken under a lock of the kernel (fcntl), which a process that ends gives up, and given back without it: each unit of
memory has a byte, which is the number of the process that holds it, 0 for none. So what a process held when it ended can be
freed without asking it.
"""

import fcntl
import mmap
import os
from time import sleep

from ..errors import MemoryFull
from .arena import create_file
from .blocks import LARGE, UNIT, BlockAllocator

_HEAD = mmap.PAGESIZE
"""Bytes before the units' bytes: cells of 64 bits. The first says whether the queue is full, then each process has one for its
arriving bytes; from `_HELD_TOKENS`, `CONNECTIONS`, `LARGE_BODIES` and `_LOT_SINCE` on others of each process, and from
`_BUCKETS` on token buckets."""
LEAD = 1
"""The number of the lead, the process whose lane has the tenant's queue."""
MOST_PROCESSES = 64
"""HTTP processes of one tenant, at most: more would help no machine that there is, and their numbers fit into a byte."""
ARRIVING, CONNECTIONS, LARGE_BODIES = 0, 128, 256
"""What each process counts: bytes of arriving bodies, its connections, and large bodies."""
_HELD_TOKENS = (64, 192)
"""For each of the two token buckets. The number of a process is added to each of these, so none has a process 0."""
_LOT_SINCE = 320
_BUCKETS = 385
_NO_TOKENS = bytes(8 * MOST_PROCESSES)
_ATTEMPTS = 200
"""Attempts to take the lock, about 0.1 ms. It is held for a few microseconds, longer by a process that the kernel or its own
interpreter has put aside meanwhile."""
_PAUSE = 0.0001
_PAUSES = 50
"""Then it is tried again after so many pauses of so many seconds: 5 ms. Only a process that was stopped holds it for longer."""
_ARRIVING_FRACTION = 2
"""Bodies that are still arriving are given memory while less than one part in so many is in use."""


class Occupancy:
    """One process's view. `number` is that of the process, from 1, which is the lead's. Not thread-safe.

    The descriptor, made by `create`, belongs to this object.
    """

    def __init__(self, descriptor: int, number: int) -> None:
        if not 1 <= number <= MOST_PROCESSES:
            raise ValueError(f"process {number}; expected 1 to {MOST_PROCESSES}")
        self.number = number
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, 0)
        self._cells = memoryview(self._map)[:_HEAD].cast("Q")

    @property
    def queue_is_full(self) -> bool:
        """Whether helpers have to refuse requests: the lead refuses those that come before they see it."""
        return self._cells[0] != 0

    def set_queue_is_full(self, full: bool) -> None:
        """For the lead."""
        self._cells[0] = full

    def set(self, count: int, own: int) -> None:
        """Set how many of ARRIVING, CONNECTIONS or LARGE_BODIES this process has."""
        self._cells[count + self.number] = own

    def elsewhere(self, count: int) -> int:
        """How many of them all other processes have."""
        return sum(self._cells[count + 1 : count + 1 + MOST_PROCESSES].tolist()) - self._cells[count + self.number]

    def bucket(self, index: int) -> tuple[int, int, int]:
        """What is in a token bucket, since when, and what all processes held then (see `scheduling.limits`).

        All are 0 at first: so it is full by now.
        """
        at = _BUCKETS + 3 * index
        return self._cells[at], self._cells[at + 1], self._cells[at + 2]

    def set_bucket(self, index: int, level: int, since: int) -> None:
        """Set that, with the lock held; what all processes hold now is read from their cells."""
        at, held = _BUCKETS + 3 * index, _HELD_TOKENS[index] + 1
        self._cells[at], self._cells[at + 1] = level, since
        none = self._map[8 * held : 8 * (held + MOST_PROCESSES)] == _NO_TOKENS
        self._cells[at + 2] = 0 if none else sum(self._cells[held : held + MOST_PROCESSES].tolist())

    def held_tokens(self, index: int) -> memoryview:
        """The cell of what this process has taken from a token bucket in advance, and has not used: of length 1.

        Only this process makes it more, and only with the lock held. It is emptied when the process has ended.
        """
        at = _HELD_TOKENS[index] + self.number
        return self._cells[at : at + 1]

    def set_lot_since(self, now: int) -> None:
        """This process has taken tokens in advance, which it uses for a moment only; with the lock held."""
        self._cells[_LOT_SINCE + self.number] = now

    def take_back_tokens(self, index: int, before: int) -> int:
        """Take what other processes hold of a token bucket since before this time and do not use now; with the lock held."""
        held, found = _HELD_TOKENS[index], 0
        for number in range(1, MOST_PROCESSES + 1):
            if number != self.number and self._cells[_LOT_SINCE + number] < before:
                found += self._cells[held + number]
                self._cells[held + number] = 0
        return found

    def used(self) -> int:
        """Bytes of tensor memory that all processes hold."""
        units = self._map[_HEAD:]
        return (len(units) - units.count(0)) * UNIT

    def take(self, size: int, low: int, high: int, last: bool, hint: int) -> int:
        """Take so many bytes, a multiple of UNIT, from `low` to `high`, that no process holds; where they begin, -1 if none.

        Those at `hint` if they are free (-1 for no hint), else the first, or with `last` the last.
        """
        count = size // UNIT
        begin, end = _HEAD + low // UNIT, _HEAD + high // UNIT
        free = bytes(count)
        if not self.lock():
            return -1
        try:
            found = _HEAD + hint // UNIT if hint >= 0 else -1
            if found < 0 or self._map[found : found + count] != free:
                found = self._map.rfind(free, begin, end) if last else self._map.find(free, begin, end)
            if found < 0:
                return -1
            self._map[found : found + count] = bytes([self.number]) * count
        finally:
            self.unlock()
        return (found - _HEAD) * UNIT

    def give_back(self, start: int, size: int) -> None:
        """Free what `take` returned."""
        first, count = _HEAD + start // UNIT, size // UNIT
        self._map[first : first + count] = bytes(count)

    def free_all_of(self, number: int) -> None:
        """A process has ended and nothing works on its memory any more: free all that it held. For the lead."""
        units, held = self._map[_HEAD:], bytes([number])
        at = units.find(held)
        while at >= 0:
            end = at
            while units[end : end + 1] == held:
                end += 1
            self._map[_HEAD + at : _HEAD + end] = bytes(end - at)
            at = units.find(held, end)
        for first in (ARRIVING, CONNECTIONS, LARGE_BODIES, *_HELD_TOKENS):
            self._cells[first + number] = 0

    def longest_free(self, low: int, high: int) -> int:
        """The largest piece that is free between these offsets, in bytes."""
        units = self._map[_HEAD + low // UNIT : _HEAD + high // UNIT]
        return max(map(len, units.translate(_HELD).split(b"\1"))) * UNIT

    def lock(self) -> bool:
        """Take the lock; False if another process holds it for very long. Blocks for about 5 ms at most."""
        for attempt in range(_ATTEMPTS + _PAUSES):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if attempt < _ATTEMPTS:
                    os.sched_yield()
                else:
                    sleep(_PAUSE)
            else:
                return True
        return False

    def unlock(self) -> None:
        """Give it back."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


_HELD = bytes([0] + [1] * 255)


class SharedBlocks(BlockAllocator):
    """As `BlockAllocator`, of a memory that several processes allocate; `used` are the bytes that this one holds.

    Bodies that are still arriving in other processes cannot be evicted from here. So at most half of the memory is
    given to such bodies.
    """

    def __init__(self, nbytes: int, setting: str, occupancy: Occupancy) -> None:
        super().__init__(nbytes, setting)
        self._occupancy = occupancy
        self._end = nbytes // UNIT * UNIT
        self._freed: dict[int, int] = {}  # Where the last block of each size was: recently used memory.

    def allocate(self, nbytes: int, spare: int = 0, evict: bool = True) -> tuple[int, int]:
        if not evict and self._occupancy.used() * _ARRIVING_FRACTION > self.nbytes:
            raise MemoryFull(f"no memory for a body of {nbytes} bytes before it is complete")
        return super().allocate(nbytes, spare, evict)

    def free(self, start: int, size: int) -> None:
        self.used -= size
        self._freed[size] = start
        self._occupancy.give_back(start, size)

    def _find(self, size: int) -> int:
        large = size > LARGE
        return self._occupancy.take(size, self._common if large else 0, self._end, large, self._freed.pop(size, -1))

    def _largest(self) -> int:
        small = min(self._occupancy.longest_free(0, self._end), LARGE)
        large = self._occupancy.longest_free(self._common, self._end)
        return large if large > LARGE else small


def create(nbytes: int) -> int:
    """The descriptor of new shared memory for this, of so many bytes of tensor memory. The caller closes it."""
    return create_file("greenlane occupancy", _HEAD + max(1, nbytes // UNIT))
