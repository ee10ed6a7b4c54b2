"""The account of who holds which granules; makes partitions for those who move and retires the ones they leave."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

from .base import Device, Partition
from .plan import Granules, assign, movers


@dataclass(frozen=True, slots=True)
class Move:
    """A change of plan: what every holder has before and after it, and who has to move."""

    before: Mapping[str, Granules]
    after: Mapping[str, Granules]

    @property
    def movers(self) -> tuple[str, ...]:
        """Those whose granules change, sorted by name; nobody else is touched."""
        return movers(self.before, self.after)


@dataclass(frozen=True, slots=True)
class ManagerStatistics:
    """Granules of the device, granules that nobody holds, and holders."""

    granules: int
    free: int
    holders: int


class PartitionManager:
    """Hands the granules of one device out so that nobody ever holds one that another holds.

    A change takes three calls: `plan` (pure), `carve` (slow, while the old partitions still serve) and `commit`
    (instant). Every method may be called from any thread.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._held: dict[str, Partition] = {}
        self._lock = Lock()

    def __repr__(self) -> str:
        held = ", ".join(f"{name}: {list(partition.granules)}" for name, partition in self.held.items())
        count = len(self.device.granules)
        return f"<PartitionManager {count} granule{'s' * (count != 1)}, {held or 'all free'}>"

    def statistics(self) -> ManagerStatistics:
        held = self.held
        total = len(self.device.granules)
        return ManagerStatistics(total, total - sum(len(p.granules) for p in held.values()), len(held))

    @property
    def held(self) -> dict[str, Partition]:
        """The partition of each holder, as of now."""
        with self._lock:
            return dict(self._held)

    def plan(self, counts: Mapping[str, int]) -> Move:
        """Work out who would get what; holders that `counts` does not name keep what they have.

        Raises DoesNotFit with the arithmetic, ValueError for a count below one, TypeError for what is no count.
        """
        _check_counts(counts)
        before = {name: partition.granules for name, partition in self.held.items()}
        kept = {name: len(granules) for name, granules in before.items()}
        return Move(before, assign(len(self.device.granules), before, {**kept, **counts}))

    def carve(self, move: Move) -> dict[str, Partition]:
        """Make the movers' new partitions; they are held by nobody until `commit`. Blocks. All or none.

        Raises PartitionError, TypeError for anything but what `plan` returned.
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
        """Put the new plan in force and return the partitions that were left, for the caller to close.

        Raises RuntimeError when the plan was made from an account that has changed since; nothing changes then.
        """
        with self._lock:
            if {name: partition.granules for name, partition in self._held.items()} != dict(move.before):
                raise RuntimeError("the partitions changed since this move was planned; plan again")
            left = {name: self._held[name] for name in move.movers if name in self._held}
            self._held.update(carved)
            return left

    def discard(self, carved: Mapping[str, Partition]) -> None:
        """Close partitions that were carved and will not be used."""
        for partition in carved.values():
            partition.close()

    def close(self) -> None:
        """Close every partition; none may have work in flight. The device stays open."""
        with self._lock:
            held, self._held = self._held, {}
        self.discard(held)


def _check_counts(counts: object) -> None:
    """Whoever calls this from a program of their own may be wrong about the kinds."""
    if not isinstance(counts, Mapping):
        raise TypeError(f"counts are granules by holder, such as {{'acme': 2}}; got {counts!r}")
    for name, count in counts.items():
        if type(count) is not int:
            raise TypeError(f"{name}: {count!r} granules; expected a whole number of at least 1")
