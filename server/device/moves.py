"""Moves tenants of this process to other granules while they are served."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress

from engines import Executor
from partitions import Move, Partition, PartitionManager
from partitions import probe as probes
from partitions.plan import Granules

from ..control.descriptions import Pause
from ..control.device_runtime import halt_all
from ..link.messages import ModelKey
from ..workers.closing import close_all
from ..workers.halting import Halting, hold
from ..workers.worker import Worker
from ..workers.worker_control import WorkerControl
from .ladders import Ladders, Rung
from .tenant_locks import TenantLocks

MakeWorker = Callable[[str, Partition, Mapping[ModelKey, Executor]], Worker]
"""Makes a tenant's worker on a partition, with these executors. Any thread."""


class PartitionMoves:
    """One move at a time: `prepare`, `settle`, `halt` and `commit`, or `discard`; see `server.control.device_runtime.Moves`.

    Belongs to the event loop. `workers` are the current ones, by tenant; `commit` replaces those of tenants that move. Their
    locks are held from `prepare` to the end of the move: their models do not change meanwhile.
    """

    def __init__(
        self,
        manager: PartitionManager,
        workers: dict[str, Worker],
        worker_control: WorkerControl,
        locks: TenantLocks,
        max_pause: float,
        make_worker: MakeWorker,
        ladders: Ladders,
    ) -> None:
        self._manager = manager
        self._workers = workers
        self._worker_control = worker_control
        self._tenant_locks = locks
        self._max_pause = max_pause
        self._make_worker = make_worker
        self._ladders = ladders
        self._taken: dict[str, Rung] = {}
        """The rungs of the move's tenants that have one of these granules."""
        self._units: dict[str, frozenset[int]] = {}
        """The units that a probe of each tenant's partition ran on; `_placed` are those of the new ones."""
        self._placed: dict[str, frozenset[int]] = {}
        self._move = Move({}, {})
        self._prepared: dict[str, Worker] = {}
        self._locks = AsyncExitStack()
        self._halting: Halting | None = None

    def __repr__(self) -> str:
        return f"<PartitionMoves of {', '.join(self._prepared) or 'no tenant'}>"

    @property
    def prepared(self) -> dict[str, Partition]:
        """The partitions that a prepared move makes, by tenant; none without one."""
        return {name: worker.partition for name, worker in self._prepared.items()}

    async def prepare(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int]]:
        """Make partitions and workers of these granules beside the old ones; the units that a probe ran on, by tenant.

        Raises PartitionError, or Conflict naming a tenant whose models are being changed for too long.
        """
        before = {name: partition.granules for name, partition in self._manager.held.items()}
        move = Move(before, {**before, **granules})
        async with AsyncExitStack() as locks:
            for name in move.movers:
                for lock in (self._tenant_locks.changing[name], self._tenant_locks.paging[name]):
                    with self._manager.device.loads.hurrying():
                        await hold(lock, name, self._max_pause)
                    locks.callback(lock.release)
            taken = {name: rung for name in move.movers if (rung := self._ladders.take(name, move.after[name]))}
            rest = Move(before, {**before, **{name: move.after[name] for name in move.movers if name not in taken}})
            prepared, placements = await self._prepare_or_put_back(rest, taken)
            for name, rung in taken.items():
                prepared[name] = self._make_worker(name, rung.partition, rung.executors)
                placements[name] = rung.units
            with suppress(RuntimeError):  # There can be no more threads; when it is to serve, a worker tries again.
                await asyncio.to_thread(self._worker_control.prepare, prepared)
            self._prepared, self._taken = prepared, taken
            self._placed = placements
            self._move, self._locks = move, locks.pop_all()
        return placements

    async def _prepare_or_put_back(
        self, move: Move, taken: Mapping[str, Rung]
    ) -> tuple[dict[str, Worker], dict[str, frozenset[int]]]:
        """As `_prepare`, for the tenants without a rung; after an error the rungs are where they were."""
        try:
            return await asyncio.to_thread(self._prepare, move) if move.movers else ({}, {})
        except BaseException:
            for name, rung in taken.items():
                self._ladders.put(name, rung)
            raise

    async def settle(self) -> None:
        """Wait until none of the tenants that move, and are served already, has a long inference. Raises Conflict."""
        if self._halting is None:
            serving = {name: self._workers[name] for name in self._prepared if name in self._workers}
            self._halting = self._worker_control.halting(serving)
        await self._halting.settle()

    async def halt(self) -> bool:
        """Pause these tenants, and return True; False where one of them has a long inference now: then `settle` again."""
        return self._halting is not None and await self._halting.halt()

    async def commit(self) -> dict[str, Pause]:
        """Serve them from their new partitions, and close the old ones or make them rungs. Returns how long each was paused."""
        prepared, taken = self._prepared, self._taken
        self._manager.commit(self._move, {name: worker.partition for name, worker in prepared.items()})
        before = {name: self._workers[name] for name in prepared if name in self._workers}
        self._workers.update(prepared)
        self._prepared, self._taken = {}, {}
        try:
            self._resume()
            pauses = {name: Pause(self._worker_control.paused(name), name in taken) for name in before}
            for name in prepared.keys() - before.keys():
                self._worker_control.serve(name)
            for name in taken:
                old = before.pop(name)
                await asyncio.to_thread(old.retire)
                left = Rung(old.partition, self._units.get(name, frozenset()), dict(old.executors))
                self._ladders.switched(name, left, prepared[name].partition.granules)
            self._units |= self._placed
        finally:
            await self._end(before.values())
        return pauses

    async def switch(self) -> dict[str, Pause]:
        """`settle`, `halt` and `commit` at once."""
        await halt_all([self])
        return await self.commit()

    async def discard(self) -> None:
        """Serve them from their old partitions, and close the new ones. Does nothing without a move."""
        prepared, self._prepared = self._prepared, {}
        taken, self._taken = self._taken, {}
        self._resume()
        for name, rung in taken.items():
            await asyncio.to_thread(prepared.pop(name).retire)
            self._ladders.put(name, rung)
        await self._end(prepared.values())

    def _resume(self) -> None:
        halting, self._halting = self._halting, None
        if halting is not None:
            halting.end()

    async def _end(self, left: Iterable[Worker]) -> None:
        try:
            await asyncio.to_thread(close_all, left)
        finally:
            await self._locks.aclose()

    def _prepare(self, move: Move) -> tuple[dict[str, Worker], dict[str, frozenset[int]]]:
        """Workers on the new partitions, with all models ready and the partitions probed; all or none. Blocks.

        The models of each tenant are set up on a separate thread.
        """
        carved = self._manager.carve(move)
        workers: dict[str, Worker] = {}
        try:
            placements = probes.locate(carved)
            probes.check(carved, placements)
            with ThreadPoolExecutor(max(1, len(carved)), "rebinding") as threads:
                begun = {name: threads.submit(self._worker, name, partition) for name, partition in carved.items()}
            workers = {name: future.result() for name, future in begun.items() if not future.exception()}
            for future in begun.values():
                future.result()
        except BaseException:
            close_all(workers.values())
            self._manager.discard(carved)
            raise
        return workers, placements

    def _worker(self, name: str, partition: Partition) -> Worker:
        before = self._workers.get(name)
        return self._make_worker(name, partition, _rebind(before.executors if before else {}, partition))


def _rebind(executors: Mapping[ModelKey, Executor], partition: Partition) -> dict[ModelKey, Executor]:
    bound: dict[ModelKey, Executor] = {}
    try:
        for key, executor in executors.items():
            bound[key] = executor.rebind(partition)
    except BaseException:
        for executor in bound.values():
            executor.close()
        raise
    return bound
