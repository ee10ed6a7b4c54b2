"""Moves tenants of this process to other granules while they are served."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from engines import Executor
from partitions import Move, Partition, PartitionManager
from partitions import probe as probes
from partitions.base import Closing
from partitions.plan import Granules

from ..control.descriptions import Pause
from ..link.messages import ModelKey
from ..workers.worker import Worker
from ..workers.worker_control import WorkerControl, hold

MakeWorker = Callable[[str, Partition, Mapping[ModelKey, Executor]], Worker]
"""Makes a tenant's worker on a partition, with these executors. Any thread."""


class PartitionMoves:
    """One move at a time: `prepare`, `halt` and `commit`, or `discard`; see `server.control.device_runtime`.

    Belongs to the event loop. `workers` are the current ones, by tenant; `commit` replaces those of tenants that move. Their
    locks in `changing` and `paging` are held from `prepare` to the end of the move: their models do not change meanwhile.
    """

    def __init__(
        self,
        manager: PartitionManager,
        workers: dict[str, Worker],
        worker_control: WorkerControl,
        changing: Mapping[str, asyncio.Lock],
        paging: Mapping[str, asyncio.Lock],
        max_pause: float,
        make_worker: MakeWorker,
    ) -> None:
        self._manager = manager
        self._workers = workers
        self._worker_control = worker_control
        self._changing = changing
        self._paging = paging
        self._max_pause = max_pause
        self._make_worker = make_worker
        self._move = Move({}, {})
        self._prepared: dict[str, Worker] = {}
        self._locks = AsyncExitStack()
        self._halted = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<PartitionMoves of {', '.join(self._prepared) or 'no tenant'}>"

    async def prepare(self, granules: Mapping[str, Granules]) -> dict[str, frozenset[int]]:
        """Make partitions and workers of these granules beside the old ones; the units that a probe ran on, by tenant.

        Raises PartitionError, or Conflict naming a tenant whose models are being changed for too long.
        """
        before = {name: partition.granules for name, partition in self._manager.held.items()}
        move = Move(before, {**before, **granules})
        async with AsyncExitStack() as locks:
            for name in move.movers:
                for lock in (self._changing[name], self._paging[name]):
                    await hold(lock, name, self._max_pause)
                    locks.callback(lock.release)
            self._prepared, placements = await asyncio.to_thread(self._prepare, move)
            self._move, self._locks = move, locks.pop_all()
        return placements

    async def halt(self) -> None:
        """Pause the tenants that move, those that are served already, when their work in flight has ended. Raises Conflict."""
        serving = {name: self._workers[name] for name in self._prepared if name in self._workers}
        await self._halted.enter_async_context(self._worker_control.halted(serving))

    async def commit(self) -> dict[str, Pause]:
        """Serve them from their new partitions, and close the old ones. Returns how long each was paused."""
        prepared = self._prepared
        self._manager.commit(self._move, {name: worker.partition for name, worker in prepared.items()})
        before = [self._workers[name] for name in prepared if name in self._workers]
        started = [name for name in prepared if name not in self._workers]
        self._workers.update(prepared)
        self._prepared = {}
        try:
            await self._halted.aclose()
            pauses = {name: Pause(self._worker_control.paused(name)) for name in prepared if name not in started}
            for name in started:
                self._worker_control.serve(name)
        finally:
            await self._end(before)
        return pauses

    async def discard(self) -> None:
        """Serve them from their old partitions, and close the new ones. Does nothing without a move."""
        prepared, self._prepared = self._prepared, {}
        await self._halted.aclose()
        await self._end(prepared.values())

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


def close_all(things: Iterable[Closing]) -> None:
    """Close each, in order. Blocks."""
    for thing in things:
        thing.close()
