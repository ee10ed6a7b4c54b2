"""A tenant's models bound to some granules; and how what is not used any more is closed."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from engines import EngineError, Executor
from partitions import Partition, PartitionError
from partitions.base import Closing

from ..accounts.meter import Place
from ..launch_loop.structures import Demand
from ..link.messages import ModelKey, Shape

log = logging.getLogger("greenlane.worker")


class Refusal(NamedTuple):
    """Why a model is not ready on a placement; if it is for lack of memory, what it would take there."""

    why: str
    adds: Mapping[str, int] = {}


class Placement:
    """A partition, the units that a probe ran on, the executors that are ready there by model, and why others are not.

    Its role is whose it is: a worker's `home`, its `wide` or its `narrow`, or in no use, ready for a move to it.
    """

    def __init__(self, partition: Partition, executors: dict[ModelKey, Executor], units: frozenset[int] = frozenset()) -> None:
        self.partition = partition
        self.executors = executors
        self.units = units
        self.refused: dict[ModelKey, Refusal] = {}

    def close(self) -> None:
        """Close executors and partition. Blocks. Failures are logged."""
        close_all([*self.executors.values(), self.partition])


class SidePlacement(Placement):
    """One beside a worker's home, to which the worker sends works while it is not `suspended`, which it is at first.

    The worker's threads call `begin`, `give_up` and `end`, the event loop the rest. `place` is what its works are counted as.
    """

    def __init__(self, partition: Partition, place: Place) -> None:
        super().__init__(partition, {})
        self.place = place
        self.suspended = True
        self._begun = self._ended = 0
        self._left: Future[None] | None = None

    @property
    def running(self) -> bool:
        """Whether a work of the worker is in flight there; those of the launch loop do not count."""
        return self._begun != self._ended

    def begin(self) -> bool:
        """A work is about to be enqueued there; False if it has to stay at home, as it is suspended."""
        self._begun += 1  # Before the look, so that `suspend` or this call sees the other.
        if self.suspended:
            self.give_up()
            return False
        return True

    def give_up(self) -> None:
        """That work is not enqueued after all. Called by the thread that called `begin`."""
        self._begun -= 1
        self._look()

    def end(self) -> None:
        """A work has ended, or failed. Called by the thread that waited for it."""
        self._ended += 1
        self._look()

    def suspend(self) -> "Future[None]":
        """Send nothing there any more; the future is done when no work of the worker is in flight there, or cancelled by
        `resume`.
        """
        self.suspended = True
        left = self._left
        if left is None or left.done():
            left = Future()
        self._left = left
        self._look()
        return left

    def resume(self) -> None:
        """Send works there from now on."""
        self.suspended = False
        if left := self._left:
            left.cancel()

    def demand(self, model: ModelKey) -> Demand | None:
        """What works of this model need, if that decides whether they go there."""
        return None

    def close(self) -> None:
        """Close the executors and the partition; nothing is in flight there. Blocks. Failures are logged."""
        self.suspended = True
        super().close()
        self.executors = {}

    def _look(self) -> None:
        if self.suspended and not self.running:
            left, self._left = self._left, None
            if left is not None:
                with suppress(Exception):  # Both threads may be here.
                    left.set_result(None)


def is_ready(executor: Any, shapes: Sequence[Shape]) -> bool:
    """Whether an executor need not prepare itself for these shapes, which it begins to do otherwise."""
    prepare = getattr(executor, "preparing", None)
    return prepare is None or prepare(shapes) is None


def close_all(things: Iterable[Closing]) -> None:
    """Close each, in order, even if others fail: after a move or an unload, which cannot be undone, and at the end. Blocks.

    Failures are logged: what cannot be closed, as on a lost device, is not used again either.
    """
    for thing in things:
        try:
            thing.close()
        except (EngineError, PartitionError) as error:
            log.warning("closing %r: %s", thing, error)
