"""What a tenant that lends and its borrowers know of each other: two pages of shared memory for each owner, the one that lends.

The owner's HTTP side alone writes the first page: how many requests it has open, when the last one ended, and whether it lends
now. Who may borrow from it maps that page read-only, and reads it before each launch, without a lock. In the second page each
borrower has a word of its own, which is 1 while a work of it uses the owner's granules: so the owner sees which of its
requests met a borrower. When its HTTP process has ended, the pages are reset, and the next process goes on with them.
"""

import mmap
import os
import time

import numpy as np

OPEN, ENDED, LENDS = 0, 1, 2
"""Words of the first page: requests whose head has arrived and whose answer is not made yet; when there was last one fewer and
then none, in nanoseconds of `time.monotonic_ns`; 1 while it lends."""
_WORD = 8


class Activity:
    """The owner's end. `borrowers` are the words of those who may borrow from it. Belongs to the event loop."""

    def __init__(self, shared: mmap.mmap) -> None:
        view = memoryview(shared).cast("B").cast("Q")
        first = mmap.PAGESIZE // _WORD
        self._page = view[:first]
        self._borrowers = view[first:]
        self._open = 0
        self._in_use: list[int] = []

    def __repr__(self) -> str:
        return f"<Activity of {self._open} open requests{', lends' if self._page[LENDS] else ''}>"

    def expect(self, borrowers: list[int]) -> None:
        """Only tenants with these numbers may borrow: those that `is_met` looks at."""
        self._in_use = borrowers

    def begin(self) -> None:
        """The head of a request has arrived."""
        self._open += 1
        self._page[OPEN] = self._open

    def end(self) -> None:
        """The answer of a request is made, or it has none."""
        self._open -= 1
        if not self._open:
            self._page[ENDED] = time.monotonic_ns()
        self._page[OPEN] = self._open

    @property
    def open(self) -> int:
        """Requests that are open."""
        return self._open

    def set_lends(self, lends: bool) -> None:
        """Set whether borrowers may use the granules while no request is open."""
        self._page[LENDS] = 1 if lends else 0

    def is_met(self) -> bool:
        """Whether a work of a borrower uses the granules now."""
        words = self._borrowers
        return 1 in [words[number] for number in self._in_use]


class LenderPage:
    """A borrower's end: an owner's first page, read-only, and the borrower's own word in the second. `number` is its own."""

    def __init__(self, descriptor: int, number: int) -> None:
        size = os.fstat(descriptor).st_size
        self._read = mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._write = mmap.mmap(descriptor, size - mmap.PAGESIZE, flags=mmap.MAP_SHARED, offset=mmap.PAGESIZE)
        self.words = memoryview(self._read).cast("Q")
        """The owner's words; see OPEN."""
        self.own = memoryview(self._write).cast("Q")[number : number + 1]
        """The borrower's word."""
        self.own[0] = 0  # The process before may have ended with a work in flight.

    def __repr__(self) -> str:
        return f"<LenderPage {self.words[OPEN]} open, {'lends' if self.words[LENDS] else 'does not lend'}>"

    def rests(self) -> bool:
        """Whether the owner has no request open, and lends."""
        return not self.words[OPEN] and bool(self.words[LENDS])

    @property
    def addresses(self) -> tuple[int, int]:
        """Where the owner's words are, and the borrower's, for the launch loop. The page must outlive it."""
        return np.frombuffer(self.words, np.uint64).ctypes.data, np.frombuffer(self.own, np.uint64).ctypes.data


def create(tenants: int) -> int:
    """Create the pages of one owner on a server of so many tenants; the caller closes the descriptor."""
    descriptor = os.memfd_create("greenlane activity")
    os.truncate(descriptor, mmap.PAGESIZE * (1 + -(-max(1, tenants) * _WORD // mmap.PAGESIZE)))
    return descriptor


def attach(descriptor: int) -> Activity:
    """Map the pages of an owner, in its HTTP process; the descriptor may be closed afterwards."""
    return Activity(mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED))


def reset(descriptor: int) -> None:
    """The HTTP process that wrote the first page has ended: no request is open, and what it has lent stays lent."""
    os.pwrite(descriptor, _RESTS, 0)


_RESTS = b"".join(number.to_bytes(_WORD, "little") for number in (0, 0, 1))
