"""An executor's recipes, by which its graphs are launched without the interpreter (`engines.base.Launchable`)."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Event, Stream

from partitions.cuda.driver import CUDAError, handle_return

from ..base import Recipe
from ..errors import ExecutionFailed
from ..signature import Shape
from .capture import Graph
from .copies import Copies, SmCopies
from .work import failure

_NOT_READY = 600
"""CUDA_ERROR_NOT_READY in cuda.h."""
Shapes = tuple[Shape, ...]


class Recipes:
    """The recipes of one executor. Hold the executor's lock to call a method, except `padded`."""

    def __init__(self, stream: Stream, events: Sequence[Event], addresses: Sequence[int], name: str) -> None:
        self._stream = stream
        self._events = tuple(events)
        self._addresses = addresses
        self._name = name
        self._revoke: Callable[[], None] | None = None
        self._launched: dict[tuple[Shapes, Shapes], Any] = {}
        self._seen: dict[tuple[Shapes, Shapes], int] = {}
        self._padded: list[Any] = []

    @property
    def padded(self) -> int:
        """How many inferences were launched with more rows than were asked for. Any thread."""
        return sum(int(count[0]) for count in list(self._padded))

    def make(self, shapes: Shapes, run: Shapes, outputs: Shapes, graph: Graph | None, copies: Copies) -> Recipe | None:
        """The recipe for `shapes`, which are run as `run`; None if launching takes more than the graph."""
        functions = driver_functions()
        if functions is None or graph is None or not isinstance(copies, SmCopies) or any(-1 in output for output in outputs):
            return None
        launched = self._launched.get((shapes, run))
        if launched is None:
            launched = self._launched[shapes, run] = np.zeros(1, np.uint64)
            if shapes != run:
                self._padded.append(launched)
        launch, record, query = functions
        return Recipe(
            launch,
            record,
            query,
            _NOT_READY,
            number(graph.handle),
            number(self._stream.handle),
            tuple([number(event.handle) for event in self._events]),
            copies.tables_address,
            copies.counted_address,
            launched.ctypes.data,
            tuple(self._addresses),
            outputs,
            self._failure,
        )

    def revoke_by(self, revoke: Callable[[], None]) -> None:
        """Recipes that are made from now on are revoked by calling this."""
        self._revoke = revoke

    def revoke(self) -> None:
        """Revoke all recipes. Blocks until nothing is in flight by them."""
        revoke, self._revoke = self._revoke, None
        if revoke:
            revoke()

    def used(self) -> list[Shapes]:
        """The sets of shapes, as they are run, that were launched by recipes since the last call."""
        now = {key: int(count[0]) for key, count in self._launched.items()}
        used = [key[1] for key, count in now.items() if count != self._seen.get(key, 0)]
        self._seen = now
        return used

    def _failure(self, result: int) -> Exception:
        """The exception for what a function of the driver returned, once nothing is in flight any more. Blocks."""
        try:
            self._stream.sync()
            handle_return((driver.CUresult(result),))
        except CUDAError as error:
            return failure(error, f"running {self._name}")
        except ValueError:
            pass
        return ExecutionFailed(f"running {self._name}: the driver returned {result}")


def number(handle: Any) -> int:
    """A driver's handle as C has it."""
    return int(handle)


@cache
def driver_functions() -> tuple[int, int, int] | None:
    """The addresses of the driver's functions to launch a graph, record an event and query one; None without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    launch, record, query = (
        ctypes.cast(function, ctypes.c_void_p).value for function in (cuda.cuGraphLaunch, cuda.cuEventRecord, cuda.cuEventQuery)
    )
    return (launch, record, query) if launch and record and query else None
