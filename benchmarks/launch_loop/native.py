"""The C structures and functions of the launch loop and of the driver, for ctypes. Calls release the GIL."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import numpy as np

from server.link import arena
from server.link.arena import Arena
from server.link.ring import Descriptors

from .build import library

MOST_TENSORS = 16
MOST_AHEAD = 16
SPIN, NAP, BLOCK = range(3)
"""How the loop waits for a work: it queries without a pause; sleeps until the end is near; blocks in the driver."""
EVENT, WORD = range(2)
"""How a work reports its end: by an event, or by a word that the stream writes to host memory."""
STOPPED, UNKNOWN, FAILED = 1, 2, 3
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
    )


class Cuda(ctypes.Structure):
    NAMES = (
        "cuCtxSetCurrent", "cuGraphLaunch", "cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuStreamQuery",
        "cuStreamWriteValue32_v2",
    )  # fmt: skip
    _fields_ = tuple((name, c_void_p) for name in NAMES)


class Copies(ctypes.Structure):
    _fields_ = (("tables", c_void_p), ("length", c_uint32), ("rows", c_uint32), ("counted", c_uint64))


class Entry(ctypes.Structure):
    _fields_ = (
        ("body", c_char_p),
        ("done", c_char_p),
        ("length", c_uint32),
        ("done_length", c_uint32),
        ("graph", c_void_p),
        ("copies", POINTER(Copies)),
        ("inputs", c_uint32),
        ("rows", c_uint32),
        ("offset", c_uint64 * MOST_TENSORS),
        ("device", c_uint64 * MOST_TENSORS),
        ("nbytes", c_uint64 * MOST_TENSORS),
        ("needed", c_uint64),
        ("expected", c_int64),
    )


class Flight(ctypes.Structure):
    _fields_ = (("entry", POINTER(Entry)), ("slot", c_uint32), ("word", c_uint32), ("began", c_int64))


class Loop(ctypes.Structure):
    _fields_ = (
        ("link", LinkView),
        ("cuda", Cuda),
        ("context", c_void_p),
        ("stream", c_void_p),
        ("entries", POINTER(Entry)),
        ("entry_count", c_uint32),
        ("ahead", c_uint32),
        ("wait", c_uint32),
        ("signal", c_uint32),
        ("events", c_void_p * MOST_AHEAD),
        ("words", c_void_p),
        ("device_words", c_uint64),
        ("spin", c_int64),
        ("idle_spin", c_int64),
        ("bundle", c_int64),
        ("margin", c_int64),
        ("expired", c_char_p),
        ("cancelled", c_char_p),
        ("expired_length", c_uint32),
        ("cancelled_length", c_uint32),
        ("cancelled_serials", c_void_p),
        ("stop", c_int32),
        ("read", c_uint64),
        ("put", c_uint64),
        ("unread", c_uint64),
        ("error", c_int32),
        ("launched", c_uint64),
        ("finished", c_uint64),
        ("refused", c_uint64),
        ("sleeps", c_uint64),
        ("queries", c_uint64),
        ("flights", Flight * MOST_AHEAD),
        ("signalled", c_uint64),
        ("rung", c_uint64),
        ("rung_at", c_int64),
        ("last_end", c_int64),
        ("last_took", c_int64),
    )


class Job(ctypes.Structure):
    _fields_ = (
        ("link", LinkView),
        ("body", c_char_p),
        ("length", c_uint32),
        ("outstanding", c_uint32),
        ("capacity", c_uint64),
        ("rate", c_double),
        ("duration", c_int64),
        ("serial", c_uint64),
        ("put", c_uint64),
        ("read", c_uint64),
        ("latencies", c_void_p),
        ("most", c_uint64),
        ("first", c_void_p),
        ("taken", c_uint64),
        ("counted", c_uint64),
        ("differing", c_uint64),
        ("lost", c_int32),
        ("due", c_void_p),
    )


def open_loop_library() -> Any:
    """The library with `loop_run` and `loop_bare`."""
    found = ctypes.CDLL(str(library("loop")))
    found.loop_size.restype = found.entry_size.restype = found.loop_bare.restype = c_uint64
    found.loop_bare.argtypes = (c_void_p, c_void_p, c_uint64, c_int64, c_void_p, c_uint64)
    _check(found.loop_size(), Loop)
    _check(found.entry_size(), Entry)
    return found


def open_driver_library() -> Any:
    """The library with `drive`."""
    found = ctypes.CDLL(str(library("driver")))
    found.job_size.restype = c_uint64
    _check(found.job_size(), Job)
    return found


def cuda_functions(cuda: Any) -> Cuda:
    """The addresses of the driver's functions in `cuda`, which is libcuda or the fake."""
    return Cuda(*[ctypes.cast(getattr(cuda, name), c_void_p).value for name in Cuda.NAMES])


def view_link(shared: Arena, descriptors: Descriptors) -> LinkView:
    """A mapped link, for C. The arena must outlive it."""
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
        ticket_event=descriptors.tickets,
        completion_event=descriptors.completions,
    )


def address(memory: memoryview) -> int:
    """Where this memory begins."""
    found: int = np.frombuffer(memory, np.uint8).ctypes.data
    return found


class Latencies(NamedTuple):
    """Percentiles and the largest, in microseconds; NaN of nothing."""

    p50: float
    p99: float
    p999: float
    most: float


def percentiles(nanoseconds: "np.ndarray[Any, np.dtype[np.int64]]") -> Latencies:
    """Of so many nanoseconds each."""
    if not nanoseconds.size:
        return Latencies(*[float("nan")] * 4)
    return Latencies(*[float(value) / 1e3 for value in np.percentile(nanoseconds, (50, 99, 99.9, 100))])


def _check(size: int, structure: type[ctypes.Structure]) -> None:
    if size != ctypes.sizeof(structure):
        raise RuntimeError(f"{structure.__name__} has {ctypes.sizeof(structure)} bytes here and {size} in C; change both")
