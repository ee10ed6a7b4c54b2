"""Stands for the executor of a model that is paged out, so that its tickets wait in the worker until it is back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from engines import Engine, ExecutionFailed, Executor, Room, Tensor, Work
from engines.base import NO_ROOM
from engines.signature import Shape
from partitions import Partition

from ..link.messages import ModelKey
from .loaded_model import Source


class PagedExecutor:
    """See `engines.base.Preparing`. It holds nothing on any partition; `engine` is closed, or belongs to other tenants.

    `request` asks for the model: it returns a future that is done when the model is back, and never blocks. Then `resident` is
    the executor in its place, for tickets that name the model by another key. `taken` is what the model took when last bound.
    """

    def __init__(self, engine: Engine, source: Source, taken: Mapping[str, int], request: Callable[[], "Future[None]"]) -> None:
        self.engine = engine
        self.source = source
        self.taken = taken
        self.resident: Any = None
        self._request = request

    def __repr__(self) -> str:
        return f"<PagedExecutor of {self.engine!r}>"

    @property
    def memory(self) -> Mapping[str, int]:
        return {}

    def preparing(self, shapes: Sequence[Shape]) -> "Future[None] | None":
        if self.resident is None:
            return self._request()
        prepared: Future[None] | None = self.resident.preparing(shapes) if hasattr(self.resident, "preparing") else None
        return prepared

    def enqueue(self, inputs: Sequence[Tensor], room: Room = NO_ROOM) -> Work:
        work: Work = self._executor().enqueue(inputs, room)
        return work

    def proceed(self, part: Work, room: Room = NO_ROOM) -> Work:
        """As `engines.base.Streaming`."""
        work: Work = self._executor().proceed(part, room)
        return work

    def rebind(self, partition: Partition) -> Executor:
        """Itself, while it is on no partition."""
        moved: Executor = self if self.resident is None else self.resident.rebind(partition)
        return moved

    def alternate(self, partition: Partition) -> Executor:
        """Itself, while it is on no partition."""
        other: Executor = self if self.resident is None else self.resident.alternate(partition)
        return other

    @contextmanager
    def overriding(self, **changes: Any) -> Iterator[None]:
        raise ExecutionFailed(f"{self!r} has no settings while its model is paged out")
        yield

    def describe(self) -> Mapping[str, object]:
        return {"graphs": "none", "why": "paged out"}

    def close(self) -> None:
        """Do nothing: it holds nothing."""

    def _executor(self) -> Any:
        if self.resident is None:
            raise ExecutionFailed(f"{self!r}: the model is paged out")
        return self.resident


def bound(executors: Mapping[ModelKey, Executor]) -> dict[ModelKey, Executor]:
    """Those that are on a partition: all but those that stand for models that are paged out."""
    return {key: executor for key, executor in executors.items() if not isinstance(executor, PagedExecutor)}
