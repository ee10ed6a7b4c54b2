"""A tenant's models bound to some granules; and how what is not used any more is closed."""

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from engines import EngineError, Executor
from partitions import Partition, PartitionError
from partitions.base import Closing

from ..link.messages import ModelKey

log = logging.getLogger("greenlane.worker")


class Refusal(NamedTuple):
    """Why a model is not ready on a placement; if it is for lack of memory, what it would take there."""

    why: str
    adds: Mapping[str, int] = {}


class Placement:
    """A partition, the units that a probe ran on, the executors that are ready there by model, and why others are not.

    Its role is whose it is: a worker's `home`, its `wide`, or in neither use, ready for a move to it.
    """

    def __init__(self, partition: Partition, executors: dict[ModelKey, Executor], units: frozenset[int] = frozenset()) -> None:
        self.partition = partition
        self.executors = executors
        self.units = units
        self.refused: dict[ModelKey, Refusal] = {}

    def __repr__(self) -> str:
        return f"<Placement of {len(self.executors)} models on {self.partition!r}>"

    def close(self) -> None:
        """Close executors and partition. Blocks. Failures are logged."""
        close_all([*self.executors.values(), self.partition])


def close_all(things: Iterable[Closing]) -> None:
    """Close each, in order, even if others fail: after a move or an unload, which cannot be undone, and at the end. Blocks.

    Failures are logged: what cannot be closed, as on a lost device, is not used again either.
    """
    for thing in things:
        try:
            thing.close()
        except (EngineError, PartitionError) as error:
            log.warning("closing %r: %s", thing, error)
