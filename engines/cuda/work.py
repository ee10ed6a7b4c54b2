"""Inferences in flight on a GPU's stream, and the translation of CUDA errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

import numpy as np
from cuda.core import Event

from partitions import DeviceLost, PartitionError
from partitions.cuda.driver import CUDAError, translation

from ..base import Tensor
from ..errors import ExecutionFailed
from ..memory import view


class CompletedCount:
    """The highest inference number known to have completed, counted from 1 for each executor.

    A stream completes in order, so all lower numbers have completed too. A stale value only costs an extra wait.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Completion(NamedTuple):
    """The end of an inference on its stream: its event, its number, and the count to update once it has completed."""

    event: Event
    number: int
    completed: CompletedCount
    executor: object = None
    """Only referred to: an executor must not be collected while an inference of it is in flight."""

    def wait(self) -> None:
        """Block until the inference has completed, spinning without the GIL. Raises CUDAError."""
        self.event.sync()
        self.completed.count = self.number


class CudaWork:
    """One inference on a partition's stream; see `engines.base.Work`. It cannot be cancelled."""

    __slots__ = ("_completion", "_outputs")

    def __init__(self, completion: Completion, outputs: tuple[Tensor, ...]) -> None:
        self._completion = completion
        self._outputs = outputs

    def __repr__(self) -> str:
        return f"<CudaWork {'done' if self._completion.event.is_done else 'in flight'}>"

    def wait(self) -> tuple[Tensor, ...]:
        try:
            self._completion.wait()
        except CUDAError as error:
            raise failure(error, "waiting for the GPU") from error
        return self._outputs

    def cancel(self) -> None:
        """Do nothing: what was submitted to a GPU's stream runs to its end."""


class JoinedWork:
    """One inference that was added to a graph which the caller captures. It runs each time that graph is launched."""

    def __init__(self, outputs: tuple[Tensor, ...]) -> None:
        self._outputs = outputs

    def wait(self) -> tuple[Tensor, ...]:
        """Return at once where the outputs will be written. Their contents are valid after each launch of the graph."""
        return self._outputs

    def cancel(self) -> None:
        """Do nothing: the graph belongs to the caller."""


class StagedWork(CudaWork):
    """An inference whose outputs are in staging memory until they are collected."""

    __slots__ = ("__weakref__", "_collected", "_lock")

    def __init__(self, completion: Completion, outputs: tuple[Tensor, ...]) -> None:
        super().__init__(completion, outputs)
        self._collected = False
        self._lock = Lock()

    def wait(self) -> tuple[Tensor, ...]:
        if not self._collected:
            super().wait()
        return self.collect()

    def collect(self) -> tuple[Tensor, ...]:
        """Copies of the outputs. Call it after the inference has completed and before its slot in the ring is used again."""
        with self._lock:
            if not self._collected:
                self._outputs = tuple([_copied(tensor) if tensor.nbytes else tensor for tensor in self._outputs])
                self._collected = True
            return self._outputs


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Raise CUDAError and PartitionError of the block as `failure` translates them."""
    try:
        yield
    except (CUDAError, PartitionError) as error:
        raise failure(error, what) from error


def failure(error: CUDAError | PartitionError, what: str) -> ExecutionFailed | DeviceLost:
    """The error as DeviceLost if the device is unusable, else as ExecutionFailed. `what` was being done."""
    found = translation(error, what) if isinstance(error, CUDAError) else error
    return found if isinstance(found, DeviceLost) else ExecutionFailed(str(found))


def _copied(tensor: Tensor) -> Tensor:
    copy = np.frombuffer(view(tensor.address, tensor.nbytes), np.uint8).copy()
    return Tensor(tensor.shape, copy.ctypes.data, tensor.nbytes, copy)
