"""What a tenant and others of its device know of each other: two pages of shared memory for each tenant that others look at.

The tenant's HTTP side alone writes the first page: how many requests it has open, when the last one ended, and whether it lends
now. A tenant that may borrow from it, or is fenced for its sake, maps that page read-only, and reads it before each launch,
without a lock. In the second page each borrower has a word of its own, which is 1 while its work uses the lender's granules:
so the lender sees which of its requests met a borrower. When its HTTP process has ended, the pages are reset, and the next
process goes on with them.
"""

import mmap
import os
import time
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from ..config.tenant import TenantConfig
from .arena import create_file

OPEN, ENDED, LENDS = 0, 1, 2
"""Words of an HTTP process in the first page: its requests whose head has arrived and whose answer is not made yet; when there
were last none any more, in nanoseconds of `time.monotonic_ns`; 1 while it lends."""
_COUNT = 3
"""Among the words of the first process: how many processes the lender has."""
_WORD = 8
_WORDS = 8
"""For each process, so that none has a cache line of another's."""


class Activity:
    """The lender's end, of the HTTP process with this number, from 1 on. Belongs to the event loop."""

    def __init__(self, shared: mmap.mmap, number: int) -> None:
        view = memoryview(shared).cast("B").cast("Q")
        first = mmap.PAGESIZE // _WORD
        self._page = view[(number - 1) * _WORDS : number * _WORDS]
        self._borrowers = view[first:]
        self._open = 0
        self._in_use: list[int] = []

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


class ActivityPage:
    """A neighbour's end: the first page of another tenant, read-only. The descriptor may be closed afterwards."""

    def __init__(self, descriptor: int) -> None:
        self._read = mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        words = memoryview(self._read).cast("Q")
        most = mmap.PAGESIZE // (_WORDS * _WORD)  # The other may have written any number.
        self.processes = [words[each * _WORDS : (each + 1) * _WORDS] for each in range(min(words[_COUNT], most))]
        """The words of each of its HTTP processes; see OPEN."""


class LenderPage(ActivityPage):
    """A borrower's end: a lender's first page, and the borrower's own word in the second. `number` is its own."""

    def __init__(self, descriptor: int, number: int) -> None:
        super().__init__(descriptor)
        size = os.fstat(descriptor).st_size
        self._write = mmap.mmap(descriptor, size - mmap.PAGESIZE, flags=mmap.MAP_SHARED, offset=mmap.PAGESIZE)
        self.own = memoryview(self._write).cast("Q")[number : number + 1]
        """The borrower's word."""
        self.own[0] = 0  # The process before may have ended with a work in flight.

    def rests(self) -> bool:
        """Whether the lender has no request open, and lends."""
        return all(not words[OPEN] and words[LENDS] for words in self.processes)


def words_of(pages: Iterable[ActivityPage]) -> tuple[memoryview, ...]:
    """The words of all HTTP processes of these tenants."""
    return tuple([words for page in pages for words in page.processes])


def create(tenants: int, processes: int = 1) -> int:
    """Create the pages of a lender with so many HTTP processes, of so many tenants; the caller closes the descriptor."""
    descriptor = create_file("greenlane activity", mmap.PAGESIZE * (1 + -(-max(1, tenants) * _WORD // mmap.PAGESIZE)))
    os.pwrite(descriptor, processes.to_bytes(_WORD, "little"), _COUNT * _WORD)
    return descriptor


def open_pages(
    tenants: Mapping[str, TenantConfig], processes: Mapping[str, int] = MappingProxyType({}), on_cores: Collection[str] = ()
) -> dict[str, int]:
    """Create the pages of each of these tenants, as another one may be fenced at any time. Returns their descriptors, which the
    caller closes. Tenants `on_cores`, which hold nothing back by themselves, have pages only if one there asks for a fence now,
    or if they lend and another one has a `burst`.

    `processes` is how many HTTP processes a tenant has, if not one.
    """
    burst = any(each.burst for each in tenants.values())
    fenced = any(each.fenced for name, each in tenants.items() if name in on_cores)
    needed = [name for name, each in tenants.items() if name not in on_cores or fenced or (burst and each.lend)]
    return {name: create(len(tenants), processes.get(name, 1)) for name in needed}


def attach(descriptor: int, number: int = 1) -> Activity:
    """Map the pages of a lender, in its HTTP process of this number; the descriptor may be closed afterwards."""
    return Activity(mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED), number)


def reset(descriptor: int, number: int = 1) -> None:
    """The lender's HTTP process of this number has ended: it has no request open, and lends."""
    os.pwrite(descriptor, _RESTS, (number - 1) * _WORDS * _WORD)


_RESTS = b"".join(number.to_bytes(_WORD, "little") for number in (0, 0, 1))
