"""Keeps account of which holder has which granules, and makes and retires partitions when a plan changes."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

from .base import Device, Partition
from .plan import Granules, assign, movers


@dataclass(frozen=True)
class Move:
    """A change of plan: the granules of every holder before and after it."""

    before: Mapping[str, Granules]
    after: Mapping[str, Granules]

    @cached_property
    def movers(self) -> tuple[str, ...]:
        """The holders whose granules change, sorted by name. The others are not affected."""
        return movers(self.before, self.after)


class PartitionManager:
    """Assigns the granules of one device, each to at most one holder.

    A change takes three calls: `plan` (pure), `carve` (slow, while the old partitions still serve) and `commit` (instant).
    Every method may be called from any thread.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._partitions: dict[str, Partition] = {}
        self._lock = Lock()

    @property
    def held(self) -> dict[str, Partition]:
        """The current partition of each holder."""
        with self._lock:
            return dict(self._partitions)

    def plan(self, counts: Mapping[str, int]) -> Move:
        """The change to these counts of granules; holders that `counts` does not name keep what they have.

        Raises DoesNotFit with the numbers, ValueError for a count below one, TypeError for a count that is not an integer.
        """
        _check_counts(counts)
        before = {name: partition.granules for name, partition in self.held.items()}
        kept = {name: len(granules) for name, granules in before.items()}
        return Move(before, assign(len(self.device.granules), before, {**kept, **counts}))

    def carve(self, move: Move) -> dict[str, Partition]:
        """Make the movers' new partitions, all or none. They have no holder until `commit`. Blocks.

        Raises PartitionError, and TypeError for anything but what `plan` returned.
        """
        if not isinstance(move, Move):
            raise TypeError(f"carve takes what plan returned, such as plan({{'acme': 2}}); got {move!r}")
        carved: dict[str, Partition] = {}
        try:
            for name in move.movers:
                carved[name] = self.device.carve(move.after[name])
        except BaseException:
            self.discard(carved)
            raise
        return carved

    def commit(self, move: Move, carved: Mapping[str, Partition]) -> dict[str, Partition]:
        """Make the new plan current, and return the old partitions, for the caller to close.

        Raises RuntimeError if the plan was made before another change; nothing changes then.
        """
        with self._lock:
            if {name: partition.granules for name, partition in self._partitions.items()} != dict(move.before):
                raise RuntimeError("the partitions changed since this move was planned; plan again")
            old = {name: self._partitions[name] for name in move.movers if name in self._partitions}
            self._partitions.update(carved)
            return old

    def remove(self, name: str) -> None:
        """This holder has gone, and its granules are free; the caller has closed its partition."""
        with self._lock:
            self._partitions.pop(name, None)

    def discard(self, carved: Mapping[str, Partition]) -> None:
        """Close partitions that were carved and will not be used, each also if another cannot be. Raises what one raised."""
        with ExitStack() as left:
            for partition in reversed([*carved.values()]):
                left.callback(partition.close)

    def close(self) -> None:
        """Close every partition; none may have work in flight. The device stays open."""
        with self._lock:
            held, self._partitions = self._partitions, {}
        self.discard(held)


def _check_counts(counts: object) -> None:
    """Library callers may pass other types."""
    if not isinstance(counts, Mapping):
        raise TypeError(f"counts are granules by holder, such as {{'acme': 2}}; got {counts!r}")
    for name, count in counts.items():
        if type(count) is not int:
            raise TypeError(f"{name}: {count!r} granules; expected a whole number of at least 1")
