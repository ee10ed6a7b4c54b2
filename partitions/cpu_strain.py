"""Cores that move bytes: a thread on each, in loops over arrays by NumPy, which leaves the GIL to others meanwhile."""

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from .errors import PartitionError
from .health import memory_left
from .strain import SECTOR, STRAINS, Before, Strain, Strained, check, check_memory, unheld

MIB = 1 << 20
KINDS = tuple(kind for kind in STRAINS if not kind.startswith("PCIe"))
PIECE = 4 * MIB
"""Bytes between two looks at the time, and for which a core's other threads may wait for it."""
LEAST, MOST = 16 * MIB, 1024 * MIB
"""Bytes of memory for each core at least, so that no cache has them, and for all cores at most."""
USUAL = 32 * MIB
"""Bytes of the last cache, where the machine does not say."""
_UNITS = {"": 1, "K": 1 << 10, "M": MIB}
Array = np.ndarray[Any, Any]


def strain(kind: Strain, seconds: float, cores: Iterable[int], root: Path = Path("/"), before: Before = unheld) -> Strained:
    """Have a thread on each of these cores move bytes, and return what all of them did. Blocks; `root` is where /sys is.

    Call it on a thread that may run on all of them. `before` is called once nothing speaks against it. Raises as
    `Partition.strain`.
    """
    check(kind, seconds, KINDS, " on cores")
    each = sorted(cores)
    cache = last_cache(each[0], root)
    nbytes = cache // 2 // len(each) if kind == "L2" else min(max(LEAST, 2 * cache // len(each)), MOST // len(each))
    nbytes -= nbytes % (2 * SECTOR)  # A core's part of a cache need not be whole sectors, nor two arrays of them.
    with suppress(OSError):
        check_memory(kind, nbytes * len(each), memory_left(root))
    before(0)
    end = perf_counter() + seconds
    with ThreadPoolExecutor(len(each), thread_name_prefix="strain") as threads:
        done = list(threads.map(partial(_loop, kind, nbytes, end), each))
    return Strained(sum(one.nbytes for one in done), max(one.seconds for one in done))


def last_cache(core: int, root: Path = Path("/")) -> int:
    """Bytes of the last cache before memory that this core uses.

    Format: /sys/devices/system/cpu/cpu*/cache/index*/size is a number and K or M, level is one of 1 to 4
    (Documentation/ABI/testing/sysfs-devices-system-cpu).
    """
    found = {}
    for index in (root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
        try:
            level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if parts := re.fullmatch(r"(\d+)([KM]?)", size):
            found[level] = int(parts[1]) * _UNITS[parts[2]]
    return found[max(found)] if found else USUAL


def _loop(kind: Strain, nbytes: int, end: float, core: int) -> Strained:
    """One core's part, from when its memory is there to `end`, or for one piece if that has passed by then."""
    os.sched_setaffinity(0, {core})
    try:
        steps, step = _KINDS[kind](nbytes)
    except MemoryError as error:
        raise PartitionError(f"there are no {nbytes} bytes of memory for a strain of {kind}: {error}") from error
    began = now = perf_counter()
    moved = at = 0
    while not moved or now < end:
        moved += step(at)
        at, now = (at + 1) % steps, perf_counter()
    return Strained(moved, now - began)


Steps = tuple[int, Callable[[int], int]]
"""How many pieces there are, and what moves one of them, by its number, and returns how many bytes that were."""


def _array(nbytes: int) -> Array:
    """Memory that is there: what was never written is one page of zeros."""
    found = np.empty(max(1, nbytes // 8), np.int64)
    found.fill(1)
    return found


def _pieces(array: Array) -> list[Array]:
    length = PIECE // array.itemsize
    return [array[at : at + length] for at in range(0, len(array), length)]


def _reading(nbytes: int) -> Steps:
    pieces = _pieces(_array(nbytes))

    def step(at: int) -> int:
        pieces[at].max()
        return pieces[at].nbytes

    return len(pieces), step


def _writing(nbytes: int) -> Steps:
    pieces = _pieces(_array(nbytes))

    def step(at: int) -> int:
        pieces[at].fill(at)
        return pieces[at].nbytes

    return len(pieces), step


def _copying(nbytes: int) -> Steps:
    sources, targets = _pieces(_array(nbytes // 2)), _pieces(_array(nbytes // 2))

    def step(at: int) -> int:
        np.copyto(targets[at], sources[at])
        return 2 * sources[at].nbytes

    return len(sources), step


def _picking(nbytes: int) -> Steps:
    sectors = _array(nbytes).view(f"V{SECTOR}")
    places = _pieces(np.random.default_rng().integers(0, len(sectors), len(sectors) // 4))
    found = np.empty(len(places[0]), sectors.dtype)

    def step(at: int) -> int:
        sectors.take(places[at], out=found[: len(places[at])], mode="clip")
        return SECTOR * len(places[at])

    return len(places), step


_KINDS: dict[Strain, Callable[[int], Steps]] = {
    "memory copy": _copying,
    "memory read": _reading,
    "memory write": _writing,
    "random sectors": _picking,
    "L2": _reading,
}
