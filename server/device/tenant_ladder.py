"""Where one tenant's models are ready for a move, which then only has to switch: on granules that it may have next."""

import asyncio
import logging
from collections.abc import Iterable

from partitions import PartitionError
from partitions.plan import Granules

from ..control.descriptions import ReadyShare
from ..workers.placement import Placement, close_all
from ..workers.worker import Worker
from .paged_executor import bound
from .side import Means, Role


class TenantLadder(Role):
    """Belongs to the event loop. What is ready is kept until `set`; its models give way to models that are loaded."""

    log = logging.getLogger("greenlane.ladder")
    without = "so the tenant cannot just switch to them"

    def __init__(self, name: str, means: Means) -> None:
        super().__init__(name, means)
        self.ready: dict[Granules, Placement] = {}
        """To these a move only has to switch, once they have all models."""
        self._wanted: tuple[Granules, ...] = ()

    @property
    def placements(self) -> list[Placement]:
        return list(self.ready.values())

    @property
    def needed(self) -> bool:
        return bool(self._wanted or self.ready)

    def set(self, wanted: Iterable[Granules]) -> None:
        """Be ready on each of these granules once `make` is called; what else is ready is closed."""
        self._wanted = tuple(map(tuple, wanted))

    async def make(self, worker: Worker) -> bool:
        """Close what is not wanted, before the rest is made."""
        for granules in self.ready.keys() - set(self._wanted):
            await asyncio.to_thread(self.ready.pop(granules).close)
        for granules in self._wanted:
            if granules != tuple(worker.partition.granules) and await self._make_on(granules, worker):
                return True
        return False

    async def give_way(self, needed: int) -> bool:
        """Have models not ready for a move until so many bytes are free; whether any were. With the lock in `paging`."""
        freed = 0
        for each in sorted(self.ready.values(), key=lambda each: -len(each.partition.granules)):
            if freed < needed and (nbytes := self._nbytes(each)):
                freed += nbytes
                executors, each.executors = list(each.executors.values()), {}
                text = "%s is not ready to switch to granules %s: a model needs the memory"
                self.log.info(text, self._name, list(each.partition.granules))
                await asyncio.to_thread(close_all, executors)
        return bool(freed)

    def take(self, granules: Granules) -> Placement | None:
        """The placement of these granules, for the caller to make it the home, if all of the tenant's models are ready there,
        or are paged out. With its locks held.
        """
        placement, worker = self.ready.get(granules), self.worker
        if placement and worker:
            resident = bound(worker.executors)
            if placement.executors.keys() == resident.keys():
                placement.executors |= {key: each for key, each in worker.executors.items() if key not in resident}
                return self.ready.pop(granules)
        return None

    def put(self, placement: Placement) -> None:
        """The tenant does not use this placement after all, or no more. With its locks held."""
        placement.executors = bound(placement.executors)
        self.ready[tuple(placement.partition.granules)] = placement

    def switched(self, left: Placement, granules: Granules) -> None:
        """The tenant's home is another placement now, which was ready; the one that it left is, at least until `set`."""
        self._wanted = *(each for each in self._wanted if each != granules), tuple(left.partition.granules)
        self.put(left)

    async def close(self) -> None:
        """Close what is ready. With the tenant's locks held, and nothing in flight."""
        self._wanted = ()
        ready, self.ready = self.placements, {}
        await asyncio.to_thread(close_all, ready)

    def state(self) -> list[ReadyShare]:
        """What there is now."""
        return [ReadyShare(key, len(each.executors), self._nbytes(each)) for key, each in self.ready.items()]

    async def _make_on(self, granules: Granules, worker: Worker) -> bool:
        """Make the next thing on these granules; whether there was one."""
        if placement := self.ready.get(granules):
            return await self._add(worker, placement)
        try:
            self.ready[granules] = await asyncio.get_running_loop().run_in_executor(self._threads, self._place, granules)
        except PartitionError as error:
            self.log.warning("tenant %s cannot switch to granules %s: %s", self._name, list(granules), error)
            self._wanted = tuple(each for each in self._wanted if each != granules)
            return False
        return True

    def _place(self, granules: Granules) -> Placement:
        """Blocks. Raises PartitionError."""
        return self._means.place(granules, (), lambda partition: Placement(partition, {}, partition.locate()))

    def _nbytes(self, placement: Placement) -> int:
        """The memory that a placement adds."""
        return sum(sum(self.adds(placement, key).values()) for key in placement.executors)
