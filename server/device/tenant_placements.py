"""Where one tenant's models are ready beside its home partition: made as planned, in the background."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from engines import EngineError, Executor
from engines.memory import added
from partitions import PartitionError
from partitions.plan import Granules

from ..control.descriptions import Beside, ReadyShare
from ..control.fence import Fence
from ..control.stretch import Wide
from ..link.messages import ModelKey, label_of
from ..workers.narrow import NarrowPlacement
from ..workers.placement import Placement, Refusal, close_all
from ..workers.wide import WidePlacement
from ..workers.worker import Worker
from .paged_executor import bound
from .side import Means
from .tenant_fence import TenantFence
from .tenant_stretch import TenantStretch

ladder_log = logging.getLogger("greenlane.ladder")


class TenantPlacements:
    """Belongs to the event loop. The wide placement closes with the worker that has it; the `ready` ones are kept.

    Executors are made one at a time, each with the tenant's locks, so a move or a load waits for one at most. Those of ready
    placements give way to models that are loaded. A model that is paged out is on no placement.
    """

    def __init__(self, name: str, means: Means) -> None:
        self.ready: dict[Granules, Placement] = {}
        """To these a move only has to switch, once they have all models."""
        self._name = name
        self._means = means
        self._wanted: tuple[Granules, ...] = ()
        self.fence = TenantFence(name, means)
        self.stretch = TenantStretch(name, means)
        self._making: asyncio.Task[None] | None = None
        self._again = False
        self._later: asyncio.TimerHandle | None = None

    @property
    def worker(self) -> Worker | None:
        """The tenant's current one. Any thread."""
        return self._means.workers.get(self._name)

    def plan(self, wide: Wide | None, fence: Fence | None) -> None:
        """Have the placements of these plans, or none. Does not wait."""
        changed = self.stretch.set(wide), self.fence.set(fence)
        if any(changed):
            self.follow()

    def hold(self, wanted: Iterable[Granules]) -> None:
        """Be ready on each of these granules; what else is ready is closed. Does not wait."""
        self._wanted = tuple(map(tuple, wanted))
        self.follow()

    def follow(self) -> None:
        """The tenant's models have changed: make those ready that are not. Does not wait."""
        self._again = True
        needed = self._wanted or self.ready or self.fence.needed or self.stretch.needed
        if self._making is None and needed:
            self._making = asyncio.create_task(self._make())
            self._making.add_done_callback(self._made)

    async def settled(self) -> None:
        """Wait until all is made, or cannot be."""
        while self._making:
            await asyncio.wait({self._making})

    def leave(self, keys: Iterable[ModelKey]) -> list[Executor]:
        """These models leave: their executors, for the caller to close. With either of the tenant's locks held."""
        others = self._others
        return [each.executors.pop(key) for key in keys for each in others if key in each.executors]

    def adds(self, key: ModelKey) -> dict[str, int]:
        """The memory that a model takes because it is ready elsewhere, too. Any thread."""
        return added(self._adds(each, key) for each in self._others)

    async def give_way(self, needed: int) -> bool:
        """Have models not ready for a move until so many bytes are free; whether any were. With the lock in `paging`."""
        freed = 0
        for each in sorted(self.ready.values(), key=lambda each: -len(each.partition.granules)):
            if freed < needed and (nbytes := self._nbytes(each)):
                freed += nbytes
                executors, each.executors = list(each.executors.values()), {}
                text = "%s is not ready to switch to granules %s: a model needs the memory"
                ladder_log.info(text, self._name, list(each.partition.granules))
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
        """The tenant's home is another placement now, which was ready; the one that it left is, at least until `hold`."""
        self._wanted = *(each for each in self._wanted if each != granules), tuple(left.partition.granules)
        self.put(left)

    async def close(self) -> None:
        """Close what is ready; the worker closes the rest. With the tenant's locks held, and nothing in flight."""
        self._wanted = ()
        self.fence.set(None)
        self.stretch.set(None)
        if self._making:
            self._making.cancel()
        if self._later:
            self._later.cancel()
        ready, self.ready = list(self.ready.values()), {}
        await asyncio.to_thread(close_all, ready)

    def state(self) -> Beside:
        """What there is now."""
        ready = [ReadyShare(key, len(each.executors), self._nbytes(each)) for key, each in self.ready.items()]
        return Beside(self.stretch.state(), self.fence.state(), ready)

    def _made(self, task: "asyncio.Task[None]") -> None:
        self._making = None
        if (self.fence.late or self.stretch.late) and not task.cancelled():
            self._later = asyncio.get_running_loop().call_later(self._means.max_pause, self.follow)
        if not task.cancelled() and (error := task.exception()):
            text = "what %s has beside its share is not made any further: %s"
            ladder_log.error(text, self._name, error, exc_info=error)

    async def _make(self) -> None:
        """Make the narrow placement first, then the wide one, also if others are planned meanwhile; then close what is not
        wanted, before the rest.
        """
        while self._again:
            self._again = False
            for side in (self.fence, self.stretch):
                while await self._step(partial(side.make, add=self._add)):
                    pass
            for granules in sorted({*self.ready, *self._wanted}, key=self._wanted.__contains__):
                while not self._again and await self._step(partial(self._next_ready, granules)):
                    pass

    async def _step(self, make: Callable[[Worker], Awaitable[bool]]) -> bool:
        """Make one thing, with the tenant's locks; whether there was one to make."""
        async with self._means.locks.both(self._name):
            return (worker := self.worker) is not None and await make(worker)

    async def _next_ready(self, granules: Granules, worker: Worker) -> bool:
        if granules not in self._wanted:
            if placement := self.ready.pop(granules, None):
                await asyncio.to_thread(placement.close)
            return False
        if granules == tuple(worker.partition.granules):
            return False
        if placement := self.ready.get(granules):
            return await self._add(worker, placement)
        try:
            self.ready[granules] = await asyncio.get_running_loop().run_in_executor(self._means.threads, self._place, granules)
        except PartitionError as error:
            ladder_log.warning("tenant %s cannot switch to granules %s: %s", self._name, list(granules), error)
            self._wanted = tuple(each for each in self._wanted if each != granules)
            return False
        return True

    def _place(self, granules: Granules) -> Placement:
        """Blocks. Raises PartitionError."""
        return self._means.place(granules, (), lambda partition: Placement(partition, {}, partition.locate()))

    async def _add(self, worker: Worker, placement: Placement) -> bool:
        """Close what models have left on a placement, and make the next one ready there, or find why it is not; whether there
        was one.
        """
        if gone := [key for key in placement.executors if key not in worker.executors]:
            await asyncio.to_thread(close_all, [placement.executors.pop(key) for key in gone])
        placement.refused = {key: each for key, each in placement.refused.items() if key in worker.executors}
        if (key := self._lacking(worker, placement)) is None:
            return False
        loop, threads = asyncio.get_running_loop(), None if isinstance(placement, WidePlacement) else self._means.threads
        try:
            made = await loop.run_in_executor(threads, worker.executors[key].alternate, placement.partition)
            if (adds := _added(made)) and (why := self._means.refuse(self._name, key, adds)):
                await loop.run_in_executor(threads, made.close)
                self._leave_out(placement, key, Refusal(why, adds))
            else:
                placement.executors[key] = made
        except EngineError as error:
            self._leave_out(placement, key, Refusal(str(error)))
        return True

    def _lacking(self, worker: Worker, placement: Placement) -> ModelKey | None:
        """A model that is to be made ready on a placement. On a wide one answers in parts are not, and what had no room there
        has none until the next plan, as it would not give way.
        """
        wide, known = isinstance(placement, WidePlacement), {id(worker.executors.get(key)) for key in placement.executors}
        for key, executor in bound(worker.executors).items():
            if id(executor) not in known and not (wide and executor.engine.signature.in_parts):
                refusal = placement.refused.get(key)
                if refusal is None or (not wide and refusal.adds and not self._means.refuse(self._name, key, refusal.adds)):
                    return key
            known.add(id(executor))  # Others of its keys are for a moment only.
        return None

    def _leave_out(self, placement: Placement, key: ModelKey, refusal: Refusal) -> None:
        log, so = ladder_log, "so the tenant cannot just switch to them"
        if isinstance(placement, WidePlacement):
            refusal = refusal._replace(why=f"on its wide partition {refusal.why}") if refusal.adds else refusal
            log, so = self.stretch.log, self.stretch.without
        elif isinstance(placement, NarrowPlacement):
            log, so = self.fence.log, self.fence.without
        if not (refusal.adds and key in placement.refused):
            text, granules = "tenant %s: model %s is not ready on granules %s, %s: %s", list(placement.partition.granules)
            log.warning(text, self._name, label_of(key), granules, so, refusal.why)
        placement.refused[key] = refusal

    def _adds(self, placement: Placement, key: ModelKey) -> dict[str, int]:
        """What a model adds there. On the tenant's first partition it adds what it would on the present one if that were ready
        for a move, and its own graphs.
        """
        worker, executor = self.worker, placement.executors.get(key)
        if executor is None:
            return {}
        if (adds := _added(executor)) is not None:
            return adds
        present = (_added(worker.executors.get(key)) if worker else None) or {}
        kept = {kind: nbytes for kind, nbytes in present.items() if kind != "graphs"}
        return {**kept, **{kind: nbytes for kind, nbytes in executor.memory.items() if kind == "graphs"}}

    def _nbytes(self, placement: Placement) -> int:
        """The memory that a placement adds."""
        return sum(sum(self._adds(placement, key).values()) for key in placement.executors)

    @property
    def _others(self) -> list[Placement]:
        """All placements but the home. Any thread."""
        sides = (worker.narrow, worker.wide) if (worker := self.worker) else ()
        return [*(each for each in sides if each), *list(self.ready.values())]


def _added(executor: Executor | None) -> dict[str, int] | None:
    """What an alternate takes; None for another executor."""
    adds = executor.describe().get("adds") if executor else None
    return dict(adds) if isinstance(adds, dict) else None
