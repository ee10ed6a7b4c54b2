"""Opens trace.c: the calls of the driver, and samples of stacks, as plain data."""

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

from partitions.c_library import compile_library
from partitions.cuda.kernel_loads import SOURCES

SOURCE = (Path(__file__).with_name("trace.c"), SOURCES[1])
_DEPTH = 40


class DriverCall(NamedTuple):
    """A call of the driver: its name, the thread's kernel id, and when it began and ended, by `time.perf_counter`."""

    name: str
    thread: int
    begin: float
    end: float

    @property
    def ms(self) -> float:
        """How long it took."""
        return (self.end - self.begin) * 1e3


class Sample(NamedTuple):
    """What a thread was doing: when, the thread's kernel id, and (library, function) from the innermost; "" is unknown."""

    when: float
    thread: int
    stack: tuple[tuple[str, str], ...]


class _Call(ctypes.Structure):
    _fields_ = (("begin", c_uint64), ("end", c_uint64), ("name", c_char_p), ("thread", c_uint64))


class _Sample(ctypes.Structure):
    _fields_ = (("when", c_uint64), ("thread", c_uint64), ("depth", c_uint64), ("stack", c_void_p * _DEPTH))


class Trace:
    """Notes from the first call of `calls` or `samples` until `stop`. Once a process."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(str(compile_library(SOURCE)))
        for name in ("trace_call_count", "trace_sample_count"):
            getattr(self._library, name).restype = c_uint64
        self._library.trace_call.restype, self._library.trace_sample.restype = POINTER(_Call), POINTER(_Sample)

    def record_calls(self, cupti: str, least: float, room: int = 1 << 20) -> None:
        """Note every call that takes `least` microseconds or more. Raises RuntimeError, with CUPTI's error number."""
        if error := self._library.trace_calls(cupti.encode(), c_uint64(int(least * 1e3)), c_uint64(room)):
            raise RuntimeError(f"{cupti} cannot be used: error {error}")

    def record_samples(self, every: int = 500, room: int = 1 << 17) -> None:
        """Sample a stack for every so many microseconds of CPU time. Raises RuntimeError."""
        if error := self._library.trace_samples(c_uint64(every), c_uint64(room)):
            raise RuntimeError(f"stacks cannot be sampled: error {error}")

    def stop(self) -> None:
        """Note nothing more."""
        self._library.trace_stop()

    def calls(self) -> Iterator[DriverCall]:
        """What was noted. Names are read from libcupti, which stays loaded."""
        for at in range(self._library.trace_call_count()):
            call = self._library.trace_call(c_uint64(at)).contents
            yield DriverCall(call.name.decode(), call.thread, call.begin / 1e9, call.end / 1e9)

    def samples(self) -> Iterator[Sample]:
        """What was sampled."""
        known: dict[int, tuple[str, str]] = {}
        for at in range(self._library.trace_sample_count()):
            sample = self._library.trace_sample(c_uint64(at)).contents
            stack = [sample.stack[depth] or 0 for depth in range(sample.depth)]
            for address in stack:
                if address not in known:
                    known[address] = self._symbol(address)
            yield Sample(sample.when / 1e9, sample.thread, tuple(known[address] for address in stack))

    def _symbol(self, address: int) -> tuple[str, str]:
        file, function = c_char_p(), c_char_p()
        found = self._library.trace_symbol(c_void_p(address), byref(file), byref(function))
        library = Path((file.value or b"").decode()).name if found else ""
        return library, (function.value or b"").decode() if found == 2 else ""
