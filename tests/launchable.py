"""A fake engine whose executors are launchable: over tests/fake_cuda.c, a driver and a stream of their own.

What is launched there goes through the engine's script as any other work does: it counts and stops at `run`, and fails there.
"""

import ctypes
import functools
import shutil
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import ExecutionFailed, Recipe
from engines.memory import view
from engines.signature import Shape
from partitions import DeviceLost, Partition
from partitions.c_library import compile_library
from tests.fakes import FakeEngine, FakeExecutor, FakePartition

RING = 16
PENDING, FAILED, LOST = 600, 701, 700
FAKE_CUDA = (Path(__file__).with_name("fake_cuda.c"),)
FLAGS = ("-pthread",)
CALL = CFUNCTYPE(c_int, c_void_p, c_uint64)

needs_a_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@functools.cache
def open_fake_cuda() -> Any:
    """The library. Its functions take and return pointers."""
    cuda = ctypes.CDLL(str(compile_library(FAKE_CUDA, FLAGS)))
    cuda.fake_stream.restype = cuda.fake_graph.restype = c_void_p
    cuda.fake_graph.argtypes = (c_int64, c_void_p, c_uint32, c_uint32, c_uint32, c_void_p, c_void_p)
    cuda.fake_take.argtypes = (c_void_p, c_int64)
    cuda.fake_stream_close.argtypes = cuda.fake_graph_close.argtypes = (c_void_p,)
    cuda.fake_fail_after.argtypes = (c_int64,)
    return cuda


def address_of(function: Any) -> int:
    """Where a function of C begins."""
    return ctypes.cast(function, c_void_p).value or 0


class LaunchableExecutor(FakeExecutor):
    """An executor of a model with one input and one output of its shape. `duration`: nanoseconds that a launched inference
    takes in C alone, without the script; None to run by the script.
    """

    def __init__(self, engine: "LaunchableEngine", partition: FakePartition, duration: int | None) -> None:
        super().__init__(engine, partition)
        self.revocations = 0
        self.launchable = True
        self._revokers: list[Callable[[], None]] = []
        self._cuda = open_fake_cuda()
        self._script = engine.script
        self._duration = duration
        self._stream = c_void_p(self._cuda.fake_stream())
        self._events = [c_void_p() for _ in range(RING)]
        for event in self._events:
            self._cuda.cuEventCreate(ctypes.byref(event), 0)
        self._tables = np.zeros((RING, 2, 3), np.uint64)
        self._counts = np.zeros(3, np.uint64)  # On the host, on the "device", launched.
        self._memory = np.zeros(1 << 16, np.uint8), np.zeros(1 << 16, np.uint8)
        self._call = CALL(self._run)
        self._error: Exception | None = None
        call = self._call if duration is None else None
        self._graph = c_void_p(
            self._cuda.fake_graph(
                duration or 0, self._tables.ctypes.data, RING, 2, 1, self._counts[1:].ctypes.data, ctypes.cast(call, c_void_p)
            )
        )

    def take(self, duration: int) -> None:
        """From the next launch on an inference takes so many nanoseconds; only if it was made with a duration."""
        self._cuda.fake_take(self._graph, duration)

    @property
    def launched(self) -> int:
        """How many inferences were launched by its recipes."""
        return int(self._counts[2])

    @property
    def ended(self) -> int:
        """How many of these have ended."""
        return int(self._counts[1])

    def recipe(self, shapes: Sequence[Shape], revoke: Callable[[], None]) -> Recipe | None:
        if revoke not in self._revokers:
            self._revokers.append(revoke)
        if not self.launchable:
            return None
        return Recipe(
            address_of(self._cuda.cuGraphLaunch),
            address_of(self._cuda.cuEventRecord),
            address_of(self._cuda.cuEventQuery),
            PENDING,
            self._graph.value or 0,
            self._stream.value or 0,
            tuple([event.value or 0 for event in self._events]),
            self._tables.ctypes.data,
            self._counts.ctypes.data,
            self._counts[2:].ctypes.data,
            tuple([memory.ctypes.data for memory in self._memory]),
            tuple(shapes),
            self._failure,
        )

    def revoke(self) -> None:
        """As a change of settings does."""
        self.revocations += 1
        for revoke in self._revokers:
            revoke()

    def close(self) -> None:
        if not self.closed:
            self.revoke()
            super().close()
            self._cuda.fake_stream_close(self._stream)
            self._cuda.fake_graph_close(self._graph)
            for event in self._events:
                self._cuda.cuEventDestroy_v2(event)

    def _run(self, address: int, nbytes: int) -> int:
        try:
            self._script.reach("run")
            self.engine.computed.append((bytes(view(address, nbytes)),))
        except Exception as error:
            self._error = error
            return LOST if isinstance(error, DeviceLost) else FAILED
        return 0

    def _failure(self, result: int) -> Exception:
        error, self._error = self._error, None
        return error or (DeviceLost if result == LOST else ExecutionFailed)(f"the driver returned {result}")


class LaunchableEngine(FakeEngine):
    """An engine of `LaunchableExecutor`s, which have one input and one output."""

    duration: int | None = None

    def bind(self, partition: Partition) -> LaunchableExecutor:
        assert isinstance(partition, FakePartition)
        executor = LaunchableExecutor(self, partition, self.duration)
        self.keep(executor)
        self._bound.append(lambda: executor)
        partition.executors.add(executor)
        return executor
