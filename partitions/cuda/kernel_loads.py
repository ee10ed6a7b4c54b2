"""Loads kernels with pauses while tenants are served, so that their launches rarely wait for a load.

The driver holds a lock while it loads a kernel, for a millisecond or more, and every other thread's launch waits for it
(docs/lab/2026-11-25-change.md). A network has hundreds of kernels, which the library loads one after the other, on several
threads. In a background load each call that loads some waits its turn: one at a time, and after one that took a millisecond
nothing is loaded for `REST` milliseconds. Most calls take 0.04 ms, and are followed by no pause: TensorRT-RTX makes 860 of them
whenever it binds MobileNetV2, also where the kernels are loaded. The waits are in callbacks of CUPTI before the driver is
called, in C (kernel_loads.c) and without the GIL. A compiled wheel has that library; `python -m partitions.cuda.kernel_loads`
compiles it for a checkout (`partitions.c_library`).

A paced load holds locks that others may need: the library's own, also during a pause, and ours around it. On an H100 an
inference that was not captured as a graph waited for 2.7 s until the library's was free. So whatever else calls the library, or
waits for one of our locks, ends the pauses meanwhile (`hurrying`); and none is longer than a quarter of a second.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import c_char_p, c_uint32, c_uint64
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from typing import Any

from ..c_library import compile_here, find_library
from ..errors import DeviceUnavailable

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernel_loads.c", "cupti.h"))
REST = 120
"""How many times as long as a load took nothing is loaded after it: launches find the lock taken in less than 1 % of the time,
which leaves a p99 alone. Beside MobileNetV2's first load that of a small MLP in the same process was 6 times as long as before
without pauses, 2.6 times with 40, and 1.3 times with 150 (H100, 2026-11-25, docs/lab/2026-11-25-change.md)."""
_SYSTEM = "libcupti.so.13"
_PATIENT: ContextVar[bool] = ContextVar("greenlane_background_load", default=False)
"""A context variable, so that the threads of `Partition.run` have it from their callers."""


class Counting:
    """A block in which a thread counts as so many background loads and urgent calls."""

    __slots__ = ("_add", "_background", "_urgent")

    def __init__(self, add: Callable[[int, int], None], background: int, urgent: int) -> None:
        self._add = add
        self._background = background
        self._urgent = urgent

    def __enter__(self) -> None:
        self._add(self._background, self._urgent)

    def __exit__(self, *_: object) -> None:
        self._add(-self._background, -self._urgent)


class KernelLoads:
    """Who loads and who waits in this process; see `partitions.base.Loads`.

    One a process, as the driver's lock and CUPTI's callbacks are: `KERNEL_LOADS`.
    """

    def __init__(self) -> None:
        self._library: Any = None
        self._changing = RLock()  # Reentrant, as the garbage collector may free an executor during a change.
        self._background = self._urgent = 0
        self._paces = False

    def open(self, cupti: str = "") -> None:
        """Pace background loads from now on, by this libcupti, or the one that is installed. Calling it again does nothing.

        Raises DeviceUnavailable: without CUPTI, without the compiled library, or beside a profiler, which uses CUPTI itself.
        """
        with self._changing:
            self._library = self._library or _open(cupti or find_cupti())
            self._paces = True
            self._apply()

    @contextmanager
    def background(self) -> Iterator[None]:
        """What this thread loads in the block may take its time."""
        token = _PATIENT.set(True)
        try:
            yield
        finally:
            _PATIENT.reset(token)

    def loading(self) -> "Counting":
        """In the block this thread has the library load kernels: with pauses if it is a `background` load, else at once."""
        patient = _PATIENT.get()
        return Counting(self._add, int(patient), int(not patient))

    def hurrying(self) -> "Counting":
        """In the block nothing is paced: what is done there may wait for a load. A background load itself is not urgent.

        About a microsecond long where it ends nothing.
        """
        return Counting(self._add, 0, int(not _PATIENT.get()))

    def freeing(self) -> "Counting":
        """As `hurrying`, also of a background load: the library frees objects with the GIL held."""
        return Counting(self._add, 0, 1)

    def hurry(self) -> None:
        """Pace nothing any more, until it is opened again."""
        with self._changing:
            self._paces = False
            self._apply()

    def waited(self) -> float:
        """As `Loads.waited`, of all threads together."""
        return self.counts()[2] / 1e9

    def counts(self) -> tuple[int, int, int]:
        """The calls that load kernels so far, the nanoseconds that they took, and those that they waited for their turns."""
        counts = (c_uint64 * 3)()
        if self._library:
            self._library.kernel_loads_count(counts)
        calls, took, waited = counts
        return calls, took, waited

    def _add(self, background: int, urgent: int) -> None:
        with self._changing:
            self._background += background
            self._urgent += urgent
            if background or self._background:
                self._apply()

    def _apply(self) -> None:
        """With `_changing` held."""
        if self._library:
            self._library.kernel_loads_pace(REST if self._paces and self._background and not self._urgent else 0)


KERNEL_LOADS = KernelLoads()


def find_cupti() -> str:
    """The libcupti of NVIDIA's wheel, else the system's by its name."""
    spec = find_spec("nvidia")
    folders: Sequence[str] = list(spec.submodule_search_locations or ()) if spec else ()
    found = [path for folder in folders for path in sorted(Path(folder).glob("*/lib/libcupti.so.*"))]
    return str(found[0]) if found else _SYSTEM


def _open(cupti: str) -> Any:
    path = find_library(SOURCES)
    if path is None:
        raise DeviceUnavailable(f"{SOURCES[0].name} is not compiled; scripts/install does that where there is a C compiler")
    library = ctypes.CDLL(str(path))
    library.kernel_loads_open.argtypes = (c_char_p,)
    library.kernel_loads_pace.argtypes = (c_uint32,)
    library.kernel_loads_pace.restype = library.kernel_loads_count.restype = None
    error = library.kernel_loads_open(cupti.encode())
    if error == -1:
        raise DeviceUnavailable(f"there is no {cupti}; pip install nvidia-cuda-cupti")
    if error:
        why = "it lacks what this needs" if error < 0 else f"CUPTI's error {error}; a profiler may be using it"
        raise DeviceUnavailable(f"{cupti} cannot be used: {why}")
    return library


if __name__ == "__main__":
    compile_here(SOURCES)
