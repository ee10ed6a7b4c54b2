"""The C structure and function of the driver, for ctypes. Calls release the GIL."""

import ctypes
from ctypes import c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partitions.c_library import compile_library
from server.launch_loop.library import SOURCES
from server.launch_loop.structures import LinkView

DRIVER = (Path(__file__).with_name("driver.c"), SOURCES[1])


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


def open_driver_library() -> Any:
    """The library with `drive`."""
    found = ctypes.CDLL(str(compile_library(DRIVER)))
    found.job_size.restype = c_uint64
    _check(found.job_size(), Job)
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
