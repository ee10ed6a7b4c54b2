"""Inferences in flight on a GPU's stream, and CUDA's errors as this package's."""

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


class Ended:
    """How many of an executor's inferences were seen to have ended, counted from its first: so many need not be waited for.

    They end in order, so that the last to be seen tells of all before it; whoever says less than is known does no harm.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __repr__(self) -> str:
        return f"<Ended {self.count}>"


class Mark(NamedTuple):
    """Where an inference ends on its stream: its event, its number, from 1, and where to say that it has ended.

    `executor` is only held: what computes must not be collected before it has ended.
    """

    event: Event
    number: int
    ended: Ended
    executor: object = None

    def wait(self) -> None:
        """Until it has ended. Blocks, spinning without the GIL. Raises CUDAError."""
        self.event.sync()
        self.ended.count = self.number


class TensorRTWork:
    """One inference on a partition's stream; see `engines.base.Work`. What is on a GPU's stream cannot be cancelled."""

    __slots__ = ("_mark", "_outputs")

    def __init__(self, mark: Mark, outputs: tuple[Tensor, ...]) -> None:
        self._mark = mark
        self._outputs = outputs

    def __repr__(self) -> str:
        return f"<TensorRTWork {'done' if self._mark.event.is_done else 'in flight'}>"

    def wait(self) -> tuple[Tensor, ...]:
        try:
            self._mark.wait()
        except CUDAError as error:
            raise failure(error, "waiting for the GPU") from error
        return self._outputs

    def cancel(self) -> None:
        """Nothing: a graph that was launched runs to its end."""


class JoinedWork:
    """One inference in a graph that the caller captures: it runs whenever that is launched, so there is nothing to wait for."""

    def __init__(self, outputs: tuple[Tensor, ...]) -> None:
        self._outputs = outputs

    def __repr__(self) -> str:
        return "<JoinedWork>"

    def wait(self) -> tuple[Tensor, ...]:
        """Where the outputs will lie, at once: when they do is for the caller to know, who launches the graph."""
        return self._outputs

    def cancel(self) -> None:
        """Nothing: the graph is the caller's."""


class StagedWork(TensorRTWork):
    """One whose outputs lie where a later inference's will, until they are collected."""

    __slots__ = ("__weakref__", "_collected", "_collecting")

    def __init__(self, mark: Mark, outputs: tuple[Tensor, ...]) -> None:
        super().__init__(mark, outputs)
        self._collected = False
        self._collecting = Lock()

    def wait(self) -> tuple[Tensor, ...]:
        if not self._collected:
            super().wait()
        return self.collect()

    def collect(self) -> tuple[Tensor, ...]:
        """Copies of the outputs, made once it has ended and before its place in the ring is used again."""
        with self._collecting:
            if not self._collected:
                self._outputs = tuple([_own(tensor) for tensor in self._outputs])
                self._collected = True
            return self._outputs


@contextmanager
def failing(what: str) -> Iterator[None]:
    """CUDA's and the partition's errors in this block as `failure` gives them."""
    try:
        yield
    except (CUDAError, PartitionError) as error:
        raise failure(error, what) from error


def failure(error: CUDAError | PartitionError, what: str) -> ExecutionFailed | DeviceLost:
    """The error as ExecutionFailed, or as DeviceLost if nothing works after it. `what` was tried."""
    found = translation(error, what) if isinstance(error, CUDAError) else error
    return found if isinstance(found, DeviceLost) else ExecutionFailed(str(found))


def _own(tensor: Tensor) -> Tensor:
    """A copy of an output that lies in memory which the next inference will write to."""
    copy = np.frombuffer(view(tensor.address, tensor.nbytes), np.uint8).copy()
    return Tensor(tensor.shape, copy.ctypes.data, tensor.nbytes, copy)
