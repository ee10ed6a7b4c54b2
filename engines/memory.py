"""Views and copies host memory by its address."""

import ctypes
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

SMALL = 1 << 18
"""Up to this many bytes a copy holds the GIL: it takes some 50 us, while retaking the GIL may take a switch interval."""


def view(address: int, nbytes: int) -> memoryview:
    """The bytes at an address, writable and not copied; the caller keeps the memory alive. Empty for zero bytes."""
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def copy(to: int, source: int, nbytes: int) -> None:
    """Copy bytes from one address to another; the two must not overlap.

    Large copies release the GIL. An assignment to a memoryview holds it, also for the page faults of fresh memory, and every
    other tenant's worker would wait.
    """
    if nbytes > SMALL:
        ctypes.memmove(to, source, nbytes)  # Called through CDLL, which releases the GIL.
    elif nbytes:
        view(to, nbytes)[:] = view(source, nbytes)


def shared_memory(executor: object) -> Mapping[Hashable, Mapping[str, int]]:
    """What an executor shares with executors of other engines: see `base.Sharing`."""
    found: Mapping[Hashable, Mapping[str, int]] = getattr(executor, "shared_memory", {})
    return found


def shared_by(executors: Iterable[object]) -> dict[Hashable, Mapping[str, int]]:
    """What these executors share with others, each thing once."""
    return {thing: memory for executor in executors for thing, memory in shared_memory(executor).items()}


def added(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of numbers of bytes, by kind."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
