"""The structures of loop.c and link.h, for ctypes."""

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from ..link import arena
from ..link.ring import Link

MOST_TENSORS = 32
MOST_AHEAD = 16
MOST_LENDERS = 256
DECISIONS = 8
"""Why a work is where it is, in stretching.h."""
HOME, WIDE, NARROW = 0, 1, 2
"""A placement of the worker, for which an entry is."""
IN, OUT, MEMORY = 0, 1, 2
"""Paths of a pace: over PCIe to the device and from it, and its memory."""
WOKEN, UNKNOWN, FAILED = 1, 2, 3
"""Why the loop returned."""


class LinkView(ctypes.Structure):
    _fields_ = (
        ("tickets", c_void_p),
        ("completions", c_void_p),
        ("total_put", c_void_p),
        ("pages", c_void_p),
        ("memory", c_uint64),
        ("memory_size", c_uint64),
        ("count", c_uint32),
        ("page", c_uint32),
        ("ticket_event", c_int32),
        ("completion_event", c_int32),
        ("wakes", c_int32),
    )


class Entry(ctypes.Structure):
    _fields_ = (
        ("launch", c_void_p),
        ("record", c_void_p),
        ("query", c_void_p),
        ("graph", c_void_p),
        ("stream", c_void_p),
        ("events", c_void_p),
        ("tables", c_void_p),
        ("counted", c_void_p),
        ("launched", c_void_p),
        ("body", c_void_p),
        ("done", c_void_p),
        ("hash", c_uint64),
        ("body_length", c_uint32),
        ("done_length", c_uint32),
        ("length", c_uint32),
        ("rows", c_uint32),
        ("inputs", c_uint32),
        ("pending", c_int32),
        ("offset", c_uint64 * MOST_TENSORS),
        ("address", c_uint64 * MOST_TENSORS),
        ("nbytes", c_uint64 * MOST_TENSORS),
        ("moved_in", c_uint64),
        ("moved_out", c_uint64),
        ("needed", c_uint64),
        ("expected", c_int64),
        ("less", c_int64),
        ("used", c_void_p),
        ("wide", c_void_p),
        ("narrow", c_void_p),
        ("times", c_void_p),
        ("demand", c_void_p),
        ("placement", c_int32),
    )


class Times(ctypes.Structure):
    _fields_ = (("home", c_int64), ("wide", c_int64), ("retry_at", c_int64), ("wait", c_int64))


class Lender(ctypes.Structure):
    _fields_ = (("words", c_void_p), ("own", c_void_p))


class Wide(ctypes.Structure):
    _fields_ = (
        ("limit", c_int64),
        ("home", c_int64),
        ("wide", c_int64),
        ("launches", c_uint64),
        ("returns", c_uint64),
        ("stayed", c_uint64 * DECISIONS),
        ("ended_before", c_uint64),
        ("count", c_uint32),
        ("lenders", Lender * MOST_LENDERS),
    )


class Neighbours(ctypes.Structure):
    kept: Any
    """What `words` points to."""
    _fields_ = (("count", c_uint32), ("words", c_void_p))


class Demand(ctypes.Structure):
    """Nanoseconds that works of one model take at home and narrow, and the bytes that they move; 0 for what is not known, and
    bytes below 0 for works that are held whatever they move.
    """

    _fields_ = (("home", c_int64), ("narrow", c_int64), ("moved", c_int64))


class Fence(ctypes.Structure):
    kept: Any
    """What it refers to."""
    _fields_ = (("rate", c_int64), ("launches", c_void_p), ("neighbours", Neighbours))


class Pace(ctypes.Structure):
    kept: Any
    """What it refers to."""
    _fields_ = (("rates", c_int64 * 3), ("free_at", c_int64 * 3), ("waits", c_uint64), ("neighbours", Neighbours))


class Flight(ctypes.Structure):
    _fields_ = (("entry", POINTER(Entry)), ("event", c_void_p), ("serial", c_uint64), ("began", c_int64), ("slot", c_uint32))


class Loop(ctypes.Structure):
    _fields_ = (
        ("link", LinkView),
        ("entries", c_void_p),
        ("wide", c_void_p),
        ("fence", c_void_p),
        ("pace", c_void_p),
        ("entry_count", c_uint32),
        ("bundle", c_int64),
        ("expired", c_void_p),
        ("cancelled", c_void_p),
        ("expired_length", c_uint32),
        ("cancelled_length", c_uint32),
        ("cancelled_serials", c_void_p),
        ("wakes", c_uint64),
        ("oldest", c_uint64),
        ("seen", c_uint64),
        ("read", c_uint64),
        ("put", c_uint64),
        ("unread", c_int64),
        ("error", c_int32),
        ("refused", c_int32),
        ("lost", c_int32),
        ("launched", c_uint64),
        ("finished", c_uint64),
        ("flights", Flight * MOST_AHEAD),
        ("rung", c_uint64),
        ("rung_at", c_int64),
        ("last_end", c_int64),
        ("last_took", c_int64),
        ("looked", c_int64),
        ("unknown", c_int32),
        ("held", c_int32),
        ("look_at", c_int64),
    )


def view_lenders(limit: int, home: int, wide: int, lenders: Iterable[tuple[memoryview, memoryview]]) -> Wide:
    """What a worker's launch loop decides by: the words of each process of its lenders, and its own word there, which must
    outlive it.
    """
    each = [Lender(address(words), address(own)) for words, own in lenders]
    return Wide(limit=limit, home=home, wide=wide, count=len(each), lenders=(Lender * MOST_LENDERS)(*each))


def view_neighbours(words: Sequence[memoryview]) -> Neighbours:
    """The words of these HTTP processes, for C."""
    pointers = (c_void_p * len(words))(*map(address, words))
    made = Neighbours(len(words), ctypes.addressof(pointers))
    made.kept = words, pointers
    return made


def view_fence(rate: int, launches: Any, words: Sequence[memoryview]) -> Fence:
    """What a worker's launch loop decides by, and where it counts works that go narrow: by the words of its neighbours."""
    neighbours = view_neighbours(words)
    made = Fence(rate, ctypes.addressof(launches), neighbours)
    made.kept = launches, neighbours  # The structure has a copy, without what it points to.
    return made


def view_pace(words: Sequence[memoryview]) -> Pace:
    """What a worker and its launch loop go by that keep shares of PCIe and memory, beside neighbours with these words."""
    made = Pace(neighbours=(neighbours := view_neighbours(words)))
    made.kept = neighbours
    return made


def view_link(link: Link, wakes: int = -1) -> LinkView:
    """A mapped link, for C. The link must outlive it. `wakes` is `Tickets.wakes`, at the end that reads tickets."""
    shared = link.arena
    pages = address(shared.slot(0).ticket)
    if shared.count > 1 and address(shared.slot(1).ticket) - pages != 2 * arena.MESSAGE:
        raise RuntimeError("the pages of a link are laid out otherwise than link.h says; change both")
    return LinkView(
        tickets=address(shared.cells(0)),
        completions=address(shared.cells(1)),
        total_put=address(shared.total_put),
        pages=pages,
        memory=shared.memory.address,
        memory_size=shared.memory.nbytes,
        count=shared.count,
        page=arena.MESSAGE,
        ticket_event=link.tickets.event,
        completion_event=link.completions.event,
        wakes=wakes,
    )


def address(memory: Any) -> int:
    """Where this memory begins."""
    found: int = np.frombuffer(memory, np.uint8).ctypes.data
    return found
