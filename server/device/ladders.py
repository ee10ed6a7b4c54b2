"""Executors of this process's tenants for other home partitions than their own, so that a move there only has to switch."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from engines import EngineError, Executor
from engines.memory import added
from engines.thread_priority import lower_priority
from partitions import Device, Partition, PartitionError
from partitions.plan import Granules

from ..control.descriptions import RungState
from ..link.messages import ModelKey
from ..workers.closing import close_all
from ..workers.worker import Worker
from .paged_executor import PagedExecutor
from .tenant_locks import TenantLocks

log = logging.getLogger("greenlane.ladder")


@dataclass(slots=True)
class Rung:
    """A partition that its tenant does not use now, the executors that are ready there, and the units that a probe ran on."""

    partition: Partition
    units: frozenset[int]
    executors: dict[ModelKey, Executor] = field(default_factory=dict)

    def close(self) -> None:
        """Close executors and partition. Blocks."""
        close_all([*self.executors.values(), self.partition])


class Ladders:
    """Belongs to the event loop. `workers` are the current ones.

    `hold` says which rungs there are to be. They are made in the background, one executor at a time with the tenant's locks, so
    that a move or a load waits for one at most: on a GPU on a thread at idle priority, on CPU cores at normal priority, which
    the threads of a session would keep.

    What they take counts within the tenant's budget: what does not fit is not made, and they give way to models that are
    loaded. A model that is paged out is on no rung.
    """

    def __init__(
        self,
        device: Device,
        workers: Mapping[str, Worker],
        locks: TenantLocks,
    ) -> None:
        self._device = device
        self._workers = workers
        self._locks = locks
        self._wanted: dict[str, tuple[Granules, ...]] = {}
        self._rungs: dict[str, dict[Granules, Rung]] = {}
        self._refused: set[tuple[str, Granules, ModelKey]] = set()
        self._over_budget: dict[tuple[str, Granules, ModelKey], Mapping[str, int]] = {}
        """Those for which there was no room, with what they take."""
        self.refuse: Callable[[str, ModelKey, Mapping[str, int]], str] = lambda *_: ""
        """Why a tenant's model may not take as much of the device's memory beside what the tenant has; "" if it may."""
        self._threads = ThreadPoolExecutor(1, "ladder", lower_priority if device.kind == "cuda" else None)
        self._making: asyncio.Task[None] | None = None
        self._again = False

    def __repr__(self) -> str:
        held = (f"{name}: {', '.join(map(str, map(list, rungs)))}" for name, rungs in self._rungs.items() if rungs)
        return f"<Ladders {'; '.join(held) or 'of no tenant'}>"

    def hold(self, wanted: Mapping[str, Sequence[Granules]]) -> None:
        """Have these tenants' models ready on each of these granules; what else there is is closed. Does not wait."""
        self._wanted = {name: tuple(map(tuple, rungs)) for name, rungs in wanted.items()}
        self.follow()

    def follow(self) -> None:
        """Models, or who has which granules, have changed: make what is missing. Does not wait."""
        self._again = True
        if self._making is None and (self._wanted or self._rungs):
            self._making = asyncio.create_task(self._make_all())
            self._making.add_done_callback(self._made)

    async def settled(self) -> None:
        """Wait until all rungs are made, or cannot be."""
        while self._making:
            await asyncio.wait({self._making})

    def take(self, name: str, granules: Granules) -> Rung | None:
        """The rung of these granules if all of the tenant's models are ready there, but those that are paged out: it is the
        caller's. With its locks held.
        """
        rung, worker = self._rungs.get(name, {}).get(granules), self._workers.get(name)
        if rung and worker:
            paged = {key: executor for key, executor in worker.executors.items() if isinstance(executor, PagedExecutor)}
            if rung.executors.keys() == worker.executors.keys() - paged.keys():
                rung.executors |= paged
                return self._rungs[name].pop(granules)
        return None

    def states(self) -> list[RungState]:
        """What is ready now."""
        return [
            RungState(name, granules, len(rung.executors), self._nbytes(name, rung))
            for name, rungs in self._rungs.items()
            for granules, rung in rungs.items()
        ]

    def _nbytes(self, name: str, rung: Rung) -> int:
        """The memory that a rung adds."""
        return sum(sum(self._adds(name, rung, key).values()) for key in rung.executors)

    def _adds(self, name: str, rung: Rung, key: ModelKey) -> dict[str, int]:
        """What a model adds there. On the tenant's first partition it adds what it would on the present one as a rung, and
        its own graphs.
        """
        worker, executor = self._workers.get(name), rung.executors.get(key)
        if executor is None:
            return {}
        if (adds := _added(executor)) is not None:
            return adds
        present = (_added(worker.executors.get(key)) if worker else None) or {}
        kept = {kind: nbytes for kind, nbytes in present.items() if kind != "graphs"}
        return {**kept, **{kind: nbytes for kind, nbytes in executor.memory.items() if kind == "graphs"}}

    def adds(self, name: str, key: ModelKey) -> dict[str, int]:
        """The memory that a tenant's model takes because it is ready on rungs. Any thread."""
        return added(self._adds(name, rung, key) for rung in list(self._rungs.get(name, {}).values()))

    async def give_way(self, name: str, needed: int) -> bool:
        """Close executors on rungs of a tenant until so many bytes are free; whether any were. With its lock in `paging`."""
        freed, rungs = 0, self._rungs.get(name, {})
        for rung in sorted(rungs.values(), key=lambda each: -len(each.partition.granules)):
            if freed < needed and (nbytes := self._nbytes(name, rung)):
                freed += nbytes
                executors, rung.executors = list(rung.executors.values()), {}
                log.info(
                    "%s is not ready to switch to granules %s: a model needs the memory", name, list(rung.partition.granules)
                )
                await asyncio.to_thread(close_all, executors)
        return bool(freed)

    def put(self, name: str, rung: Rung) -> None:
        """The tenant does not use this partition after all, or no more. With its locks held."""
        rung.executors = {key: each for key, each in rung.executors.items() if not isinstance(each, PagedExecutor)}
        self._rungs.setdefault(name, {})[tuple(rung.partition.granules)] = rung

    def switched(self, name: str, left: Rung, granules: Granules) -> None:
        """The tenant has left a partition for one that was a rung; it is one itself now, at least until the next `hold`."""
        others = [each for each in self._wanted.get(name, ()) if each != granules]
        self._wanted[name] = (*others, tuple(left.partition.granules))
        self.put(name, left)

    def leave_models(self, name: str, keys: Iterable[ModelKey]) -> list[Executor]:
        """These models leave: their executors on all rungs, for the caller to close. With either of the tenant's locks held."""
        rungs = self._rungs.get(name, {}).values()
        return [rung.executors.pop(key) for key in keys for rung in rungs if key in rung.executors]

    async def remove(self, name: str) -> None:
        """This tenant goes: close what it has here. With its lock held."""
        self._wanted.pop(name, None)
        await asyncio.to_thread(close_all, self._rungs.pop(name, {}).values())

    async def close(self) -> None:
        """Close everything; all tenants' locks are held, and nothing is in flight."""
        self._wanted.clear()
        if self._making:
            self._making.cancel()
        rungs = [rung for held in self._rungs.values() for rung in held.values()]
        self._rungs.clear()
        await asyncio.to_thread(close_all, rungs)
        self._threads.shutdown(wait=False)

    def _made(self, task: "asyncio.Task[None]") -> None:
        self._making = None
        if not task.cancelled() and (error := task.exception()):
            log.error("ladders are not made any further: %s", error, exc_info=error)

    async def _make_all(self) -> None:
        while self._again:
            self._again = False
            for name in {*self._wanted, *self._rungs}:
                await self._make(name)

    async def _make(self, name: str) -> None:
        """Close the rungs that are not wanted, and make those that are, step by step."""
        for granules, rung in list(self._rungs.get(name, {}).items()):
            if granules not in self._wanted.get(name, ()):
                async with self._locks.both(name):
                    if self._rungs.get(name, {}).get(granules) is rung:
                        await asyncio.to_thread(self._rungs[name].pop(granules).close)
        for granules in self._wanted.get(name, ()):
            step = True
            while step:
                async with self._locks.both(name):
                    step = await self._next(name, granules)

    async def _next(self, name: str, granules: Granules) -> bool:
        """Make the partition of a rung, or the next executor that it lacks; whether there was anything to make."""
        worker = self._workers.get(name)
        if worker is None or granules not in self._wanted.get(name, ()) or granules == tuple(worker.partition.granules):
            return False
        loop, rungs = asyncio.get_running_loop(), self._rungs.setdefault(name, {})
        if granules not in rungs:
            try:
                rungs[granules] = await loop.run_in_executor(self._threads, self._carve, granules)
            except PartitionError as error:
                log.warning("tenant %s cannot switch to granules %s: %s", name, list(granules), error)
                if wanted := self._wanted.get(name):  # `hold` may have changed it meanwhile.
                    self._wanted[name] = tuple(each for each in wanted if each != granules)
                return False
            return True
        rung = rungs[granules]
        for key in [key for key in rung.executors if key not in worker.executors]:
            await asyncio.to_thread(close_all, [rung.executors.pop(key)])
        lacking = self._lacking(name, granules, worker, rung)
        for key in lacking[:1]:
            try:
                made = await loop.run_in_executor(self._threads, worker.executors[key].alternate, rung.partition)
                if (adds := _added(made)) and (why := self.refuse(name, key, adds)):
                    await loop.run_in_executor(self._threads, made.close)
                    if (name, granules, key) not in self._over_budget:
                        text = "tenant %s is not ready to switch to granules %s: model %s: %s"
                        log.warning(text, name, list(granules), key.rpartition("#")[0], why)
                    self._over_budget[name, granules, key] = adds
                else:
                    rung.executors[key] = made
            except EngineError as error:
                self._refused.add((name, granules, key))
                model = key.rpartition("#")[0]
                log.warning("tenant %s cannot switch to granules %s: model %s: %s", name, list(granules), model, error)
        return bool(lacking)

    def _lacking(self, name: str, granules: Granules, worker: Worker, rung: Rung) -> list[ModelKey]:
        """The models that are still to be made ready on a rung."""
        found = []
        for key, executor in worker.executors.items():
            this, adds = (name, granules, key), self._over_budget.get((name, granules, key))
            if key in rung.executors or this in self._refused or isinstance(executor, PagedExecutor):
                continue
            if adds is None or not self.refuse(name, key, adds):
                found.append(key)
        return found

    def _carve(self, granules: Granules) -> Rung:
        """Blocks. Raises PartitionError."""
        partition = self._device.carve(granules)
        try:
            return Rung(partition, partition.locate())
        except BaseException:
            partition.close()
            raise


def _added(executor: Executor | None) -> dict[str, int] | None:
    """What an alternate takes; None for another executor."""
    adds = executor.describe().get("adds") if executor else None
    return dict(adds) if isinstance(adds, dict) else None
