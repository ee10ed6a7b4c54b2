"""Executors of this process's tenants for other home partitions than their own, so that a move there only has to switch."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from engines import EngineError, Executor
from engines.tensorrt.thread_priority import lower_priority
from partitions import Device, Partition, PartitionError
from partitions.plan import Granules

from ..control.descriptions import RungState
from ..link.messages import ModelKey
from ..workers.worker import Worker

log = logging.getLogger("greenlane.ladder")


@dataclass(slots=True)
class Rung:
    """A partition that its tenant does not use now, the executors that are ready there, and the units that a probe ran on."""

    partition: Partition
    units: frozenset[int]
    executors: dict[ModelKey, Executor] = field(default_factory=dict)

    def close(self) -> None:
        """Close executors and partition. Blocks."""
        for executor in self.executors.values():
            executor.close()
        self.partition.close()


class Ladders:
    """Belongs to the event loop. `workers` are the current ones, and `changing` each tenant's lock; see `Runtime`.

    `hold` says which rungs there are to be. They are made in the background, one executor at a time with the tenant's lock, so
    that a move or a load waits for one at most: on a GPU on a thread at idle priority, on CPU cores at normal priority, which
    the threads of a session would keep.
    """

    def __init__(self, device: Device, workers: Mapping[str, Worker], changing: Mapping[str, asyncio.Lock]) -> None:
        self._device = device
        self._workers = workers
        self._changing = changing
        self._wanted: dict[str, tuple[Granules, ...]] = {}
        self._rungs: dict[str, dict[Granules, Rung]] = {}
        self._refused: set[tuple[str, Granules, ModelKey]] = set()
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
        """The rung of these granules if all of the tenant's models are ready there: it is the caller's. With its lock held."""
        rung, worker = self._rungs.get(name, {}).get(granules), self._workers.get(name)
        if rung and worker and rung.executors.keys() == worker.executors.keys():
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
        """The memory that a rung adds. One that was the tenant's first partition adds what the present one would as a rung."""
        worker = self._workers.get(name)
        present = worker.executors if worker else {}
        return sum(_added(executor) or _added(present.get(key)) for key, executor in rung.executors.items())

    def put(self, name: str, rung: Rung) -> None:
        """The tenant does not use this partition after all, or no more. With its lock held."""
        self._rungs.setdefault(name, {})[tuple(rung.partition.granules)] = rung

    def switched(self, name: str, left: Rung, granules: Granules) -> None:
        """The tenant has left a partition for one that was a rung; it is one itself now, at least until the next `hold`."""
        others = [each for each in self._wanted.get(name, ()) if each != granules]
        self._wanted[name] = (*others, tuple(left.partition.granules))
        self.put(name, left)

    def leave_models(self, name: str, keys: Iterable[ModelKey]) -> list[Executor]:
        """These models are not served any more: their executors on all rungs, for the caller to close. With its lock held."""
        rungs = self._rungs.get(name, {}).values()
        return [rung.executors.pop(key) for key in keys for rung in rungs if key in rung.executors]

    async def remove(self, name: str) -> None:
        """This tenant goes: close what it has here. With its lock held."""
        self._wanted.pop(name, None)
        await asyncio.to_thread(_close_all, self._rungs.pop(name, {}).values())

    async def close(self) -> None:
        """Close everything; all tenants' locks are held, and nothing is in flight."""
        self._wanted.clear()
        if self._making:
            self._making.cancel()
        rungs = [rung for held in self._rungs.values() for rung in held.values()]
        self._rungs.clear()
        await asyncio.to_thread(_close_all, rungs)
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
                async with self._lock(name):
                    if self._rungs.get(name, {}).get(granules) is rung:
                        await asyncio.to_thread(self._rungs[name].pop(granules).close)
        for granules in self._wanted.get(name, ()):
            step = True
            while step:
                async with self._lock(name):
                    step = await self._next(name, granules)

    def _lock(self, name: str) -> asyncio.Lock:
        """The tenant's lock; one of no account where it has gone."""
        return self._changing.get(name) or asyncio.Lock()

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
                self._wanted[name] = tuple(each for each in self._wanted[name] if each != granules)
                return False
            return True
        rung = rungs[granules]
        for key in [key for key in rung.executors if key not in worker.executors]:
            await asyncio.to_thread(rung.executors.pop(key).close)
        lacking = self._lacking(name, granules, worker, rung)
        for key in lacking[:1]:
            try:
                rung.executors[key] = await loop.run_in_executor(self._threads, worker.executors[key].alternate, rung.partition)
            except EngineError as error:
                self._refused.add((name, granules, key))
                model = key.rpartition("#")[0]
                log.warning("tenant %s cannot switch to granules %s: model %s: %s", name, list(granules), model, error)
        return bool(lacking)

    def _lacking(self, name: str, granules: Granules, worker: Worker, rung: Rung) -> list[ModelKey]:
        """The models that are still to be made ready on a rung."""
        keys = (key for key in worker.executors if key not in rung.executors)
        return [key for key in keys if (name, granules, key) not in self._refused]

    def _carve(self, granules: Granules) -> Rung:
        """Blocks. Raises PartitionError."""
        partition = self._device.carve(granules)
        try:
            return Rung(partition, partition.locate())
        except BaseException:
            partition.close()
            raise


def _added(executor: Executor | None) -> int:
    """The bytes that an alternate takes; 0 for another executor."""
    adds = executor.describe().get("adds") if executor else None
    return sum(adds.values()) if isinstance(adds, dict) else 0


def _close_all(rungs: Iterable[Rung]) -> None:
    for rung in rungs:
        rung.close()
